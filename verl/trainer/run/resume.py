"""Find the checkpoint that a run resumes from, and check that it is whole and fits the run.

The launching process does this, so nothing here imports torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl.trainer.config.run_config import RunConfig, needs_critic
from verl.utils.checkpoint import find_complete_checkpoints, get_checkpoint_tracker_filename, verify_checkpoint
from verl.utils.checkpoint.files import archive_problem, backend_problem, world_size_problem

FOLDER_PREFIX = "global_step_"
DATA_NAME = "data.pt"


class ResumeError(ValueError, AssertionError):
    """``trainer.resume_mode`` or ``trainer.resume_from_path`` is wrong."""


class RemoteResumeError(ValueError, NotImplementedError):
    """Resuming from ``trainer.default_hdfs_dir`` is not supported."""


class IncompleteCheckpointError(ValueError):
    """The checkpoint to resume from is incomplete or damaged."""


def run_folder(config: DictConfig | RunConfig) -> Path:
    """Return the folder of the record and the checkpoints of a run."""
    return Path(os.path.expanduser(config.trainer.default_local_dir)).absolute()


def find_resume_folder(config: DictConfig) -> Path | None:
    """Return the folder of the checkpoint that a run resumes from; None if it starts from scratch.

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
        path = trainer.resume_from_path
        if not isinstance(path, str) or FOLDER_PREFIX not in path:
            raise ResumeError(
                f"trainer.resume_from_path={path!r} must be the path of a folder named {FOLDER_PREFIX}<step> when "
                "trainer.resume_mode=resume_path"
            )
        folder = Path(os.path.expanduser(path)).absolute()
        step_of(folder)
        return _checked(folder, root, config)
    step = read_tracker(root, config)
    return None if step is None else _checked(root / f"{FOLDER_PREFIX}{step}", root, config)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder.

    Raises: ResumeError when there is none.
    """
    digits = str(folder).rstrip("/").rpartition(FOLDER_PREFIX)[2]
    if not digits.isdigit():
        raise ResumeError(f"trainer.resume_from_path={folder} must end in {FOLDER_PREFIX}<step>")
    return int(digits)


def read_tracker(root: Path, config: DictConfig) -> int | None:
    """Return the step in the tracker file of ``trainer.default_local_dir``; None if there is no such file.

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


def _checked(folder: Path, root: Path, config: DictConfig) -> Path:
    """Return the folder if the checkpoint is whole and fits this run."""
    problems = _problems(folder, config)
    if problems:
        shown = "; ".join(problems[:4])
        raise IncompleteCheckpointError(f"checkpoint {folder} cannot be resumed from: {shown}. {_offer(root, config)}")
    return folder


def _problems(folder: Path, config: DictConfig) -> list[str]:
    trains_critic = needs_critic(config.critic.enable, str(config.algorithm.adv_estimator))
    roles = ["actor", "critic"] if trains_critic else ["actor"]
    return find_problems(folder, roles) or find_misfits(folder, roles, config)


def find_problems(folder: Path, roles: Sequence[str]) -> list[str]:
    """Return one sentence for each part of a checkpoint that is missing or cut short."""
    if not folder.is_dir():
        return ["the folder does not exist"]
    problems = [f"{role}: {problem}" for role in roles for problem in verify_checkpoint(folder / role)]
    damage = archive_problem(folder / DATA_NAME) if (folder / DATA_NAME).exists() else None
    if damage:
        problems.append(f"{DATA_NAME} {damage}")
    return problems


def find_misfits(folder: Path, roles: Sequence[str], config: DictConfig) -> list[str]:
    """Return one sentence for each role whose workers cannot read a checkpoint that is whole."""
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    nodes = {"actor": config.actor_rollout_ref.actor, "critic": config.critic}
    problems = {
        role: backend_problem(folder / role, nodes[role].strategy) or world_size_problem(folder / role, workers)
        for role in roles
    }
    return [f"{role}: {problem}" for role, problem in problems.items() if problem is not None]


def _offer(root: Path, config: DictConfig) -> str:
    """Tell the user how to go on without the checkpoint."""
    afresh = "trainer.resume_mode=disable starts from scratch"
    usable = [path for path in find_complete_checkpoints(root) if not _problems(Path(path), config)]
    if not usable:
        return f"There is no other checkpoint under {root} that this run can resume from; {afresh}"
    return (
        f"The latest complete one is {usable[-1]}: resume from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={usable[-1]}; {afresh}"
    )
