"""Supervised training: ``python -m verl.trainer.sft_trainer key=value ...``, or the same under ``torchrun``."""

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.sft.trainer import SFTTrainer, padded_batch, run_sft
from verl.utils.distributed import run_and_leave


@hydra_main("sft_trainer_engine")
def main(config: DictConfig) -> None:
    """Run supervised training with the composed configuration."""
    run_sft(config)


if __name__ == "__main__":
    run_and_leave(main)

__all__ = ["SFTTrainer", "main", "padded_batch", "run_sft"]
