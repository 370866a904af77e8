"""Rules of ``global_profiler`` and of the ``profiler`` node of each role: what would be profiled, and can be."""

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.refusals import select
from verl.trainer.ppo.steps import prompts_per_step
from verl.utils import envs
from verl.utils.profiler.config import RANKS_MUST_BE_NAMED, TOOLS

Tree = Mapping[str, Any]

_DEVICES = {"nsys": "cuda", "npu": "npu", "torch_memory": "cuda"}
_PACKAGES = {"nsys": "nvtx", "npu": "torch_npu"}
_GLOBAL = "global_profiler"
_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic", "reward_model")
_OF_A_ROLE = ("enable", "all_ranks", "ranks")
_OF_THE_RUN = ("steps", "profile_continuous_steps", "global_tool_config")
_OPTIONS_OF_THE_RUN = ("nsys", "torch_memory")


def profiler_rules(tree: Tree, use_reference: bool, use_critic: bool) -> Iterator[Violation]:
    """Yield profilers that cannot run, and switches that profile nothing."""
    profiler = tree[_GLOBAL]
    yield from _place_rules(tree)
    enabled = dict(_enabled(tree, use_reference, use_critic))
    chosen = [profiler.get("tool"), *(node.get("tool") for node in enabled.values())]
    if any(tool not in (None, *TOOLS) for tool in chosen):
        return  # said by the dataclass
    tools = set(chosen)
    yield from _step_rules(tree, enabled)
    for role, node in enabled.items():
        yield from _role_rules(tree, role, node)
    yield from _folder_rules(tree, enabled)
    for tool in sorted(tools - {None}):
        where = next((f"{role}.profiler" for role, node in enabled.items() if node.get("tool") == tool), _GLOBAL)
        key = f"{_GLOBAL if profiler.get('tool') == tool else where}.tool"
        if tool == "nsys":
            yield from _nsys_rules(tree)
        reason = missing_part(tool, str(select(tree, "trainer.device")), _runs_here(tree))
        if reason is not None:
            yield Violation(key, tool, reason)


def _place_rules(tree: Tree) -> Iterator[Violation]:
    """Yield keys of a role at the run and of the run at a role, which nothing reads, and tools that there are not."""
    for key in _OF_A_ROLE:
        if key in tree[_GLOBAL]:
            expected = f"is said by each role: write actor_rollout_ref.actor.profiler.{key}"
            yield Violation(f"{_GLOBAL}.{key}", tree[_GLOBAL][key], expected)
    seen = []
    for role in _ROLES:
        node = select(tree, f"{role}.profiler")
        if not isinstance(node, Mapping):
            continue
        for key in _OF_THE_RUN:
            if key in node:
                yield Violation(f"{role}.profiler.{key}", node[key], f"is said for the run: write {_GLOBAL}.{key}")
        if node.get("tool_config") not in seen:  # it may be that of the actor
            yield from _tool_config_rules(f"{role}.profiler.tool_config", node.get("tool_config"), TOOLS)
        seen.append(node.get("tool_config"))
    options = tree[_GLOBAL].get("global_tool_config")
    yield from _tool_config_rules(f"{_GLOBAL}.global_tool_config", options, _OPTIONS_OF_THE_RUN)


def _tool_config_rules(key: str, options: Any, tools: tuple[str, ...]) -> Iterator[Violation]:
    """Yield options that are none, and those of a tool that are not read there."""
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


def _nsys_rules(tree: Tree) -> Iterator[Violation]:
    """Yield command lines of nsys that are none."""
    for name in ("controller_nsight_options", "worker_nsight_options"):
        key = f"{_GLOBAL}.global_tool_config.nsys.{name}"
        if not isinstance(select(tree, key), Mapping):
            yield Violation(key, select(tree, key), "must be a mapping of options of nsys profile")


def _folder_rules(tree: Tree, enabled: Mapping[str, Tree]) -> Iterator[Violation]:
    """Yield folders that cannot be made on this machine, where it is the one that writes to them."""
    folders: dict[str, str] = {}
    paths = [(f"{role}.profiler.save_path", node.get("save_path")) for role, node in enabled.items()]
    run_path = tree[_GLOBAL].get("save_path")
    if run_path in [path for _, path in paths] or tree[_GLOBAL].get("tool") in _OPTIONS_OF_THE_RUN:
        paths.insert(0, (f"{_GLOBAL}.save_path", run_path))
    for key, path in paths:
        if isinstance(path, str):
            folders.setdefault(path, key)
    for path, key in folders.items():
        problem = _folder_problem(path, _runs_here(tree))
        if problem is not None:
            yield Violation(key, path, problem)


def _folder_problem(path: str, runs_here: bool) -> str | None:
    if "://" in path:
        return "must be a folder: a profiler writes to no other storage"
    if not runs_here:
        return None
    folder = Path(path).expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not there.is_dir():
        return f"cannot be a folder: {there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"cannot be written: {there} allows it to others only"


