"""Profiling: the ``global_profiler`` node and the ``profiler`` node of each role."""

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.base_config import Violation, parse_node
from verl.trainer.config.keys import select
from verl.trainer.config.rules.reward import reward_world_size
from verl.trainer.config.run_config import RunConfig
from verl.utils.json_types import Json, mapping_at
from verl.utils.profiler.config import OPTIONS, RANKS_MUST_BE_NAMED, TOOLS, ProfilerConfig, TorchProfilerToolConfig

Tree = Mapping[str, Json]

_DEVICES = {"nsys": "cuda", "npu": "npu", "torch_memory": "cuda"}
_PACKAGES = {"nsys": "nvtx", "npu": "torch_npu"}
_GLOBAL = "global_profiler"
_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic", "reward_model")
_OF_A_ROLE = ("enable", "all_ranks", "ranks")
_AT_THE_END = ("relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks")
_OF_THE_RUN = ("steps", "profile_continuous_steps", "global_tool_config", *_AT_THE_END)
_OPTIONS_OF_THE_RUN = ("nsys", "torch_memory")


def profiler_rules(run: RunConfig, tree: Tree, use_reference: bool) -> Iterator[Violation]:
    """Yield profilers that cannot run, and settings that profile nothing.

    ``tree`` says which keys are written: the dataclass of roles and run has more than either reads.
    """
    yield from _place_rules(tree)
    profiler = run.global_profiler
    enabled = _enabled(run, use_reference)
    tools = {profiler.tool, *(node.tool for node in enabled.values())}
    if any(tool not in (None, *TOOLS) for tool in tools):
        return  # the dataclass refuses it
    yield from _step_rules(run, enabled)
    yield from _end_rules(run)
    for role, node in enabled.items():
        yield from _role_rules(run, role, node)
    yield from _folder_rules(run, enabled)
    for tool in sorted(tool for tool in tools if tool is not None):
        where = next((f"{role}.profiler" for role, node in enabled.items() if node.tool == tool), _GLOBAL)
        key = f"{_GLOBAL if profiler.tool == tool else where}.tool"
        for name in ("controller_nsight_options", "worker_nsight_options"):
            options = select(tree, f"{_GLOBAL}.global_tool_config.nsys.{name}")
            if tool == "nsys" and not isinstance(options, Mapping):
                expected = "must be a mapping of options of nsys profile"
                yield Violation(f"{_GLOBAL}.global_tool_config.nsys.{name}", options, expected)
        reason = missing_part(tool, run.trainer.device, run.ray_kwargs.is_local)
        if reason is not None:
            yield Violation(key, tool, reason)


def _place_rules(tree: Tree) -> Iterator[Violation]:
    """Yield unread keys (of a role at the run, of the run at a role) and unknown tools."""
    of_run = mapping_at(tree, _GLOBAL)
    for key in _OF_A_ROLE:
        if key in of_run:
            expected = f"is set for each role: write actor_rollout_ref.actor.profiler.{key}"
            yield Violation(f"{_GLOBAL}.{key}", of_run[key], expected)
    seen = []
    for role in _ROLES:
        node = select(tree, f"{role}.profiler")
        if not isinstance(node, Mapping):
            continue
        for key in _OF_THE_RUN:
            if key in node:
                yield Violation(f"{role}.profiler.{key}", node[key], f"is set for the run: write {_GLOBAL}.{key}")
        if node.get("tool_config") not in seen:  # roles may share a node: check it once
            yield from _tool_config_rules(f"{role}.profiler.tool_config", node.get("tool_config"), TOOLS)
        seen.append(node.get("tool_config"))
    yield from tool_rules(tree)


def tool_rules(tree: Tree) -> Iterator[Violation]:
    """Yield tools that have no options for the whole run."""
    options = mapping_at(tree, _GLOBAL).get("global_tool_config")
    yield from _tool_config_rules(f"{_GLOBAL}.global_tool_config", options, _OPTIONS_OF_THE_RUN)


def _tool_config_rules(key: str, options: Json, tools: tuple[str, ...]) -> Iterator[Violation]:
    """Yield options that are not a mapping or do not exist, and tools whose options are not read under this key."""
    if options is not None and not isinstance(options, Mapping):
        yield Violation(key, options, f"must be null or a mapping of {', '.join(tools)}")
        return
    for tool, node in (options or {}).items():
        if tool not in tools and tool in TOOLS:
            yield Violation(f"{key}.{tool}", node, f"write actor_rollout_ref.actor.profiler.tool_config.{tool}")
        elif tool not in tools:
            yield Violation(f"{key}.{tool}", node, f"there is no such tool: {', '.join(tools)}")
        elif node is not None and not isinstance(node, Mapping):
            yield Violation(f"{key}.{tool}", node, "must be a mapping: set keys below it")
        elif node is not None and "_target_" not in node:
            cls = OPTIONS[tool]
            yield from parse_node({"_target_": f"{cls.__module__}.{cls.__name__}", **node}, cls, f"{key}.{tool}")[1]


def _folder_rules(run: RunConfig, enabled: Mapping[str, ProfilerConfig]) -> Iterator[Violation]:
    """Yield folders of profiles that this machine would write and cannot."""
    folders: dict[str, str] = {}
    paths = [(f"{role}.profiler.save_path", node.save_path) for role, node in enabled.items()]
    run_path = run.global_profiler.save_path
    if run_path in [path for _, path in paths] or run.global_profiler.tool in _OPTIONS_OF_THE_RUN:
        paths.insert(0, (f"{_GLOBAL}.save_path", run_path))
    for key, path in paths:
        if path is not None:
            folders.setdefault(path, key)
    for path, key in folders.items():
        if "://" in path:
            yield Violation(key, path, "must be a folder: a profiler writes to no other storage")
        elif run.ray_kwargs.is_local:
            folder = Path(path).expanduser().absolute()
            there = next(each for each in (folder, *folder.parents) if each.exists())
            if not there.is_dir():
                yield Violation(key, path, f"cannot be a folder: {there} is a file: write another folder")
            elif not os.access(there, os.W_OK | os.X_OK):
                yield Violation(key, path, f"cannot be written, no permission in {there}: write another folder")


