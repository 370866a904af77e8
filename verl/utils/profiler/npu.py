"""Profile with torch_npu's Ascend profiler, with MSTX ranges."""

from typing import TYPE_CHECKING

from verl.utils.profiler.captures import ProcessTool, step_folder
from verl.utils.profiler.config import NPUToolConfig

if TYPE_CHECKING:
    from torch_npu.profiler import profile

_DEFAULT_CONTENTS = ("npu", "cpu")


class NPUProfiler(ProcessTool):
    """Writes one trace per step, or with ``discrete`` one per task."""

    running: "list[profile]" = []
    """The running profiler of this process; shared, because another role may end the capture."""

    def __init__(self, options: NPUToolConfig, save_path: str | None, role: str) -> None:
        super().__init__(role, options.discrete)
        self.options = options
        self.save_path = save_path

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

    contents = options.contents or _DEFAULT_CONTENTS
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
