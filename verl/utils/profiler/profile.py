"""One profiler for every role: which ranks and steps are captured is decided here, how is decided by a tool."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from verl.utils.profiler.config import (
    NPUToolConfig,
    NsightToolConfig,
    ProfilerConfig,
    TorchMemoryToolConfig,
    TorchProfilerToolConfig,
)
from verl.utils.profiler.ranges import capturing, is_capturing

logger = logging.getLogger(__name__)

OF_TOOL = {
    "nsys": NsightToolConfig,
    "npu": NPUToolConfig,
    "torch": TorchProfilerToolConfig,
    "torch_memory": TorchMemoryToolConfig,
}


class Tool(Protocol):
    """What captures one role on one rank."""

    def start(self, role: str | None = None, profile_step: Any = None) -> None:
        """Begin a step."""

    def stop(self) -> None:
        """End a step and write what is to be written."""

    def task(self, name: str, role: str, **options: Any) -> AbstractContextManager[Any]:
        """Capture a task of the step."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark a part of a task."""

    def step(self) -> None:
        """Say that a mini-batch has ended."""


class DistProfiler:
    """The profiler of one role on one rank.

    Where the role or its rank is not profiled, and between the steps that are, it does nothing: ``running`` is False.

    Args: ``tool_config`` is the dataclass of the tool, by default the node of ``config.tool_config`` with its name;
        ``role`` among ``kwargs`` names the role in what is written.
    """

    def __init__(self, rank: int, config: ProfilerConfig | None = None, tool_config: Any = None, **kwargs: Any) -> None:
        self.config = config = config or ProfilerConfig()
        self.rank, self.role = rank, str(kwargs.get("role", "e2e"))
        self.running = False
        self._impl: Tool | None = None
        if config.selects(rank):
            self._impl = build_tool(rank, config, tool_config or tool_config_of(config), self.role)

    def start(self, **kwargs: Any) -> None:
        """Begin a step; ``profile_step`` names it, and ``role`` the whole of what it captures."""
        if self._impl is not None and not self.running:
            self._impl.start(**kwargs)
            self.running = True
            _of_this_process.append(self)

    def stop(self) -> None:
        """End the step, and write what was captured; a file that cannot be written is told, and the run goes on."""
        if self._impl is not None and self.running:
            self.running = False
            _of_this_process.remove(self)
            try:
                self._impl.stop()
            except OSError as error:
                logger.error("what %s captured is not written: %s", self.role, error)

    def step(self) -> None:
        """Say that a mini-batch has ended."""
        if self.running and self._impl is not None:
            self._impl.step()

    def dump_memory_snapshot(self, tag: str, sub_dir: str | None) -> bool:
        """Write a snapshot of the allocator now, whatever the step; returns whether the tool is one that can."""
        sampler = getattr(self._impl, "sampler", None)
        if sampler is None:
            return False
        try:
            sampler.dump_memory_snapshot(tag=tag, sub_dir=sub_dir)
        except OSError as error:  # as in stop
            logger.error("the snapshot %s is not written: %s", tag, error)
        return True

    def of_task(self, role: str) -> "DistProfiler":
        """Return the profiler of a task, which is this one for each."""
        return self

    def task(self, name: str, role: str, **options: Any) -> AbstractContextManager[Any]:
        """Capture the enclosed code as a task of the running step; ``role`` is the outer name of the task."""
        assert self._impl is not None, "a task is captured between start and stop"
        stack = ExitStack()
        stack.enter_context(self._impl.task(name, role, **options))
        stack.enter_context(capturing(self._impl.range))
        return stack

    @classmethod
    def annotate(
        cls,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        **kwargs_outer: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a method of a worker a task of the worker's ``profiler``; without one the call is a plain call.

        ``role=`` names the task, by default as the method; ``mini_batches=True`` says that it calls ``step``. A task
        that fails ends the step: the driver ends the workers of a failed call, and what they had captured with them.
        """
        outer_role = kwargs_outer.pop("role", None)

        def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
            role = outer_role or func.__name__
            options = {"color": color, "domain": domain, "category": category, **kwargs_outer}

            def running(owner: Any) -> DistProfiler | None:
                profiler = getattr(owner, "profiler", None)
                if profiler is None or not profiler.running:
                    return None
                own: DistProfiler = profiler.of_task(role)
                return own if own.running else None

            @contextmanager
            def captured(profiler: DistProfiler) -> Iterator[None]:
                try:
                    with profiler.task(message or role, role, **options):
                        yield
                except Exception:
                    if not is_capturing():  # in a task inside of another, the outer one comes by here too
                        stop_after_error()
                    raise

            @functools.wraps(func)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                profiler = running(self)
                if profiler is None:
                    return func(self, *args, **kwargs)
                with captured(profiler):
                    return func(self, *args, **kwargs)

            @functools.wraps(func)
            async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
                profiler = running(self)
                if profiler is None:
                    return await func(self, *args, **kwargs)
                with captured(profiler):
                    return await func(self, *args, **kwargs)

            return call_async if inspect.iscoroutinefunction(func) else call

        return decorate


_of_this_process: list[DistProfiler] = []
"""Those that run, of all workers that share the process."""


def stop_after_error() -> None:
    """End the step in all roles of this process, and write what was captured, where an error ends the process."""
    for profiler in list(_of_this_process):
        try:
            profiler.stop()
        except Exception:  # the error that came first is the one to show
            logger.warning("what %s captured before the error is not written", profiler.role, exc_info=True)


class RoleProfilers:
    """The profilers of the roles that one worker plays; a task belongs to the role that its name begins with."""

    def __init__(self, profilers: Mapping[str, DistProfiler]) -> None:
        self.profilers = dict(profilers)
        self.running = False
        self._first = next(iter(self.profilers.values()))

    def start(self, **kwargs: Any) -> None:
        """Begin a step in each."""
        for profiler in self.profilers.values():
            profiler.start(**kwargs)
        self.running = any(profiler.running for profiler in self.profilers.values())

    def stop(self) -> None:
        """End the step in each."""
        self.running = False
        for profiler in self.profilers.values():
            profiler.stop()

    def step(self) -> None:
        """Say that a mini-batch has ended, which is one of the role that trains."""
        self._first.step()

    def of_task(self, role: str) -> DistProfiler:
        """Return the profiler of the role that a task belongs to."""
        return self.profilers.get(role.split("_", 1)[0], self._first)


def tool_config_of(config: ProfilerConfig) -> Any:
    """Return the options of the tool of a role, with the defaults of the dataclass where there are none."""
    assert config.tool is not None
    options = config.tool_config
    if isinstance(options, OF_TOOL[config.tool]):
        return options
    node = options.get(config.tool) if isinstance(options, Mapping) else None
    if isinstance(node, Mapping) and not isinstance(node, OF_TOOL[config.tool]):
        return OF_TOOL[config.tool](**{key: value for key, value in node.items() if key != "_target_"})
    return node if node is not None else OF_TOOL[config.tool]()


def build_tool(rank: int, config: ProfilerConfig, tool_config: Any, role: str) -> Tool:
    """Import and construct the tool of a configuration.

    Raises: ImportError or RuntimeError where this process lacks the package or device that the tool needs.
    """
    if config.tool == "nsys":
        from verl.utils.profiler.nsys import NsightSystemsProfiler

        return NsightSystemsProfiler(tool_config)
    if config.tool == "npu":
        from verl.utils.profiler.npu import NPUProfiler

        return NPUProfiler(tool_config, config.save_path, role)
    if config.tool == "torch":
        from verl.utils.profiler.torch_trace import TorchTrace

        return TorchTrace(tool_config, config.save_path, role, rank)
    from verl.utils.profiler.torch_memory import TorchMemoryProfiler

    return TorchMemoryProfiler(tool_config, config.save_path, rank)
