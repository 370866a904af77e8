"""Find the checkpoint that a run resumes from, and check that it is whole and fits the run.

The launching process does this, so nothing here imports torch.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig

from verl.errors import CheckpointError, UnsupportedInput, WrongInput, WrongSetting
from verl.trainer.config.run_config import RESUME_MODES, RunConfig
from verl.utils.checkpoint import files, find_complete_checkpoints, get_checkpoint_tracker_filename, verify_checkpoint
from verl.utils.checkpoint.model_fields import start_problem
from verl.utils.dataset.config import order_problem
from verl.utils.failures import on_failure, replacing_errors
from verl.utils.loading import texts_in_state, untrusted, untrusted_classes
from verl.workers.config import HFModelConfig
from verl.workers.config.actor_critic import CheckpointConfig
from verl.workers.config.model import read_config_json
from verl.workers.config.overrides import overridden

T = TypeVar("T")

logger = logging.getLogger(__name__)

DATA_NAME = "data.pt"
MISSING_DATA = "is missing: without it the training data would start over. Copy it back"
ANOTHER = "Name another one in trainer.resume_from_path, or start from scratch with trainer.resume_mode=disable"


def run_folder(config: DictConfig | RunConfig) -> Path:
    """Return the folder of the record and the checkpoints of a run."""
    return Path(os.path.expanduser(config.trainer.default_local_dir)).absolute()


def find_resume_folder(run: RunConfig) -> Path | None:
    """Return the folder of the checkpoint that a run resumes from; None if it starts from scratch.

    With ``auto``, a folder without a tracker file but with a complete checkpoint is refused: the run would replace it.

    Raises: WrongSetting, UnsupportedInput, WrongInput; all are a ValueError.
    """
    trainer = run.trainer
    if trainer.resume_mode not in RESUME_MODES:
        raise WrongSetting(f"trainer.resume_mode={trainer.resume_mode!r} must be one of {', '.join(RESUME_MODES)}")
    if trainer.resume_mode == "disable":
        return None
    if trainer.default_hdfs_dir is not None:
        raise UnsupportedInput(
            f"trainer.default_hdfs_dir={trainer.default_hdfs_dir}: resuming from it is not supported; copy the "
            "checkpoint to trainer.default_local_dir and leave default_hdfs_dir null, or set "
            "trainer.resume_mode=disable"
        )
    root = run_folder(run)
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        step_of(path)
        assert path is not None
        return _checked(Path(os.path.expanduser(path)).absolute(), root, run)
    step = read_tracker(root, run)
    if step is None:
        refuse_unnamed(root)
        return None
    return _checked(root / f"{files.STEP_FOLDER}{step}", root, run)


def refuse_unnamed(root: Path) -> None:
    """Refuse to start from scratch if complete checkpoints exist that no tracker names, or if the named one is gone.

    Raises: WrongSetting naming the newest one, and the ways on.
    """
    complete = find_complete_checkpoints(root)
    tracker = get_checkpoint_tracker_filename(root)
    if complete:
        raise WrongSetting(
            f"trainer.resume_mode=auto: {tracker} names no checkpoint, but {complete[-1]} is complete, and "
            f"a run from scratch would replace it: continue with trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={complete[-1]}, or start from scratch with trainer.resume_mode=disable"
        )
    if os.path.lexists(tracker):
        raise WrongSetting(
            f"trainer.resume_mode=auto: the checkpoint that {tracker} names does not exist: copy it back, or start "
            "from scratch with trainer.resume_mode=disable"
        )


def tell_replaced(root: Path, folder: Path | None) -> None:
    """Log one line with the complete checkpoints under ``root`` after the one that the run resumes from."""
    start = 0 if folder is None else step_of(folder)
    newer = [Path(path).name for path in find_complete_checkpoints(root, after_step=start)]
    if newer:
        begins = "from scratch" if folder is None else f"after step {start}"
        logger.warning(
            "%s holds newer checkpoints (%s): the run starts %s, and replaces each that it reaches and saves again",
            root,
            ", ".join(newer),
            begins,
        )


def name_start(root: Path, folder: Path | None) -> None:
    """Let the tracker under ``root`` name the checkpoint that the run starts from, or none if that is not under it.

    So ``auto`` goes on from there, or is refused, if the run dies before its first save: newer checkpoints are those
    that the user has decided to replace. This comes before the record of the run is cut back to that step.
    """
    step = None if folder is None else step_of(folder)
    named = root / f"{files.STEP_FOLDER}{step}"
    if folder is None or not (named.is_dir() and named.samefile(folder)):
        files.remove_tracker(root)
        return
    tracker = Path(get_checkpoint_tracker_filename(root))
    if not tracker.is_file() or tracker.read_bytes().strip() != str(step).encode():
        files.write_tracker_atomically(root, step_of(named))


def tell_removed(folders: Sequence[Path]) -> None:
    """Log one line with the partial checkpoints that a complete save has removed."""
    if folders:
        logger.warning("removed partial checkpoints that a killed run had left: %s", ", ".join(map(str, folders)))


def step_of(folder: str | Path | None) -> int:
    """Return the step in the name of the checkpoint folder that a run resumes from.

    Raises: WrongSetting when there is none.
    """
    step = None if folder is None else files.step_in_name(folder)
    if step is None:
        raise WrongSetting(f"trainer.resume_from_path={folder} must name a {files.STEP_FOLDER}<N> folder")
    return step


def read_tracker(root: Path, run: RunConfig) -> int | None:
    """Return the step in the tracker file of ``trainer.default_local_dir``; None if there is no such file.

    Raises: WrongInput when the file does not hold a number.
    """
    path = Path(get_checkpoint_tracker_filename(root))
    if not os.path.lexists(path):
        return None
    text = files.tracker_text(path)
    step = files.as_step(text)
    if step is None:
        raise WrongInput(f"{path} holds {text[:40]!r} instead of a step. {_offer(root, run)}")
    return step


# ---- integrity


def _checked(folder: Path, root: Path, run: RunConfig) -> Path:
    """Return the folder if the checkpoint is whole and fits this run."""
    problems = _problems(folder, run)
    if problems:
        raise damaged_checkpoint(folder, problems, _offer(root, run))
    return folder


def damaged_checkpoint(folder: str | Path, problems: Sequence[str], offer: str) -> WrongInput:
    """Return the error of a checkpoint that cannot be resumed from; ``offer`` tells the user how to go on."""
    return WrongInput(f"checkpoint {folder} cannot be resumed from: {'; '.join(problems[:4])}. {offer}")


def _problems(folder: Path, run: RunConfig) -> list[str]:
    roles = ["actor"] if run.critic is None else ["actor", "critic"]
    return find_problems(folder, roles) or find_untrusted(folder, run) or find_misfits(folder, run)


def restoring(path: Path) -> AbstractContextManager[None]:
    """Name the file in the error when a loader, sampler or data set cannot restore its content.

    Raises: WrongInput.
    """

    def named(error: Exception) -> WrongInput:
        reason = f"{type(error).__name__}: {error}"
        return WrongInput(f"{path} cannot be restored ({reason}): it is damaged or of other data. {ANOTHER}")

    return replacing_errors(named)


def batches_after(restored_from: Path, loader: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a loader that goes on from the state in a file; name the file if it cannot."""
    with restoring(restored_from):
        batches = iter(loader)
    with on_failure(methodcaller("add_note", f"The position in the data was read from {restored_from}")):
        first = next(batches, None)
    if first is not None:
        yield first
    yield from batches


