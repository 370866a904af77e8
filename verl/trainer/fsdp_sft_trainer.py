"""The established entry of supervised training on the tree ``sft_trainer``; see ``verl.trainer.sft_trainer``.

``torchrun -m verl.trainer.fsdp_sft_trainer key=value ...``, or ``python -m`` for one process.
"""

from typing import Any

from omegaconf import DictConfig

from verl.trainer import sft_trainer
from verl.trainer.config.cli import hydra_main


def __getattr__(name: str) -> Any:
    """Import ``FSDPSFTTrainer``, ``create_sft_dataset`` and ``run_sft``, and torch with them, at their first use."""
    return getattr(sft_trainer, name.removeprefix("FSDP"))


@hydra_main("sft_trainer")
def main(config: DictConfig) -> None:
    """Run supervised training with the composed configuration."""
    sft_trainer.run_checked(config)


if __name__ == "__main__":
    from verl.utils.distributed import run_and_leave

    run_and_leave(main)
