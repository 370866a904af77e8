"""Checkpoints of a run: the workers' parts, the state of the driver, and the tracker file that names the latest."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.algos.kl import KLController
from verl.errors import CheckpointError, UntrustedClassError, WrongInput
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.loaders import Rows
from verl.trainer.ppo.reward import RewardFn
from verl.trainer.ppo.state import RunState
from verl.trainer.run.resume import (
    ANOTHER,
    DATA_NAME,
    MISSING_DATA,
    damaged_checkpoint,
    find_resume_folder,
    name_start,
    restoring,
    run_folder,
    step_of,
    tell_removed,
)
from verl.utils import hdfs_io
from verl.utils.checkpoint import should_save_ckpt_esi, write_tracker_atomically
from verl.utils.checkpoint.files import (
    STEP_FOLDER,
    FileRecord,
    Manifest,
    file_problems,
    record_file,
    step_folders,
    write_file,
)
from verl.utils.checkpoint.model_fields import fields_problem, forward_fields
from verl.utils.checkpoint.removal import SaveMark, remove_checkpoint, remove_leftovers
from verl.utils.dataset.factory import (
    SavedState,
    check_order,
    digest_of,
    has_state,
    order_of,
    warn_of_lost_state,
    warn_of_other_batch_size,
    warn_of_other_data,
)
from verl.utils.json_types import Json, JsonObject
from verl.utils.loading import load_state
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)


# ---- the state of the driver


class DriverState(TypedDict, total=False):
    """The driver's part of a checkpoint; checkpoints of older versions lack some fields."""

    step: int
    seed: int
    epoch: int
    spares_drawn: int
    kl_ctrl_in_reward: dict[str, float]
    kl_coef: float
    data_digest: str | None
    order: str | None
    train_batch_size: int
    reference: Mapping[str, Json]
    learners: Mapping[str, SavedState]
    learned: SavedState
    extra_files: list[str]
    extra_records: list[dict[str, Any]]


def save_driver_state(folder: str | Path, dataloader_state: Mapping[str, SavedState], state: DriverState) -> None:
    """Write ``data.pt``: the state of the training loader and of the driver, in one file."""
    content = {"dataloader": dataloader_state, "driver": dict(state)}
    write_file(folder, DATA_NAME, lambda file: torch.save(content, file))


def load_driver_state(
    folder: str | Path, trusted_classes: Iterable[str] = ()
) -> tuple[dict[str, SavedState], DriverState]:
    """Return (loader state, driver state).

    It also reads a file that holds the loader state alone, as other tools write it.

    Raises: UntrustedClassError, a ValueError, when the state names classes that may run code;
        WrongInput when the file is missing or damaged.
    """
    path = Path(folder, DATA_NAME)
    try:
        content = load_state(path, trusted_classes)
    except FileNotFoundError:
        raise WrongInput(f"{path} {MISSING_DATA}") from None
    except UntrustedClassError:
        raise
    except CheckpointError as error:
        raise WrongInput(str(error)) from error
    if isinstance(content, dict) and content.keys() == {"dataloader", "driver"}:
        return content["dataloader"], content["driver"]
    return content, {}


def remove_emptied_folders(root: str | Path) -> None:
    """Remove checkpoint folders whose parts the workers have deleted."""
    for _, folder in step_folders(root):
        has_part = any(child.is_dir() and any(child.iterdir()) for child in folder.iterdir())
        if not has_part and (folder / DATA_NAME).exists():
            remove_checkpoint(folder)


# ---- a whole checkpoint


@dataclass
class DataPosition:
    """A position in the training data: the state of the loader, and the number of finished passes.

    ``learned`` is the state of a sampler that has learned since the last batch; it counts once the next batch is drawn.
    ``learners`` and ``spares_drawn`` are kept if a checkpoint may still be written for this position: the driver's
    state at that moment.
    """

    loader_state: Mapping[str, SavedState]
    epoch: int
    learned: SavedState | None = None
    learners: Mapping[str, SavedState] | None = None
    spares_drawn: int | None = None


