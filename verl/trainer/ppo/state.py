"""The state of a training run: the progress that a checkpoint restores, and values that phases leave for later ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.reward import PendingReward
from verl.utils.numerics.seeding import derive_seed
from verl.utils.profiler import marked_timer

Metrics = dict[str, float]
"""The metrics of a step by name."""
Timing = dict[str, float]
"""The seconds of a step by timer."""


@dataclass
class RunState:
    """Progress of a run, and values that one phase of a step leaves for a later one.

    Attributes:
        seed: seed of the run; every random draw derives from it and from the step.
        total_steps: number of steps of the whole run.
        step: number of the current step, from 1; 0 before the first.
        epoch: number of finished passes over the training data.
        prompts_drawn: prompts that the current step has drawn so far.
        spares_drawn: spare prompts that the run has drawn so far.
        row_order: the rows of the batch in the order in which they were asked for, whatever ranks they went to.
        extra_columns: columns that the reward function added to the batch.
        pending_reward: reward that ``score`` started and ``shape`` takes.
        weights_version: version of the actor's weights; each update and each load raises it.
        engine_version: version of the rollout engine's weights; None before its first sync.
        max_step_s: seconds of the longest step.
        unfinished_checkpoint: step of the checkpoint that the tracker does not name yet: workers still write it in the
            background, or the record still lacks its step.
        restored_from: the file whose state the training loader takes when it is first read.
        unrecorded_step: the step that trained and does not stand in the record yet.
        profiled_groups: worker groups whose profilers run.
    """

    seed: int
    total_steps: int = 0
    step: int = 0
    epoch: int = 0
    prompts_drawn: int = 0
    spares_drawn: int = 0
    row_order: list[int] = field(default_factory=list)
    extra_columns: list[str] = field(default_factory=list)
    pending_reward: PendingReward | None = None
    weights_version: int = 0
    engine_version: int | None = None
    max_step_s: float = 0.0
    unfinished_checkpoint: int | None = None
    unrecorded_step: int | None = None
    restored_from: Path | None = None
    profiled_groups: Sequence[RayWorkerGroup] = ()

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one."""
        return self.step >= self.total_steps

    def begin_step(self) -> None:
        """Move to the next step, which has not drawn any prompt yet."""
        self.step += 1
        self.prompts_drawn = 0

    def generator(self, name: str) -> torch.Generator:
        """Return the source of a named draw of the current step."""
        return torch.Generator().manual_seed(derive_seed(self.seed, name, self.step))


_PHASE_OF_TIMER = {"gen": "generate", "gen_max": "generate", "testing": "validate"}


@contextmanager
def timed(timer: str, timing: Timing, step: int) -> Iterator[None]:
    """Time a part of a step; if a worker dies within it, the error names the part."""
    with phase(_PHASE_OF_TIMER.get(timer, timer), step=step), marked_timer(timer, timing):
        yield


T = TypeVar("T")


class HasState(Protocol):
    """An object that knows where the run stands."""

    state: RunState


class OfState(Generic[T]):
    """An attribute of an object that reads and writes a field of its ``state``."""

    def __init__(self, field_name: str) -> None:
        self._field = field_name

    def __get__(self, owner: HasState | None, cls: type) -> T:
        if owner is None:  # tools that list the members of a class ask the class
            return self  # type: ignore[return-value]
        value: T = getattr(owner.state, self._field)
        return value

    def __set__(self, owner: HasState, value: T) -> None:
        setattr(owner.state, self._field, value)
