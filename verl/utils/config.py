"""Import path of the established verl interface for the helpers that read the configuration tree."""

from collections.abc import Collection, MutableMapping
from typing import Any

from omegaconf import DictConfig

from verl.base_config import omega_conf_to_dataclass as omega_conf_to_dataclass
from verl.utils.json_types import Json


def update_dict_with_config(dictionary: MutableMapping[str, Json], config: Any) -> None:
    """Replace each value of ``dictionary`` by the attribute of ``config`` with the same name, if there is one."""
    for key in dictionary:
        if hasattr(config, key):
            dictionary[key] = getattr(config, key)


def validate_config(
    config: DictConfig, use_reference_policy: bool, use_critic: bool, recipe_nodes: Collection[str] = ()
) -> None:
    """Check the configuration tree of a user's fork of verl before anything starts, called by the fork's main program.

    The fork may add keys, register names and draw prompts for itself; a setting that only its code can judge passes.
    ``recipe_nodes`` are further nodes that it reads.

    Raises: ConfigError listing everything that is wrong.
    """
    from verl.trainer.config.validation import examined_config

    examined_config(config, use_reference_policy, use_critic, recipe_nodes, of_fork=True).checked()