@dataclass
class Checkpoints:
    """The checkpoints of a run: parts of the workers, the state of the driver, and the tracker that names the latest.

    Attributes: ``groups`` maps a role to its workers, and ``keep`` actor and critic to the number of checkpoints that
        are kept, None for all; a role that a recipe trains has the number of the actor. With ``in_background`` workers
        write while training continues. ``extra_files`` are the files that a recipe has written to the loaded
        checkpoint. ``learners`` are further objects by name; the state of those that have one is saved with the driver.
        ``reference`` holds the fields of ``config.json`` that the forward of a separate reference model reads.
        ``newest_step`` is the step of the last checkpoint that this run has written or resumed from.
    """

    run: RunConfig
    state: RunState
    groups: Mapping[str, RayWorkerGroup]
    loader: StatefulDataLoader
    kl_ctrl: KLController
    learners: Mapping[str, Dataset[Rows] | RewardFn | None] = field(default_factory=dict)
    reference: Mapping[str, Json] = field(default_factory=dict)
    extra_files: Sequence[Path] = field(init=False, default=())
    _extra_records: Sequence[FileRecord] = field(init=False, default=())
    newest_step: int | None = field(init=False, default=None)
    _start_of_step: DataPosition | None = field(init=False, default=None)
    _goes_on_at: DataPosition | None = field(init=False, default=None)
    _later: dict[str, SavedState] = field(init=False, default_factory=dict)
    _mark: SaveMark | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        options = self.run.trainer
        self.root = run_folder(self.run)
        self.keep = {"actor": options.max_actor_ckpt_to_keep, "critic": options.max_critic_ckpt_to_keep}
        if options.remove_previous_ckpt_in_save:
            self.keep = {"actor": 1, "critic": 1}
            logger.warning("trainer.remove_previous_ckpt_in_save is deprecated: set max_actor_ckpt_to_keep=1")
        nodes = (self.run.actor_rollout_ref.actor, self.run.critic)
        self.in_background = any(node is not None and node.checkpoint.async_save for node in nodes)

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.root / f"{STEP_FOLDER}{step}"

    def is_due(self) -> bool:
        """Whether to save after the current step: by frequency, at the end, or because capacity is about to expire."""
        options = self.run.trainer
        if should_save_ckpt_esi(self.state.max_step_s, redundant_time=options.esi_redundant_time):
            logger.warning("the rented capacity is about to expire: saving step %d early", self.state.step)
            return True
        return self.state.is_last_step or self.state.step % options.save_freq == 0

    def position(self) -> DataPosition:
        """Return the position of the run in its data."""
        # A sampler may return a list that goes on changing.
        return DataPosition(copy.deepcopy(self.loader.state_dict()), self.state.epoch)

    @property
    def may_be_written(self) -> bool:
        """Whether this run may write a checkpoint."""
        options = self.run.trainer
        return options.save_freq > 0 or options.save_on_sigterm_s is not None

    def keep_start_of_step(self) -> None:
        """Record the data position and the driver's state at the start of a step, in case the step cannot be filled."""
        position = self.position()
        position.learners = copy.deepcopy(self._learned())
        position.spares_drawn = self.state.spares_drawn
        self._start_of_step = position

    def go_back_to_start_of_step(self) -> None:
        """Let the next checkpoint store the state at the start of the current step instead of the present one."""
        self._goes_on_at = self._start_of_step

    def _learned(self) -> dict[str, SavedState]:
        return {name: each.state_dict() for name, each in self.learners.items() if has_state(each)}

    def begin(self) -> Path:
        """Finish the previous checkpoint, and return the folder of the current step, marked as unfinished.

        A recipe calls this before it writes ``extra_files``; ``save`` does so too.
        """
        self.finish()
        folder = self.folder(self.state.step)
        if self._mark is None or self._mark.folder != folder:
            self._mark = SaveMark(folder)
        return folder

    def save(self, position: DataPosition | None = None, extra_files: Sequence[str] = ()) -> None:
        """Write the parts of the workers, the state of the driver, and last the tracker; then remove older checkpoints.

        If workers write in the background, or the record of the run lacks the step, the tracker waits for ``finish``.

        Args: ``position`` is where a resumed run goes on in the data, by default the present place. ``extra_files`` are
            names of files that a recipe has written to the folder.
        """
        position = position or self._goes_on_at or self.position()
        state = self.state
        folder = self.begin()
        remote = self.run.trainer.default_hdfs_dir
        remote = None if remote is None else f"{remote}/{folder.name}"
        for role, group in self.groups.items():
            group.save_checkpoint(f"{folder}/{role}", None if remote is None else f"{remote}/{role}", state.step)
        driver: DriverState = {"seed": state.seed, "epoch": position.epoch}
        driver["kl_ctrl_in_reward"] = self.kl_ctrl.state_dict()
        if driver["kl_ctrl_in_reward"]:
            driver["kl_coef"] = self.run.algorithm.kl_ctrl.kl_coef
        driver["spares_drawn"] = state.spares_drawn if position.spares_drawn is None else position.spares_drawn
        driver["data_digest"] = digest_of(self.loader.dataset)
        driver["step"] = state.step
        driver["order"] = order_of(self.loader.sampler)
        driver["train_batch_size"] = self.run.data.train_batch_size
        if self.reference:
            driver["reference"] = dict(self.reference)
        learners = self._learned() if position.learners is None else position.learners
        if learners:
            driver["learners"] = learners
        if position.learned is not None:
            driver["learned"] = position.learned
        if extra_files:
            driver["extra_files"] = list(extra_files)
            driver["extra_records"] = [asdict(record_file(folder, name)) for name in extra_files]
        save_driver_state(folder, position.loader_state, driver)
        if remote is not None:
            hdfs_io.makedirs(remote, exist_ok=True)
            for name in (*extra_files, DATA_NAME):
                hdfs_io.copy(f"{folder}/{name}", f"{remote}/{name}")
        state.unfinished_checkpoint = self.newest_step = state.step
        self.finish(wait=not self.in_background or state.is_last_step)

    def finish(self, wait: bool = True) -> None:
        """Name the unfinished checkpoint as the latest if all workers are done; ``wait`` waits for them."""
        step = self.state.unfinished_checkpoint
        if step is None or step == self.state.unrecorded_step:
            return
        if self.in_background:
            # A list, so that every group is asked.
            done = [all(group.finish_checkpoint(wait)) for group in self.groups.values()]
            if not all(done):
                return
        self.state.unfinished_checkpoint = None
        if self._mark is not None:
            self._mark.remove()
            self._mark = None
        write_tracker_atomically(self.root, step)
        for role, group in self.groups.items():
            keep = self.keep.get(role, self.keep["actor"])
            if keep:
                group.keep_latest_checkpoints(f"{self.folder(step)}/{role}", keep)
        tell_removed(remove_leftovers(self.root))
        remove_emptied_folders(self.root)

    def resume(self) -> int | None:
        """Restore the run that the configuration resumes; return its step, None for a fresh start."""
        options = self.run.trainer
        folder = find_resume_folder(self.run)
        if folder is not None:
            self.load(folder, delete_after_load=options.del_local_ckpt_after_load)
        if not options.val_only:
            name_start(self.root, folder)
        if self.may_be_written:
            warn_of_lost_state(self.loader.sampler, self.learners.get("train_dataset"))
        return None if folder is None else self.state.step

    def load(self, folder: Path, delete_after_load: bool = False) -> None:
        """Restore workers and driver from the folder of a checkpoint."""
        state = self.state
        state.step = self.newest_step = step_of(folder)
        loader_state, driver = load_driver_state(folder, self.run.trainer.trusted_classes)
        with restoring(folder / DATA_NAME):  # older checkpoints lack the step, the order and the number of prompts
            saved_step = _count("step", driver["step"]) if "step" in driver else state.step
            order = driver.get("order")
            if order is not None and not str(order).startswith("data."):
                raise ValueError(f"order={order!r} names no key of data")
            other_reference = fields_problem(driver.get("reference", {}), self.reference)
        if saved_step != state.step:
            problem = f"its {DATA_NAME} was saved at step {saved_step}: copy the file of step {state.step} back"
            raise damaged_checkpoint(folder, [problem], ANOTHER)
        check_order(order, self.loader.sampler)
        if other_reference is not None:
            raise damaged_checkpoint(folder, [f"reference: {other_reference}"], ANOTHER)
        with phase("load_checkpoint", step=state.step):
            for role, group in self.groups.items():
                group.load_checkpoint(str(folder / role), del_local_after_load=delete_after_load)
        state.weights_version += 1
        with restoring(folder / DATA_NAME):
            self._restore_driver(folder, loader_state, driver)

    def _restore_driver(self, folder: Path, loader_state: Mapping[str, SavedState], driver: DriverState) -> None:
        state = self.state
        learned = driver.get("learners", {})
        _restore(learned, self.learners)  # before the loader, which counts the rows of the data set
        self.loader.load_state_dict(loader_state)
        state.restored_from = folder / DATA_NAME
        if "learned" in driver:
            self._later = {**learned, "sampler": driver["learned"]}
        warn_of_other_data(driver.get("data_digest"), self.loader.dataset)
        if driver.get("train_batch_size") is not None:
            warn_of_other_batch_size(
                _count("train_batch_size", driver["train_batch_size"]), self.run.data.train_batch_size
            )
        # Checkpoints of older versions do not hold the epoch.
        state.epoch = _count("epoch", driver["epoch"]) if "epoch" in driver else (state.step - 1) // len(self.loader)
        state.spares_drawn = _count("spares_drawn", driver["spares_drawn"]) if "spares_drawn" in driver else 0
        self.extra_files = [folder / Path(name).name for name in driver.get("extra_files", ())]
        self._extra_records = [FileRecord(**each) for each in driver.get("extra_records", ())]
        if "kl_ctrl_in_reward" in driver and not self._starts_with_another_weight(driver):
            self.kl_ctrl.load_state_dict(driver["kl_ctrl_in_reward"])
        if driver.get("seed", state.seed) != state.seed:
            logger.warning("trainer.seed is %d, and was %s in the checkpoint", state.seed, driver["seed"])

    def _starts_with_another_weight(self, driver: DriverState) -> bool:
        """Whether the initial weight of an adaptive KL term differs from the checkpoint's; log both if so."""
        given = self.run.algorithm.kl_ctrl.kl_coef
        if driver.get("kl_coef", given) == given:
            return False
        words = "algorithm.kl_ctrl.kl_coef=%s, and was %s in the checkpoint: the run goes on with the new weight"
        logger.warning(words, given, driver["kl_coef"])
        return True

    def check_extra_file(self, path: Path) -> None:
        """Check one of ``extra_files`` against the recorded size and checksum; older checkpoints have no record.

        Raises: WrongInput naming a file that was changed; one that is missing is left to the recipe.
        """
        records = [record for record in self._extra_records if record.name == path.name and path.exists()]
        if problems := list(file_problems(path.parent, Manifest(1, 0, 0, records), checksums=True)):
            raise damaged_checkpoint(path.parent, problems, ANOTHER)

    def caught_up(self, rows: Iterator[T]) -> Iterator[T]:
        """Yield the batches after a resume.

        Once the first one is drawn, restore what had been learned between the place in the data and the checkpoint.
        """
        first = next(rows)
        _restore(self._later, {**self.learners, "sampler": self.loader.sampler})
        self._later = {}
        yield first
        yield from rows


def reference_fields(shared: ActorRolloutRefConfig) -> JsonObject:
    """Return the fields of ``config.json`` that the forward of the reference reads, if it is a separate model."""
    if shared.ref is None or not shared.ref.model_path:
        return {}
    return forward_fields(None, shared.model.changed(shared.ref.model or {}).hf_config)


def _count(name: str, value: int) -> int:
    """Return a number of the driver's state. Raises: ValueError for another value."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}={value!r} is no integer of 0 or more")
    return value


def _restore(
    states: Mapping[str, SavedState], learners: Mapping[str, Dataset[Rows] | RewardFn | Sampler[int] | None]
) -> None:
    for name, learner in learners.items():
        if name in states and has_state(learner):
            learner.load_state_dict(states[name])
