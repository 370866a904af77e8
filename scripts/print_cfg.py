"""Print a composed configuration.

python scripts/print_cfg.py --cfg job [--config-name=sft_trainer_engine] [overrides]
"""

import sys

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.cli import hydra_main


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Print the configuration as YAML, with resolved interpolations."""
    sys.stdout.write(OmegaConf.to_yaml(config, resolve=True))


if __name__ == "__main__":
    main()
