"""Reuse an earlier run's rollouts, to work on the later phases of a step."""

import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.utils.checkpoint.files import CheckpointError
from verl.utils.loading import UntrustedClassError, load_pickle

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class RolloutSkip:
    """Wraps ``generate_sequences`` of a worker group: load the rollout from a file, or generate and save it.

    ``actor_rollout_ref.rollout.skip_dump_dir`` holds one folder per run name and batch shape, with one file per batch.
    A file is used only for the prompts that it was generated from. Validation is always generated.
    """

    def __init__(self, config: Any, rollout_wg: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        data = config.data
        prompts = data.get("gen_batch_size") or data.train_batch_size
        experiment = data.get("experiment_name", config.trainer.experiment_name)
        project = data.get("project_name", config.trainer.project_name)
        name = f"{experiment}_{project}_GBS{prompts}__N{rollout.n}"
        self.path = Path(rollout.skip_dump_dir).expanduser() / name
        self.rows = prompts * rollout.n
        self.trusted_classes = list(config.trainer.get("trusted_classes") or ())
        self.rollout_wg = rollout_wg

    def wrap_generate_sequences(self) -> None:
        """Replace the method of the worker group."""
        self.path.mkdir(parents=True, exist_ok=True)
        generate = self.rollout_wg.generate_sequences

        def load_or_generate(prompts: "DataProto", *args: Any, **kwargs: Any) -> "DataProto":
            if prompts.meta_info.get("validate", False) or len(prompts) != self.rows:
                return generate(prompts, *args, **kwargs)
            first = prompts.meta_info.get("first_prompt", 0)  # above 0 in the later batches of a step
            step = prompts.meta_info.get("global_steps", 0)
            file = self.path / (f"{step}_{first}.pkl" if first else f"{step}.pkl")
            kept = self.load(file)
            if kept is None or not torch.equal(kept.batch["prompts"], prompts.batch["input_ids"]):
                kept = generate(prompts, *args, **kwargs)
                self.save(file, kept)
            return kept

        self.rollout_wg.generate_sequences = load_or_generate

    def load(self, path: Path) -> "DataProto | None":
        """Return the saved rollout; None if there is none or it cannot be read.

        Raises: UntrustedClassError when it names a class that may run code.
        """
        if not path.exists():
            return None
        try:
            kept: DataProto = load_pickle(path, self.trusted_classes)
        except UntrustedClassError:
            raise
        except (OSError, CheckpointError) as error:
            logger.warning("%s cannot be read (%s); generating the rollout again", path, error)
            return None
        logger.warning("loaded the rollout from %s instead of generating it", path)
        return kept

    def save(self, path: Path, rollout: "DataProto") -> None:
        """Save a rollout for later runs."""
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            pickle.dump(rollout, file)
        unfinished.replace(path)
