"""The number of training steps of a run. Imports neither torch nor the data set."""

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.trainer.config.run_config import RunConfig


def set_total_training_steps(config: DictConfig, steps: int) -> None:
    """Write the number of steps to the keys that the learning-rate schedules of the workers read."""
    with open_dict(config):
        for key in ("actor_rollout_ref.actor.optim", "critic.optim"):
            if OmegaConf.select(config, key) is not None:
                OmegaConf.update(config, f"{key}.total_training_steps", steps)


def steps_known_early(config: DictConfig) -> int | None:
    """Return the number of training steps if it is known without loading the data, else None.

    Workers are constructed with this number, so they can start early only if it is known.
    """
    run = RunConfig.parse(config)
    data = run.data
    if run.trainer.total_training_steps is not None:
        return run.trainer.total_training_steps
    if data.filter_overlong_prompts or data.custom_cls.path or data.datagen.path or data.sampler.class_path:
        return None  # the number of rows changes
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import localize

    files = localize(data.train_paths)
    if not all(path.endswith(".parquet") for path in files):
        return None
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    return int(rows) // data.loader_batch_size * run.trainer.total_epochs
