"""Profiling tools and their folders, and the tools that capture a whole process.

The launching process reads the options of nsys for Ray here, so torch is imported only when a capture starts or stops.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from verl.base_config import BaseConfig
from verl.utils.json_types import Json
from verl.utils.profiler.config import NPUToolConfig, NsightToolConfig
from verl.utils.profiler.ranges import Range, marked_range

if TYPE_CHECKING:
    from torch_npu.profiler import profile


class Tool:
    """Captures one role on one rank; a subclass overrides the methods that its tool supports."""

    def __init__(self, options: BaseConfig, save_path: str | None, role: str, rank: int) -> None:
        self.options = options
        self.save_path = save_path
        self.role = role
        self.rank = rank

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step; ``role`` names a capture of the whole process."""

    def stop(self) -> None:
        """End a step and write its capture."""

    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Range:
        """Capture a task of the step; one with ``mini_batches`` calls ``step`` after each."""
        return nullcontext()

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return nullcontext()

    def step(self) -> None:
        """Note the end of a mini-batch."""


class ProcessTool(Tool, ABC):
    """A profiler that runs once per process: one capture per step, or with ``discrete`` one per task.

    The roles of a process share a capture: the first one that uses it starts it, the last one stops it.
    """

    users: ClassVar[int] = 0
    """Roles that use the capture now, by subclass."""
    options: NsightToolConfig | NPUToolConfig
    profiled_step: int | str | None = None

    @abstractmethod
    def begin(self, role: str) -> None:
        """Start the capture."""

    @abstractmethod
    def end(self) -> None:
        """Stop the capture and write it."""

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step; ``role`` names its capture."""
        self.profiled_step = profile_step
        if not self.options.discrete:
            self._open(role or self.role)

    def stop(self) -> None:
        """End a step."""
        if not self.options.discrete:
            self._close()

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Mark a task, and with ``discrete`` capture it."""
        if self.options.discrete:
            self._open(role)
        try:
            with marked_range(name, **{key: marks.get(key) for key in ("color", "domain", "category")}):
                yield
        finally:
            if self.options.discrete:
                self._close()

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return marked_range(name)

    def _open(self, role: str) -> None:
        if not self.users:
            self.begin(role)
        type(self).users += 1

    def _close(self) -> None:
        type(self).users -= 1
        if not self.users:
            self.end()


# ---- folders


def save_folder(save_path: str | None) -> Path:
    """Return the folder of all files."""
    return Path(save_path or "outputs/profile").expanduser().absolute()


def make_save_folder(save_path: str | None) -> Path:
    """Create the folder of all files early, before a run has anything to lose.

    Raises: ValueError naming the folder.
    """
    folder = save_folder(save_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"profiler.save_path={folder} cannot be created: {error.strerror}; choose another folder"
        ) from error
    return folder


def step_folder(save_path: str | None, step: int | str | None) -> Path:
    """Return the folder for the files of a step."""
    return save_folder(save_path) / f"step{step}"


# ---- NVIDIA Nsight Systems


class NsightSystemsProfiler(ProcessTool):
    """Makes one capture per step, or with ``discrete`` one per task; nsys writes its database."""

    def begin(self, role: str) -> None:
        """Start the capture."""
        import torch

        torch.cuda.profiler.start()

    def end(self) -> None:
        """Stop the capture."""
        import torch

        torch.cuda.profiler.stop()


def nsight_options(options: Mapping[str, Json], save_path: str | None, name: str) -> dict[str, str]:
    """Return the ``nsys`` options for Ray's runtime environment, which write to ``<save_path>/<name>_<pid>``.

    Ray puts a relative name into its log folder, keeps an absolute one, and passes the command to a shell. The option
    ``output`` becomes ``o``, because Ray would otherwise add its own ``o``. Options without a value are dropped. Ray
    formats values with ``str``, so lists and booleans are written here in the form that nsys reads.
    """
    texts = {"o" if key == "output" else key: _text(value) for key, value in options.items() if value is not None}
    if save_path and "o" not in texts:
        path = str(save_folder(save_path) / f"{name}_%p")
        # Backslashes escape it for the shell, because Ray would not take a quoted path for an absolute one.
        texts["o"] = "".join(char if shlex.quote(char) == char else f"\\{char}" for char in path)
    return texts


def _text(value: Json) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- the Ascend profiler of torch_npu


class NPUProfiler(ProcessTool):
    """Writes one trace per step, or with ``discrete`` one per task."""

    options: NPUToolConfig
    running: "list[profile]" = []
    """The running profiler of this process; shared, because another role may end the capture."""

    def begin(self, role: str) -> None:
        """Start a trace in the folder of ``role``."""
        profiler = npu_profile(self.options, str(step_folder(self.save_path, self.profiled_step) / role))
        self.running.append(profiler)
        profiler.start()

    def end(self) -> None:
        """Stop and write the trace."""
        profiler = self.running.pop()
        profiler.step()
        profiler.stop()


def npu_profile(options: NPUToolConfig, folder: str) -> "profile":
    """Return a torch_npu profiler that writes to ``folder``."""
    from torch_npu import profiler

    contents = options.contents or ("npu", "cpu")
    level = getattr(profiler.ProfilerLevel, options.level.capitalize())  # level_none is Level_none, level0 is Level0
    activities = {"npu": profiler.ProfilerActivity.NPU, "cpu": profiler.ProfilerActivity.CPU}
    return profiler.profile(
        activities=[activity for name, activity in activities.items() if name in contents],
        record_shapes="shapes" in contents,
        profile_memory="memory" in contents,
        with_modules="module" in contents,
        with_stack="stack" in contents,
        on_trace_ready=profiler.tensorboard_trace_handler(folder, analyse_flag=options.analysis),
        experimental_config=profiler._ExperimentalConfig(
            profiler_level=level, export_type=profiler.ExportType.Db, data_simplification=True, msprof_tx=True
        ),
    )
