"""The established entry of supervised training on the tree ``sft_trainer``; see ``verl.trainer.sft_trainer``.

``torchrun -m verl.trainer.fsdp_sft_trainer key=value ...``, or ``python -m`` for one process.
"""

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.sft_trainer import SFTTrainer, run_sft
from verl.utils.distributed import run_and_leave

FSDPSFTTrainer = SFTTrainer


@hydra_main("sft_trainer")
def main(config: DictConfig) -> None:
    """Run supervised training with the composed configuration."""
    run_sft(config)


if __name__ == "__main__":
    run_and_leave(main)

__all__ = ["FSDPSFTTrainer", "main", "run_sft"]
