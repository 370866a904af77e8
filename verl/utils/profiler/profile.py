"""Profile one role: this module decides which ranks and steps are captured, and a tool captures them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

from verl.base_config import BaseConfig
from verl.utils.failures import on_failure, only_warning
from verl.utils.profiler.captures import NPUProfiler, NsightSystemsProfiler, Tool
from verl.utils.profiler.config import OPTIONS, ProfilerConfig
from verl.utils.profiler.memory import TorchMemoryProfiler
from verl.utils.profiler.ranges import Range, capturing, is_capturing
from verl.utils.profiler.torch_trace import TorchTrace
from verl.utils.py_functional import run_in_context

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

OF_TOOL: dict[str, type[Tool]] = {
    "nsys": NsightSystemsProfiler,
    "npu": NPUProfiler,
    "torch": TorchTrace,
    "torch_memory": TorchMemoryProfiler,
}


class DistProfiler:
    """Profiles one role on one rank.

    It does nothing, and ``running`` is False, if the role or rank is not selected and between profiled steps.

    Args:
        tool_config: dataclass of the tool; by default the node of ``config.tool_config`` with the tool's name.
        kwargs: ``role`` names the role in the written files.
    """

    def __init__(
        self, rank: int, config: ProfilerConfig | None = None, tool_config: BaseConfig | None = None, **kwargs: str
    ) -> None:
        self.config = config = config or ProfilerConfig()
        self.rank = rank
        self.role = str(kwargs.get("role", "e2e"))
        self.running = False
        self._impl: Tool | None = None
        if config.selects(rank):
            assert config.tool is not None
            self._impl = OF_TOOL[config.tool](tool_config or tool_config_of(config), config.save_path, self.role, rank)

    def start(self, role: str | None = None, profile_step: int | str | None = None, **unused: str) -> None:
        """Begin the step ``profile_step``; ``role`` names a capture of the whole process."""
        if self._impl is not None and not self.running:
            self._impl.start(role=role, profile_step=profile_step)
            self.running = True
            _of_this_process.append(self)

    def stop(self) -> None:
        """End the step and write its capture. A failed write logs an error and does not end the run."""
        if self._impl is not None and self.running:
            self.running = False
            _of_this_process.remove(self)
            try:
                self._impl.stop()
            except OSError as error:
                logger.error("the profile of %s could not be written: %s", self.role, error)

    def step(self) -> None:
        """Note the end of a mini-batch."""
        if self.running and self._impl is not None:
            self._impl.step()

    def dump_memory_snapshot(self, tag: str, sub_dir: str | None) -> bool:
        """Write a snapshot of the allocator now; return False if the tool cannot."""
        sampler = getattr(self._impl, "sampler", None)
        if sampler is None:
            return False
        try:
            sampler.dump_memory_snapshot(tag=tag, sub_dir=sub_dir)
        except OSError as error:  # as in ``stop``: the run goes on
            logger.error("the memory snapshot %s could not be written: %s", tag, error)
        return True

    def of_task(self, role: str) -> "DistProfiler":
        """Return the profiler of a task: this one."""
        return self

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Capture the enclosed code as a task of the running step; ``role`` names the task's files."""
        assert self._impl is not None, "a task is captured between start and stop"
        with self._impl.task(name, role, mini_batches=mini_batches, **marks), capturing(self._impl.range):
            yield

    @classmethod
    def annotate(
        cls,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        role: str | None = None,
        mini_batches: bool = False,
        **options: str,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Capture calls of a worker's method as tasks of the worker's ``profiler``, if it has one.

        A failing task ends the step: the driver kills the workers of a failed call, which would lose the capture.

        Args:
            role: name of the task, by default the method's.
            mini_batches: whether the method calls ``step`` after each mini-batch.
            options: passed on to the tool.
        """
        marks = {"color": color, "domain": domain, "category": category, **options}

        def decorate(func: Callable[P, T]) -> Callable[P, T]:
            task = role or func.__name__

            def capture(worker: Profiled, *args: P.args, **kwargs: P.kwargs) -> Range:
                profiler = getattr(worker, "profiler", None)
                own = profiler.of_task(task) if profiler is not None and profiler.running else None
                return captured(own) if own is not None and own.running else _NOTHING

            @contextmanager
            def captured(profiler: DistProfiler) -> Iterator[Callable[[T], None]]:
                with on_failure(_stop_outermost), profiler.task(message or task, task, mini_batches, **marks):
                    yield _drop

            return run_in_context(func, capture)  # type: ignore[arg-type]  # the worker is the first of its arguments

        return decorate


def _drop(result: T) -> None:
    """Do nothing with the result of a task, since there is no profiler."""


_NOTHING = nullcontext(_drop)
_of_this_process: list[DistProfiler] = []
"""The running profilers of all workers that share the process."""


def _stop_outermost(error: BaseException) -> None:
    """Write the captures when a task fails, since the worker may be killed before it could write them at its end."""
    if isinstance(error, Exception) and not is_capturing():  # only the outermost task ends the step
        stop_after_error()


def stop_after_error() -> None:
    """End the step in all roles of this process and write their captures before an error ends the process."""
    for profiler in list(_of_this_process):
        text = "the profile of %s before the error could not be written"
        with only_warning(logger, text, profiler.role, trace=True):  # the first error is the one to show
            profiler.stop()


class Profiled(Protocol):
    """A worker with a profiler, or without one."""

    profiler: "DistProfiler | RoleProfilers | None"


class RoleProfilers:
    """The profilers of one worker's roles; a task belongs to the role that its name begins with."""

    def __init__(self, profilers: Mapping[str, DistProfiler]) -> None:
        self.profilers = dict(profilers)
        self.running = False
        self._first = next(iter(self.profilers.values()))

    def start(self, role: str | None = None, profile_step: int | str | None = None, **unused: str) -> None:
        """Begin a step in each."""
        for profiler in self.profilers.values():
            profiler.start(role=role, profile_step=profile_step)
        self.running = any(profiler.running for profiler in self.profilers.values())

    def stop(self) -> None:
        """End the step in each."""
        self.running = False
        for profiler in self.profilers.values():
            profiler.stop()

    def step(self) -> None:
        """Note the end of a mini-batch of the first role, which is the one that trains."""
        self._first.step()

    def of_task(self, role: str) -> DistProfiler:
        """Return the profiler of the role that a task belongs to."""
        return self.profilers.get(role.split("_", 1)[0], self._first)


def tool_config_of(config: ProfilerConfig) -> BaseConfig:
    """Return the options of a role's tool, or the defaults of their dataclass if there are none."""
    assert config.tool is not None
    cls = OPTIONS[config.tool]
    options = config.tool_config
    if not isinstance(options, cls):
        options = (options or {}).get(config.tool) or {}
    if isinstance(options, cls):
        return options
    return cls(**{key: value for key, value in options.items() if key != "_target_"})
