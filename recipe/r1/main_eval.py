"""Score responses to the evaluation tasks: ``python -m recipe.r1.main_eval data.path=responses.parquet``.

The command is ``verl.trainer.main_eval`` with the scorer of this recipe.
"""

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_eval import run_eval


@hydra_main("evaluation", config_path="config")
def main(config: DictConfig) -> None:
    """Score with the composed configuration."""
    run_eval(config)


if __name__ == "__main__":
    main()
