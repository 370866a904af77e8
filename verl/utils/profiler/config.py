"""Configure which ranks and steps are profiled, by which tool, and with which options."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl.base_config import BaseConfig, Violation, setting

RANKS_MUST_BE_NAMED = ("nsys", "npu")
"""Tools that profile no rank by default: ``all_ranks`` or ``ranks`` must select some."""
NPU_CONTENTS = ("npu", "cpu", "memory", "shapes", "module", "stack")
TORCH_CONTENTS = ("cpu", "cuda", "memory", "shapes")


def content_rules(contents: list[str], known: tuple[str, ...]) -> Iterator[Violation]:
    """Yield contents of a trace that a tool does not have."""
    if any(part not in known for part in contents):
        yield Violation("contents", contents, f"must be a subset of [{','.join(known)}]")


@dataclass
class NsightToolConfig(BaseConfig):
    """NVIDIA Nsight Systems; its command-line options are set for the run, not per role."""

    discrete: bool | None = setting(False, "capture each task, not each step; null: false")
    controller_nsight_options: dict[str, Any] | None = setting(None, "options of nsys in the driver")
    worker_nsight_options: dict[str, Any] | None = setting(None, "options of nsys in the workers")


@dataclass
class TorchProfilerToolConfig(BaseConfig):
    """``torch.profiler``; its steps are the mini-batches of one update."""

    contents: list[str] = setting([], "parts that are recorded; none: all devices, and shapes")
    discrete: bool = setting(False, "one trace for each task, not for each step")
    step_start: int = setting(0, "first mini-batch that is recorded", at_least=0)
    step_end: int | None = setting(None, "mini-batch at which recording ends; null: record to the last")
    skip_first: int = setting(0, "mini-batches before the first cycle", at_least=0)
    wait: int = setting(0, "mini-batches of a cycle that are not recorded", at_least=0)
    warmup: int = setting(0, "mini-batches of a cycle whose record is thrown away", at_least=0)
    active: int | None = setting(None, "recorded mini-batches of a cycle; null: no cycles", at_least=1)
    repeat: int = setting(0, "cycles; 0: to the last mini-batch", at_least=0)

    @property
    def first(self) -> int:
        """The first mini-batch that is recorded."""
        return self.step_start if self.active is None else self.skip_first + self.wait + self.warmup

    def rules(self) -> Iterator[Violation]:
        """Yield unknown contents, an empty range of steps, invalid cycles, and cycles given together with a range."""
        # With Python stacks, torch 2.13 sets a tracer in every Python thread. A process with the threads of Ray and of
        # several tests never went on: its threads handed the interpreter's lock round. A worker must not hang.
        if "stack" in self.contents:
            expected = "must be without stack: its record can stop a worker, which has other Python threads, for ever"
            yield Violation("contents", self.contents, expected)
        yield from content_rules([each for each in self.contents if each != "stack"], TORCH_CONTENTS)
        if self.step_end is not None and self.step_end <= self.step_start:
            yield Violation("step_end", self.step_end, f"must be above step_start={self.step_start}, or null")
        ranges = {"step_start": 0, "step_end": None}
        cycles = dict.fromkeys(("skip_first", "wait", "warmup", "repeat"), 0)
        for name, default in (cycles if self.active is None else ranges).items():
            if self[name] != default:
                expected = "needs active, the mini-batches that a cycle records: write a number, or leave this out"
                if self.active is not None:
                    expected = f"cannot be combined with active={self.active}: write a range or cycles (skip_first)"
                yield Violation(name, self[name], expected)


@dataclass
class TorchMemoryToolConfig(BaseConfig):
    """torch's allocator history; ``kw_args`` are passed to its recorder unchanged."""

    trace_alloc_max_entries: int = setting(100_000, "allocations that the history keeps", at_least=1)
    stack_depth: int = setting(32, "frames of a stack that the history keeps", at_least=1)
    context: str = setting("all", "events with a stack", one_of=("alloc", "state", "all"))
    stacks: str = setting("all", "kind of stacks", one_of=("python", "cpp", "all"))
    kw_args: dict[str, Any] = setting({}, "further arguments of the recorder")


@dataclass
class NPUToolConfig(BaseConfig):
    """torch_npu's Ascend profiler."""

    contents: list[str] = setting([], "parts that are recorded; none: npu and cpu")
    level: str = setting("level1", "detail of a trace", one_of=("level_none", "level0", "level1", "level2"))
    analysis: bool = setting(True, "parse the results at once")
    discrete: bool = setting(False, "capture each task, not each step")

    def rules(self) -> Iterator[Violation]:
        """Yield a violation for unknown contents."""
        yield from content_rules(self.contents, NPU_CONTENTS)


