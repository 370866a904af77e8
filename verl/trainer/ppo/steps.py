"""How many steps a run has, and how many prompts a step. Imports neither torch nor the data set."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf, open_dict


def loader_batch_size(config: Any) -> int:
    """Return the prompts of one batch of the training loader: ``data.gen_batch_size``, or ``data.train_batch_size``."""
    data = config["data"]
    return int(data.get("gen_batch_size") or data["train_batch_size"])


def prompts_per_step(config: Any) -> int:
    """Return the prompts of a training batch: ``data.train_batch_size`` with dynamic sampling, else a loader batch."""
    groups = config["algorithm"].get("filter_groups")
    if isinstance(groups, Mapping) and groups.get("enable"):
        return int(config["data"]["train_batch_size"])
    return loader_batch_size(config)


def set_total_training_steps(config: Any, steps: int) -> None:
    """Write the number of steps to where the learning-rate schedules read it."""
    with open_dict(config):
        for key in ("actor_rollout_ref.actor.optim", "critic.optim"):
            if OmegaConf.select(config, key) is not None:
                OmegaConf.update(config, f"{key}.total_training_steps", steps)


def steps_known_early(config: Any) -> int | None:
    """Return the number of training steps where it can be told without loading the data, else None.

    It stands in the configuration that workers are constructed with, so they can start early only when it is known.
    """
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    data = config.data
    changed = (
        data.get("filter_overlong_prompts", True)
        or (data.get("custom_cls") or {}).get("path")
        or (data.get("datagen") or {}).get("path")
        or (data.get("sampler") or {}).get("class_path")
    )
    if changed:
        return None
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import as_file_list, localize

    files = localize(as_file_list(data.train_files))
    if not all(path.endswith(".parquet") for path in files):
        return None
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    return int(rows // loader_batch_size(config) * config.trainer.total_epochs)