def _enabled(run: RunConfig, use_reference: bool) -> dict[str, ProfilerConfig]:
    """Return the profiler node of each profiled role of this run."""
    shared = run.actor_rollout_ref
    nodes: dict[str, ProfilerConfig | None] = {
        "actor_rollout_ref.actor": shared.actor.profiler,
        "actor_rollout_ref.rollout": shared.rollout.profiler,
        "actor_rollout_ref.ref": shared.ref.profiler if use_reference else None,
        "critic": None if run.critic is None else run.critic.profiler,
        "reward_model": run.reward_model.profiler if run.reward_model.enable else None,
    }
    return {role: node for role, node in nodes.items() if node is not None and node.enable}


def _step_rules(run: RunConfig, enabled: Mapping[str, ProfilerConfig]) -> Iterator[Violation]:
    """Yield steps that profile nothing, profilers without a step, and steps after the end of the run."""
    steps = run.global_profiler.steps
    snapshots = run.global_profiler.tool == "torch_memory"  # the actor writes them after each step
    if enabled and not steps and not snapshots:
        role = next(iter(enabled))
        expected = f"names no training step, and {role}.profiler.enable=true: write a list such as [1,2]"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)
    if steps and not enabled and not snapshots:
        expected = "no role of this run is profiled: set actor_rollout_ref.actor.profiler.enable=true, or write null"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)
    total = run.trainer.total_training_steps
    beyond = [step for step in steps or () if total is not None and step > total]
    if beyond:
        expected = f"steps {beyond} are after the last step: lower them, or raise trainer.total_training_steps={total}"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)


def _end_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield actions after the last profiled step in runs that profile no step, and ranks that do not exist."""
    profiler = run.global_profiler
    for name in ("relocate_results", "finish_hook_cmd"):
        if profiler[name] and not profiler.steps:
            expected = f"follows the last profiled step, and there is none: write {_GLOBAL}.steps, or remove it"
            yield Violation(f"{_GLOBAL}.{name}", profiler[name], expected)
    beyond = [rank for rank in profiler.finish_hook_ranks if rank >= run.trainer.world_size]
    if beyond:
        expected = f"ranks {beyond} do not exist, actor_rollout_ref.actor has {run.trainer.world_size} workers"
        yield Violation(f"{_GLOBAL}.finish_hook_ranks", profiler.finish_hook_ranks, expected)


def _role_rules(run: RunConfig, role: str, node: ProfilerConfig) -> Iterator[Violation]:
    """Yield a profiled role without a tool, ranks that do not exist, and mini-batches after the last one."""
    key = f"{role}.profiler"
    if node.tool is None:
        yield Violation(f"{key}.enable", True, f"needs a tool: set {_GLOBAL}.tool to one of {', '.join(TOOLS)}")
    if node.tool == "nsys" and run.global_profiler.tool != "nsys":
        yield Violation(f"{key}.tool", node.tool, f"needs workers that nsys has started: set {_GLOBAL}.tool=nsys")
    if isinstance(node.ranks, list) and all(isinstance(rank, int) for rank in node.ranks):
        size = reward_world_size(run) if role == "reward_model" else run.trainer.world_size
        beyond = [rank for rank in node.ranks if rank >= size]
        if beyond:
            yield Violation(f"{key}.ranks", node.ranks, f"ranks {beyond} do not exist, {role} has {size} workers")
        if node.tool in RANKS_MUST_BE_NAMED and not node.ranks and not node.all_ranks:
            expected = f"names no rank to profile by {node.tool}: write a list such as [0], or all_ranks=true"
            yield Violation(f"{key}.ranks", node.ranks, expected)
    trained = {"actor_rollout_ref.actor": run.actor_rollout_ref.actor, "critic": run.critic}.get(role)
    if node.tool == "torch" and trained is not None and trained.ppo_mini_batch_size > 0:
        options = select(node, "tool_config.torch")
        batches = max(1, run.prompts_per_step // trained.ppo_mini_batch_size) * trained.ppo_epochs
        if isinstance(options, TorchProfilerToolConfig) and options.first >= batches:
            name = "step_start" if options.active is None else "skip_first"
            expected = f"is after the last mini-batch: an update has {batches}, counted from 0"
            if options.active is not None:
                expected = f"plus wait={options.wait} and warmup={options.warmup} {expected}"
            yield Violation(f"{key}.tool_config.torch.{name}", options[name], expected)


def missing_part(tool: str, device: str, runs_here: bool) -> str | None:
    """Return the part that a tool lacks and what to do; None if it lacks nothing."""
    needed = _DEVICES.get(tool)
    if tool == "npu" and device in ("cuda", "cpu"):
        return f"profiles Ascend devices, and trainer.device={device}: profile with torch"
    if needed is not None and device != needed:
        instead = f", or profile with {'npu' if device == 'npu' else 'torch'}"
        what = {"torch_memory": "records the allocator of CUDA and "}.get(tool, "")
        return f"{what}needs trainer.device={needed}, not {device}{instead}"
    package = _PACKAGES.get(tool)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed: install it, or profile with torch"
    if tool == "nsys" and runs_here and shutil.which("nsys") is None:
        return "needs the program nsys of Nsight Systems on the PATH: install it, or profile with torch"
    return None
