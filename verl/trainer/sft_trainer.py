"""Supervised training: ``python -m verl.trainer.sft_trainer key=value ...``, or the same under ``torchrun``."""

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.run.refusal import checked, end_of_checks
from verl.trainer.sft.preflight import check_sft_inputs
from verl.utils.import_utils import lazy_exports

_TRAINER = "verl.trainer.sft.trainer"
__getattr__ = lazy_exports(
    __name__, dict.fromkeys(("SFTTrainer", "create_sft_dataset", "padded_batch", "run_sft"), _TRAINER)
)


def run_checked(config: DictConfig) -> None:
    """Check the inputs before torch is imported, and train."""
    checked(lambda: check_sft_inputs(config))
    end_of_checks()
    from verl.trainer.sft.trainer import run_sft

    run_sft(config)


@hydra_main("sft_trainer_engine")
def main(config: DictConfig) -> None:
    """Run supervised training with the composed configuration."""
    run_checked(config)


if __name__ == "__main__":
    from verl.utils.distributed import run_and_leave

    run_and_leave(main)