def _enabled(tree: Tree, use_reference: bool, use_critic: bool) -> Iterator[tuple[str, Tree]]:
    """Yield the profiler node of each role of this run that is to be profiled."""
    runs = {
        "actor_rollout_ref.actor": True,
        "actor_rollout_ref.rollout": True,
        "actor_rollout_ref.ref": use_reference,
        "critic": use_critic,
        "reward_model": select(tree, "reward_model.enable") is True,
    }
    for role, is_run in runs.items():
        node = select(tree, f"{role}.profiler")
        if is_run and isinstance(node, Mapping) and node.get("enable") is True:
            yield role, node


def _step_rules(tree: Tree, enabled: Mapping[str, Tree]) -> Iterator[Violation]:
    """Yield steps that profile nothing, profilers without a step, and steps behind the end of the run."""
    tool, steps = select(tree, f"{_GLOBAL}.tool"), select(tree, f"{_GLOBAL}.steps")
    snapshots = tool == "torch_memory"  # of the actor, after each step
    if not isinstance(steps, list | None) or not all(isinstance(step, int) for step in steps or ()):
        return  # said by the dataclass
    if enabled and not steps and not snapshots:
        role = next(iter(enabled))
        expected = f"names no training step, and {role}.profiler.enable=true: write a list such as [1,2]"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)
    if steps and not enabled and not snapshots:
        expected = "no role of this run is profiled: set actor_rollout_ref.actor.profiler.enable=true, or write null"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)
    total = select(tree, "trainer.total_training_steps")
    beyond = [step for step in steps or () if isinstance(total, int) and step > total]
    if beyond:
        expected = f"steps {beyond} never come with trainer.total_training_steps={total}"
        yield Violation(f"{_GLOBAL}.steps", steps, expected)


def _role_rules(tree: Tree, role: str, node: Tree) -> Iterator[Violation]:
    """Yield a role without a tool, ranks that it does not have, and mini-batches that never come."""
    key, tool, ranks = f"{role}.profiler", node.get("tool"), node.get("ranks")
    if tool is None:
        yield Violation(f"{key}.enable", True, f"needs a tool: set {_GLOBAL}.tool to one of {', '.join(TOOLS)}")
    if tool == "nsys" and select(tree, f"{_GLOBAL}.tool") != "nsys":
        yield Violation(f"{key}.tool", tool, f"needs workers that nsys has started: set {_GLOBAL}.tool=nsys")
    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
        size = _world_size(tree, role)
        beyond = [rank for rank in ranks if size is not None and rank >= size]
        if beyond:
            yield Violation(f"{key}.ranks", ranks, f"ranks {beyond} do not exist, {role} has {size} workers")
        if tool in RANKS_MUST_BE_NAMED and not ranks and not node.get("all_ranks"):
            expected = f"names no rank to profile by {tool}: write a list such as [0], or all_ranks=true"
            yield Violation(f"{key}.ranks", ranks, expected)
    start = select(node, "tool_config.torch.step_start", 0)
    batches = _mini_batches(tree, role)
    if tool == "torch" and batches is not None and isinstance(start, int) and start >= batches:
        expected = f"never comes: an update has {batches} mini-batches, the first is 0"
        yield Violation(f"{key}.tool_config.torch.step_start", start, expected)


def _world_size(tree: Tree, role: str) -> int | None:
    """Return the workers of a role, None where that is not known."""
    pool = "trainer"
    if role == "reward_model" and select(tree, "reward_model.enable_resource_pool"):
        pool = "reward_model"
    sizes = [select(tree, f"{pool}.{name}") for name in ("n_gpus_per_node", "nnodes")]
    return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None


def _mini_batches(tree: Tree, role: str) -> int | None:
    """Return the optimizer steps of one update of a role, None for a role that does not train."""
    node = select(tree, role)
    mini, epochs = node.get("ppo_mini_batch_size"), node.get("ppo_epochs")
    if not isinstance(mini, int) or not isinstance(epochs, int) or mini < 1:
        return None
    return max(1, prompts_per_step(tree) // mini) * epochs


def _runs_here(tree: Tree) -> bool:
    """Whether Ray is going to be started on this machine alone."""
    address = select(tree, "ray_kwargs.ray_init.address") or envs.read("RAY_ADDRESS")
    return (address or "local") == "local"


def missing_part(tool: str, device: str, runs_here: bool) -> str | None:
    """Return what a tool lacks, and what to do; None where it lacks nothing."""
    needed = _DEVICES.get(tool)
    if tool == "npu" and device in ("cuda", "cpu"):
        return f"profiles Ascend devices, which trainer.device={device} has none of: profile with torch"
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
