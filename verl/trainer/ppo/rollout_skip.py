"""Reuse an earlier run's rollouts, to work on the later phases of a step."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from omegaconf import DictConfig

from verl.errors import CheckpointError, UntrustedClassError
from verl.protocol import DataProto as DataProto
from verl.utils.observe.console import get_console

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.single_controller.ray import RayWorkerGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_FOLDER = "/tmp/verl/rollout_dump"


class RolloutSkip:
    """Wraps ``generate_sequences`` of a worker group: load the rollout from a file, or generate and save it.

    The first batch goes to ``curr_path_dump``, a file in ``actor_rollout_ref.rollout.skip_dump_dir`` whose name is that
    of the run with the shape of its batches. Later batches go to files next to it, one per step and draw. A file is
    used only for the prompts that it was generated from, if it holds them; with ``skip_action=repeat`` the first file
    is used for all prompts, whose scores then mean nothing. Validation, and a step that is not one of ``skip_steps``,
    are always generated.
    """

    def __init__(self, config: DictConfig, rollout_wg: "RayWorkerGroup | AgentLoopManager") -> None:
        rollout = config.actor_rollout_ref.rollout
        data = config.data
        trainer = config.trainer
        self.n = int(rollout.get("n", 0))
        self.gbs = int(data.get("gen_batch_size") or data.get("train_batch_size", 0))
        self.exp_name = _name(data.get("experiment_name"), trainer.get("experiment_name"))
        self.project_name = _name(data.get("project_name"), trainer.get("project_name"))
        self.dumped_dir = Path(rollout.get("skip_dump_dir", DEFAULT_FOLDER)).expanduser()
        self.dumped_dir.mkdir(parents=True, exist_ok=True)
        self.steps = rollout.get("skip_steps")
        self.repeats = rollout.get("skip_action") == "repeat"
        self.trusted_classes = list(trainer.get("trusted_classes") or ())
        self._rollout_wg = rollout_wg

    @property
    def curr_path_dump(self) -> Path:
        """The file of the first batch."""
        return (self.dumped_dir / f"{self.exp_name}_{self.project_name}_GBS{self.gbs}__N{self.n}").absolute()

    def wrap_generate_sequences(self) -> None:
        """Replace the method of the worker group."""
        generate: Callable[..., DataProto] = self._rollout_wg.generate_sequences

        def load_or_generate(prompts: DataProto, *args: T, **kwargs: T) -> DataProto:
            if not self._keeps(prompts):
                return generate(prompts, *args, **kwargs)
            kept = self.try_load(prompts)
            if kept is None:
                kept = generate(prompts, *args, **kwargs)
                self.dump(kept, prompts)
            return kept

        setattr(self._rollout_wg, "generate_sequences", load_or_generate)  # noqa: B010 (a method, to type checkers)
        get_console().info("RolloutSkip: Successfully patched generate_sequences")

    def try_load(self, prompts: DataProto | None = None) -> DataProto | None:
        """Return the saved rollout of these prompts; None if there is none or it cannot be read.

        Raises: UntrustedClassError when a file names a class that may run code.
        """
        for path in (self._path_of_step(prompts), self.curr_path_dump):
            if not path.is_file():
                continue
            try:
                kept = DataProto.load_from_disk(path, self.trusted_classes)
            except UntrustedClassError:
                raise
            except (OSError, ValueError, CheckpointError) as error:
                logger.warning("%s cannot be read (%s); generating the rollout again", path, error)
                continue
            if _fits(kept, prompts) or (self.repeats and path == self.curr_path_dump):
                get_console().info("RolloutSkip: Successfully load pre-generated data from %s", path)
                return kept
        return None

    def dump(self, outputs: DataProto, prompts: DataProto | None = None) -> None:
        """Save a rollout for later runs."""
        path = self._path_of_step(prompts) if self.curr_path_dump.exists() else self.curr_path_dump
        unfinished = path.with_name(f"{path.name}.tmp")
        outputs.save_to_disk(unfinished)
        unfinished.replace(path)
        get_console().info("RolloutSkip: Successfully dump data in %s", path)

    def _keeps(self, prompts: DataProto) -> bool:
        """Whether the rollout of these prompts is used for training, and therefore saved."""
        if not isinstance(prompts, DataProto):
            return True
        meta = prompts.meta_info
        sampled = not meta.get("validate", False) and meta.get("do_sample", True)
        is_chosen = self.steps is None or meta.get("global_steps") in self.steps
        return bool(sampled) and is_chosen and len(prompts) in (self.gbs * self.n, 0)

    def _path_of_step(self, prompts: DataProto | None) -> Path:
        meta = prompts.meta_info if isinstance(prompts, DataProto) else {}
        first = meta.get("first_prompt", 0)  # above 0 in the later batches of a step
        name = f"{self.curr_path_dump.name}_step{meta.get('global_steps', 0)}"
        return self.curr_path_dump.with_name(f"{name}_{first}" if first else name)


def _name(*names: str | None) -> str:
    return next((name for name in names if isinstance(name, str)), "")


def _fits(kept: DataProto, prompts: DataProto | None) -> bool:
    """Whether a rollout was generated from these prompts; True if one of the two does not hold its prompts."""
    if not isinstance(prompts, DataProto) or kept.batch is None or prompts.batch is None:
        return True
    held = kept.batch.get("prompts", None)
    asked = prompts.batch.get("input_ids", None)
    return held is None or asked is None or torch.equal(held, asked)
