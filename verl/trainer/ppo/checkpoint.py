"""The driver's part of a checkpoint: which one to resume from, its own state, and the tracker file.

Nothing here imports torch before it is needed: the launching process asks where a run resumes from.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils import hdfs_io
from verl.utils.checkpoint import (
    find_complete_checkpoints,
    get_checkpoint_tracker_filename,
    verify_checkpoint,
    write_tracker_atomically,
)
from verl.utils.checkpoint.files import archive_problem, backend_problem, world_size_problem, write_file

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "global_step_"
DATA_NAME = "data.pt"


class ResumeError(ValueError, AssertionError):
    """The configuration does not say where to resume from, or says it wrongly."""


class RemoteResumeError(ValueError, NotImplementedError):
    """Resuming from ``trainer.default_hdfs_dir`` was asked for."""


class IncompleteCheckpointError(ValueError):
    """The checkpoint to resume from is missing parts."""


def run_folder(config: Any) -> Path:
    """Return the folder in which a run keeps its record and its checkpoints."""
    return Path(os.path.expanduser(config.trainer.default_local_dir)).absolute()


def find_resume_folder(config: Any) -> Path | None:
    """Return the folder of the checkpoint that a run continues, None where it starts from scratch.

    Raises: ResumeError, RemoteResumeError, IncompleteCheckpointError; all are a ValueError.
    """
    trainer = config.trainer
    if trainer.resume_mode not in ("auto", "disable", "resume_path"):
        raise ResumeError(f"trainer.resume_mode={trainer.resume_mode!r} must be auto, disable or resume_path")
    if trainer.resume_mode == "disable":
        return None
    if trainer.default_hdfs_dir is not None:
        raise RemoteResumeError(
            f"trainer.default_hdfs_dir={trainer.default_hdfs_dir}: resuming from it is not supported; copy the "
            "checkpoint to trainer.default_local_dir and leave default_hdfs_dir null, or set "
            "trainer.resume_mode=disable"
        )
    root = run_folder(config)
    if trainer.resume_mode == "resume_path":
        return _checked(_explicit_folder(trainer.resume_from_path), root, config)
    step = read_tracker(root, config)
    if step is None:
        return None
    return _checked(root / f"{FOLDER_PREFIX}{step}", root, config)


def _explicit_folder(path: Any) -> Path:
    if not isinstance(path, str) or FOLDER_PREFIX not in path:
        raise ResumeError(
            f"trainer.resume_from_path={path!r} must be the path of a folder named {FOLDER_PREFIX}<step> when "
            "trainer.resume_mode=resume_path"
        )
    folder = Path(os.path.expanduser(path)).absolute()
    step_of(folder)
    return folder


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder.

    Raises: ResumeError when there is none.
    """
    digits = str(folder).rstrip("/").rpartition(FOLDER_PREFIX)[2]
    if not digits.isdigit():
        raise ResumeError(f"trainer.resume_from_path={folder} must end in {FOLDER_PREFIX}<step>")
    return int(digits)


def read_tracker(root: Path, config: Any) -> int | None:
    """Return the step in the tracker file of ``trainer.default_local_dir``, None where there is no such file.

    Raises: IncompleteCheckpointError when the file does not hold a number.
    """
    path = Path(get_checkpoint_tracker_filename(root))
    if not path.exists():
        return None
    text = path.read_text().strip()
    if not text.isdigit():
        raise IncompleteCheckpointError(f"{path} holds {text[:40]!r} instead of a step. {_offer(root, config)}")
    return int(text)


# ---- integrity


def _checked(folder: Path, root: Path, config: Any) -> Path:
    """Return the folder when every part of the checkpoint is whole and fits this run."""
    problems = _problems(folder, config)
    if problems:
        shown = "; ".join(problems[:4])
        raise IncompleteCheckpointError(f"checkpoint {folder} cannot be resumed from: {shown}. {_offer(root, config)}")
    return folder


def _problems(folder: Path, config: Any) -> list[str]:
    roles = _roles(config)
    return find_problems(folder, roles) or find_misfits(folder, roles, config)


def _roles(config: Any) -> list[str]:
    from verl.trainer.ppo.utils import need_critic

    return ["actor", "critic"] if need_critic(config) else ["actor"]


def find_problems(folder: Path, roles: list[str]) -> list[str]:
    """Return what is missing or cut short in a checkpoint, as sentences; an empty list when it is whole."""
    if not folder.is_dir():
        return ["the folder does not exist"]
    problems = [f"{role}: {problem}" for role in roles for problem in verify_checkpoint(folder / role)]
    damage = archive_problem(folder / DATA_NAME) if (folder / DATA_NAME).exists() else None
    return problems + ([f"{DATA_NAME} {damage}"] if damage else [])


def find_misfits(folder: Path, roles: list[str], config: Any) -> list[str]:
    """Return why a checkpoint that is whole cannot be read by the workers of this run."""
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    nodes = {"actor": config.actor_rollout_ref.actor, "critic": config.critic}
    problems = {
        role: backend_problem(folder / role, nodes[role].strategy) or world_size_problem(folder / role, workers)
        for role in roles
    }
    return [f"{role}: {problem}" for role, problem in problems.items() if problem is not None]


def _offer(root: Path, config: Any) -> str:
    """Say how to go on without the checkpoint that cannot be used."""
    afresh = "trainer.resume_mode=disable starts afresh"
    usable = [path for path in find_complete_checkpoints(root) if not _problems(Path(path), config)]
    if not usable:
        return f"There is no other checkpoint under {root} that this run can resume from; {afresh}"
    return (
        f"The latest complete one is {usable[-1]}: resume from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={usable[-1]}; {afresh}"
    )


