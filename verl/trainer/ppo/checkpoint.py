"""Checkpoints of a run: the workers' parts, the state of the driver, and the tracker file that names the latest."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from verl.single_controller.base.phase import phase
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.state import RunState
from verl.trainer.run.resume import DATA_NAME, FOLDER_PREFIX, IncompleteCheckpointError, run_folder, step_of
from verl.utils import hdfs_io
from verl.utils.checkpoint import should_save_ckpt_esi, write_tracker_atomically
from verl.utils.checkpoint.files import write_file

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.algos.kl import KLController
    from verl.single_controller.ray import RayWorkerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointPlan:
    """When checkpoints are written, and where to.

    Attributes:
        root: folder of the run.
        remote: folder that checkpoints are copied to; None for no copy.
        frequency: steps between two checkpoints; 0 or less for none.
        redundant_s: margin in seconds of the save before rented capacity expires.
        keep: role -> number of checkpoints that are kept; None keeps all.
        in_background: whether workers write while training goes on.
    """

    root: Path
    remote: str | None
    frequency: int
    redundant_s: float
    keep: Mapping[str, int | None]
    in_background: bool

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Read the plan from the configuration of a run."""
        options = run.trainer
        keep = {"actor": options.max_actor_ckpt_to_keep, "critic": options.max_critic_ckpt_to_keep}
        if options.remove_previous_ckpt_in_save:
            keep = {"actor": 1, "critic": 1}
            _warn_of_deprecated_key()
        return cls(
            root=run_folder(run),
            remote=options.default_hdfs_dir,
            frequency=options.save_freq,
            redundant_s=options.esi_redundant_time,
            keep=keep,
            in_background=run.actor_rollout_ref.actor.checkpoint.async_save
            or (run.critic is not None and run.critic.checkpoint.async_save),
        )

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.root / f"{FOLDER_PREFIX}{step}"

    def is_due(self, state: RunState) -> bool:
        """Whether to save after the current step: by frequency, at the end, or because capacity is about to expire."""
        if should_save_ckpt_esi(state.max_step_s, redundant_time=self.redundant_s):
            logger.warning("the rented capacity is about to expire: saving step %d early", state.step)
            return True
        return state.is_last_step or state.step % self.frequency == 0


@cache
def _warn_of_deprecated_key() -> None:
    logger.warning("trainer.remove_previous_ckpt_in_save is deprecated: set max_actor_ckpt_to_keep=1")


# ---- the state of the driver


def save_driver_state(folder: str | Path, dataloader_state: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write ``data.pt``: the state of the training loader and of the driver, in one file."""
    content = {"dataloader": dataloader_state, "driver": dict(state)}
    write_file(folder, DATA_NAME, lambda file: torch.save(content, file))


def load_driver_state(folder: str | Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return (loader state, driver state); (None, {}) if ``data.pt`` is missing.

    It also reads a file that holds the loader state alone, as other tools write it.

    Raises: IncompleteCheckpointError when the file is cut short.
    """
    path = Path(folder, DATA_NAME)
    if not path.exists():
        logger.warning("%s is missing: the training data start from the beginning", path)
        return None, {}
    try:
        content = torch.load(path, weights_only=False)
    except (EOFError, RuntimeError, OSError, ValueError) as error:
        raise IncompleteCheckpointError(f"{path} cannot be read: {error}") from error
    if isinstance(content, dict) and content.keys() == {"dataloader", "driver"}:
        return content["dataloader"], content["driver"]
    return content, {}


def remove_emptied_folders(root: str | Path) -> None:
    """Remove checkpoint folders whose parts the workers have deleted."""
    for folder in Path(root).glob(f"{FOLDER_PREFIX}*"):
        children = list(folder.iterdir())
        parts = [child for child in children if child.is_dir() and any(child.iterdir())]
        if not parts and any(child.name == DATA_NAME for child in children):
            for child in children:
                if child.is_dir():
                    child.rmdir()
                else:
                    child.unlink()
            folder.rmdir()


# ---- a whole checkpoint


def save_checkpoint(
    plan: CheckpointPlan,
    state: RunState,
    groups: Mapping[str, "RayWorkerGroup"],
    loader: "StatefulDataLoader",
    kl_ctrl: "KLController",
) -> None:
    """Write the parts of the workers, the state of the driver, and last the tracker; then remove older checkpoints.

    If workers write in the background, the tracker waits for ``finish_checkpoint``.

    Args: ``groups`` maps a role, actor or critic, to its workers.
    """
    finish_checkpoint(plan, state, groups)
    folder = plan.folder(state.step)
    remote = None if plan.remote is None else f"{plan.remote}/{folder.name}"
    for role, group in groups.items():
        group.save_checkpoint(f"{folder}/{role}", None if remote is None else f"{remote}/{role}", state.step)
    driver = {"kl_ctrl_in_reward": kl_ctrl.state_dict(), "seed": state.seed, "epoch": state.epoch}
    save_driver_state(folder, loader.state_dict(), driver)
    if remote is not None:
        hdfs_io.makedirs(remote, exist_ok=True)
        hdfs_io.copy(f"{folder}/{DATA_NAME}", f"{remote}/{DATA_NAME}")
    state.unfinished_checkpoint = state.step
    finish_checkpoint(plan, state, groups, wait=not plan.in_background or state.is_last_step)


def finish_checkpoint(
    plan: CheckpointPlan, state: RunState, groups: Mapping[str, "RayWorkerGroup"], wait: bool = True
) -> None:
    """Name the unfinished checkpoint as the latest if all workers are done; ``wait`` waits for them."""
    step = state.unfinished_checkpoint
    if step is None:
        return
    if plan.in_background:
        done = [all(group.finish_checkpoint(wait)) for group in groups.values()]
        if not all(done):
            return
    state.unfinished_checkpoint = None
    write_tracker_atomically(plan.root, step)
    for role, group in groups.items():
        keep = plan.keep[role]
        if keep:
            group.keep_latest_checkpoints(f"{plan.folder(step)}/{role}", keep)
    remove_emptied_folders(plan.root)


def load_checkpoint(
    folder: Path,
    state: RunState,
    groups: Mapping[str, "RayWorkerGroup"],
    loader: "StatefulDataLoader",
    kl_ctrl: "KLController",
    delete_after_load: bool = False,
) -> None:
    """Restore workers and driver from the folder of a checkpoint.

    Args: ``groups`` maps a role, actor or critic, to its workers.
    """
    state.step = step_of(folder)
    with phase("load_checkpoint", step=state.step):
        for role, group in groups.items():
            group.load_checkpoint(str(folder / role), del_local_after_load=delete_after_load)
    state.weights_version += 1
    loader_state, driver = load_driver_state(folder)
    if loader_state is not None:
        loader.load_state_dict(loader_state)
    # Checkpoints of older versions do not hold the epoch.
    state.epoch = driver.get("epoch", (state.step - 1) // len(loader))
    if "kl_ctrl_in_reward" in driver:
        kl_ctrl.load_state_dict(driver["kl_ctrl_in_reward"])
    if driver.get("seed", state.seed) != state.seed:
        logger.warning("trainer.seed is %d, and was %d in the checkpoint", state.seed, driver["seed"])