def find_problems(folder: Path, roles: Sequence[str]) -> list[str]:
    """Return one sentence for each part of a checkpoint that is missing or cut short."""
    if not folder.is_dir():
        return ["the folder does not exist"]
    problems = [f"{role}: {problem}" for role in roles for problem in verify_checkpoint(folder / role)]
    if not problems:  # otherwise the file with the step may be damaged
        renamed = [(role, files.renamed_problem(folder, folder / role)) for role in roles]
        problems = [f"{role}: {problem}" for role, problem in renamed if problem]
    if not (folder / DATA_NAME).exists():
        problems.append(f"{DATA_NAME} {MISSING_DATA}")
    elif damage := files.archive_problem(folder / DATA_NAME):
        problems.append(f"{DATA_NAME} {damage}")
    return problems


def find_untrusted(folder: Path, run: RunConfig) -> list[str]:
    """Return why the state of the data loader may not be loaded."""
    path = folder / DATA_NAME
    try:
        names = untrusted_classes(path, run.trainer.trusted_classes)
    except CheckpointError as error:
        return [str(error)]
    return [str(untrusted(path, names))] if names else []


def find_misfits(folder: Path, run: RunConfig) -> list[str]:
    """Return one sentence for each complete part of a checkpoint that this run cannot read."""
    problems = []
    shared = run.actor_rollout_ref
    critic = run.critic
    roles = {"actor": (shared.actor.strategy, shared.model, shared.actor.checkpoint)}
    if critic is not None:
        roles["critic"] = critic.strategy, critic.model.as_model_config(), critic.checkpoint
    for role, (strategy, model, checkpoint) in roles.items():
        problem = misfit(folder / role, strategy, run.trainer.world_size, model, checkpoint)
        if problem is not None:
            problems.append(f"{role}: {problem}")
    saved = next(
        (text for text in texts_in_state(folder / DATA_NAME, "order") if text.startswith("data.shuffle=")), None
    )
    if (problem := order_problem(saved, run.data.order)) is not None:
        problems.append(f"{DATA_NAME}: {problem}")
    return problems


def misfit(
    folder: Path, strategy: str, world_size: int, model: HFModelConfig, checkpoint: CheckpointConfig
) -> str | None:
    """Return why the workers of a role cannot read its checkpoint, judged by the files on this machine; else None."""
    problem = files.backend_problem(folder, strategy) or files.world_size_problem(folder, world_size)
    if problem is not None or "model" not in checkpoint.load_contents:
        return problem
    content = overridden(read_config_json(model.path), model.override_config)
    return start_problem(folder, content, model.lora_alpha if model.lora_rank else None)


def _offer(root: Path, run: RunConfig) -> str:
    """Tell the user how to go on without the checkpoint."""
    afresh = "trainer.resume_mode=disable starts from scratch"
    usable = [path for path in find_complete_checkpoints(root) if not _problems(Path(path), run)]
    if not usable:
        return f"There is no other checkpoint under {root} that this run can resume from; {afresh}"
    return (
        f"The latest complete one is {usable[-1]}: resume from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={usable[-1]}; {afresh}"
    )