# ---- the driver's own state


def save_driver_state(folder: str | Path, dataloader_state: Any, state: Mapping[str, Any]) -> None:
    """Write ``data.pt``: the state of the training loader and that of the driver, in one piece."""
    import torch

    content = {"dataloader": dataloader_state, "driver": dict(state)}
    write_file(folder, DATA_NAME, lambda file: torch.save(content, file))


def load_driver_state(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """Return (loader state, driver state); (None, {}) where ``data.pt`` is missing.

    A file that holds the loader state alone is read too.

    Raises: IncompleteCheckpointError when the file is cut short.
    """
    import torch

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
    """Remove checkpoint folders in which the workers have deleted their parts, so that no shells are left."""
    for folder in Path(root).glob(f"{FOLDER_PREFIX}*"):
        children = list(folder.iterdir())
        parts = [child for child in children if child.is_dir() and any(child.iterdir())]
        if not parts and any(child.name == DATA_NAME for child in children):
            for child in children:
                child.rmdir() if child.is_dir() else child.unlink()
            folder.rmdir()


# ---- a whole checkpoint


def save_checkpoint(trainer: "RayPPOTrainer") -> None:
    """Write the parts of the workers, that of the driver, and then the tracker; only after it, older ones are removed.

    Where workers write beside training, the tracker waits for ``finish_checkpoint``.
    """
    finish_checkpoint(trainer)
    config, step = trainer.config.trainer, trainer.global_steps
    name = f"{FOLDER_PREFIX}{step}"
    root = run_folder(trainer.config)
    folder = f"{root}/{name}"
    remote = None if config.default_hdfs_dir is None else f"{config.default_hdfs_dir}/{name}"
    if config.get("remove_previous_ckpt_in_save", False):
        logger.warning("trainer.remove_previous_ckpt_in_save is deprecated: set max_actor_ckpt_to_keep=1")
    for role, group in _groups(trainer).items():
        remote_part = None if remote is None else f"{remote}/{role}"
        group.save_checkpoint(f"{folder}/{role}", remote_part, step)
    state = {"kl_ctrl_in_reward": trainer.kl_ctrl_in_reward.state_dict(), "seed": trainer.run_seed}
    state["epoch"] = trainer.epoch
    save_driver_state(folder, trainer.train_dataloader.state_dict(), state)
    if remote is not None:
        hdfs_io.makedirs(remote, exist_ok=True)
        hdfs_io.copy(f"{folder}/{DATA_NAME}", f"{remote}/{DATA_NAME}")
    trainer.unfinished_checkpoint = step
    finish_checkpoint(trainer, wait=not _is_async(trainer.config) or trainer.is_last_step)


def finish_checkpoint(trainer: "RayPPOTrainer", wait: bool = True) -> None:
    """Name the checkpoint that is being written as the latest, if all workers are done; or ``wait`` for them."""
    step = trainer.unfinished_checkpoint
    if step is None:
        return
    if _is_async(trainer.config):
        done = [all(group.finish_checkpoint(wait)) for group in _groups(trainer).values()]
        if not all(done):
            return
    trainer.unfinished_checkpoint = None
    root = run_folder(trainer.config)
    write_tracker_atomically(root, step)
    keep = _limits(trainer.config.trainer)
    for role, group in _groups(trainer).items():
        if keep[role]:
            group.keep_latest_checkpoints(f"{root}/{FOLDER_PREFIX}{step}/{role}", keep[role])
    remove_emptied_folders(root)


def _groups(trainer: "RayPPOTrainer") -> dict[str, Any]:
    groups = {"actor": trainer.actor_rollout_wg, "critic": trainer.critic_wg}
    return {role: group for role, group in groups.items() if group is not None}


def _limits(config: Any) -> dict[str, int | None]:
    """Return how many checkpoints of each role are kept."""
    if config.get("remove_previous_ckpt_in_save", False):
        return {"actor": 1, "critic": 1}
    return {"actor": config.max_actor_ckpt_to_keep, "critic": config.max_critic_ckpt_to_keep}


def _is_async(config: Any) -> bool:
    return bool(config.actor_rollout_ref.actor.checkpoint.async_save or config.critic.checkpoint.async_save)


def load_checkpoint(trainer: "RayPPOTrainer") -> int | None:
    """Restore workers and driver from the checkpoint that the configuration names; returns its step, or None."""
    from verl.single_controller.base.phase import phase

    folder = find_resume_folder(trainer.config)
    if folder is None:
        return None
    trainer.global_steps = step_of(folder)
    remove = trainer.config.trainer.del_local_ckpt_after_load
    with phase("load_checkpoint", step=trainer.global_steps):
        trainer.actor_rollout_wg.load_checkpoint(str(folder / "actor"), del_local_after_load=remove)
        if trainer.critic_wg is not None:
            trainer.critic_wg.load_checkpoint(str(folder / "critic"), del_local_after_load=remove)
    loader_state, state = load_driver_state(folder)
    if loader_state is not None:
        trainer.train_dataloader.load_state_dict(loader_state)
    trainer.epoch = state.get("epoch", (trainer.global_steps - 1) // len(trainer.train_dataloader))
    if "kl_ctrl_in_reward" in state:
        trainer.kl_ctrl_in_reward.load_state_dict(state["kl_ctrl_in_reward"])
    if state.get("seed", trainer.run_seed) != trainer.run_seed:
        logger.warning("trainer.seed is %d, and was %d in the checkpoint", trainer.run_seed, state["seed"])
    return trainer.global_steps