OPTIONS: dict[str, type[BaseConfig]] = {
    "nsys": NsightToolConfig,
    "npu": NPUToolConfig,
    "torch": TorchProfilerToolConfig,
    "torch_memory": TorchMemoryToolConfig,
}
"""Tool -> the dataclass of its options."""
TOOLS = tuple(OPTIONS)


@dataclass
class ProfilerConfig(BaseConfig):
    """Profiling of one role, or of the run if ``steps`` is set."""

    tool: str | None = setting(None, "profiler; null: none", one_of=TOOLS)
    enable: bool = setting(False, "profile this role")
    all_ranks: bool = setting(False, "profile every rank")
    ranks: Any = setting([], "ranks to profile; none: rank 0, but no rank with nsys and npu")
    save_path: str | None = setting(None, "folder of the traces")
    tool_config: Any = setting(None, "options of each tool")
    steps: list[int] | None = setting(None, "training steps to profile; null: none")
    profile_continuous_steps: bool = setting(False, "neighbouring steps share one capture")
    global_tool_config: dict[str, Any] | None = setting(None, "options of each tool, for all roles")
    relocate_results: bool = setting(False, "gather the files of all nodes on that of the trainer")
    finish_hook_cmd: str | None = setting(None, "shell command after the last profiled step; null: none", empty=False)
    finish_hook_all_ranks: bool = setting(False, "every rank of the actor runs the command")
    finish_hook_ranks: list[int] = setting([], "ranks of the actor that run the command; none: rank 0")
    discrete: bool | None = setting(None, "kept for older files: must be null")

    def rules(self) -> Iterator[Violation]:
        """Yield violations for malformed ranks or steps, and for an option in the place that it had before."""
        if self.discrete is not None:
            expected = "belongs to the tool: write tool_config.nsys.discrete or tool_config.npu.discrete"
            yield Violation("discrete", self.discrete, expected)
        if not isinstance(self.ranks, list | set | tuple):
            yield Violation("ranks", self.ranks, "must be a list of ranks")
        elif not all(_is_count(rank) for rank in self.ranks):
            yield Violation("ranks", self.ranks, "must be a list of ranks, each an integer of 0 or more")
        if not all(_is_count(rank) for rank in self.finish_hook_ranks):
            yield Violation("finish_hook_ranks", self.finish_hook_ranks, "must be a list of ranks, each 0 or more")
        if self.finish_hook_cmd is None:
            for name in ("finish_hook_all_ranks", "finish_hook_ranks"):
                if self[name]:
                    yield Violation(name, self[name], "needs finish_hook_cmd, the command: write one, or remove this")
        if self.steps is not None and not all(_is_count(step) and step > 0 for step in self.steps):
            yield Violation("steps", self.steps, "must be null or a list of training steps, each 1 or more")

    def selects(self, rank: int) -> bool:
        """Return whether a rank is profiled.

        ``all_ranks`` selects every rank, else ``ranks`` does. Without either it is rank 0, or none for nsys and npu.
        """
        if not self.enable or self.tool is None:
            return False
        chosen = self.ranks or ([] if self.tool in RANKS_MUST_BE_NAMED else [0])
        return self.all_ranks or rank in chosen

    def union(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Return a configuration that profiles the ranks of either."""
        return self._combined(other, self.all_ranks or other.all_ranks, self.enable or other.enable, set.union)

    def intersect(self, other: "ProfilerConfig") -> "ProfilerConfig":
        """Return a configuration that profiles the ranks of both."""
        return self._combined(other, self.all_ranks and other.all_ranks, self.enable and other.enable, set.intersection)

    def _combined(
        self, other: "ProfilerConfig", all_ranks: bool, enable: bool, combine: Callable[[set[int], set[int]], set[int]]
    ) -> "ProfilerConfig":
        assert self.tool == other.tool, f"cannot combine the profilers {self.tool} and {other.tool}"
        ranks = sorted(combine(set(self.ranks), set(other.ranks)))
        of_a_role = replace(self, steps=None, profile_continuous_steps=False, global_tool_config=None)
        return replace(of_a_role, enable=enable, all_ranks=all_ranks, ranks=ranks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
