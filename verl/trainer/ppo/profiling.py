"""The driver's side of profiling: where the roles' profilers write, and when they start and stop."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.base_config import ConfigError, Violation
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.state import RunState, Timing
from verl.utils.failures import only_warning
from verl.utils.profiler import ProfilerConfig, marked_timer
from verl.utils.profiler.captures import save_folder
from verl.utils.profiler.results import keep_files, missing_files

logger = logging.getLogger(__name__)

NODES = {
    "actor_rollout": ("actor_rollout_ref.actor.profiler", "actor_rollout_ref.rollout.profiler"),
    "ref": ("actor_rollout_ref.ref.profiler",),
    "critic": ("critic.profiler",),
    "rm": ("reward_model.profiler",),
}
"""Worker group -> the nodes of its roles."""
STOP_TIMEOUT_S = 600.0
"""Seconds that workers get to write their captures when the run is over."""


# ---- before the workers start


def absolute_save_paths(config: DictConfig) -> None:
    """Make the save paths of profilers absolute, since a worker may have another working folder than the driver."""
    for key in itertools.chain(["global_profiler"], *NODES.values()):
        node = OmegaConf.select(config, key)
        if node is not None:
            with open_dict(node):
                node.save_path = str(save_folder(node.get("save_path")))


def check_steps(steps: Collection[int] | None, total_steps: int, resumed_step: int = 0) -> None:
    """Check that the run reaches the steps of ``global_profiler.steps``; warn of those before a resume.

    Raises: ConfigError when a step is after the last one.
    """
    steps = list(steps or ())
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        expected = f"steps {beyond} are after the last step, {total_steps}: lower them, or raise trainer.total_epochs"
        raise ConfigError([Violation("global_profiler.steps", steps, expected)])
    done = [step for step in steps if step <= resumed_step]
    if done:
        logger.warning("global_profiler.steps: %s are not profiled, the run resumes after step %d", done, resumed_step)


def nsys_group_options(run: RunConfig, groups: Iterable[str]) -> dict[str, Any]:
    """Return the options with which nsys wraps the processes of a pool; none if nsys is not used."""
    profiler = run.global_profiler
    if not profiler.steps or profiler.tool != "nsys":
        return {}
    nodes = [attrgetter(node)(run) for group in groups for node in NODES[group]]
    used = [node for node in nodes if node is not None and node.enable and node.tool == "nsys"]
    ranks = sorted({rank for node in used for rank in node.ranks})
    return {
        "profile_steps": profiler.steps,
        "profile_ranks": None if any(node.all_ranks for node in used) else ranks,  # None: all
        "profile_save_path": profiler.save_path,
        "worker_nsight_options": (profiler.global_tool_config or {})["nsys"]["worker_nsight_options"],
    }


# ---- around the steps


@contextmanager
def captured(
    profiler: ProfilerConfig,
    state: RunState,
    groups: Mapping[str, RayWorkerGroup],
    timing: Timing,
    start: Callable[[bool], None],
    stop: Callable[[bool], None],
) -> Iterator[None]:
    """Start the profilers before a listed step, and stop them after it unless the capture goes on into the next step.

    After a step that fails, ``end_profiling`` stops them.
    """
    if starts_profiling(profiler, state):
        with marked_timer("start_profile", timing):
            start(True)
    yield
    if stops_profiling(profiler, state):
        with marked_timer("stop_profile", timing):
            stop(True)
            finish_profiling(profiler, state, groups)


def starts_profiling(profiler: ProfilerConfig, state: RunState) -> bool:
    """Whether a capture starts before this step: it is listed, and no capture goes on from the step before."""
    return state.step in (profiler.steps or ()) and not state.profiled_groups


def start_profiling(state: RunState, groups: Mapping[str, RayWorkerGroup]) -> None:
    """Start the profilers of all groups."""
    state.profiled_groups = list(groups.values())
    for name, group in groups.items():
        role = {"role": "e2e"} if name == "actor_rollout" else {}
        group.start_profile(**role, profile_step=str(state.step))


def stops_profiling(profiler: ProfilerConfig, state: RunState) -> bool:
    """Whether the capture that runs ends after this step, and does not go on into the next one."""
    next_step = state.step + 1
    runs_on = profiler.profile_continuous_steps and next_step in (profiler.steps or ()) and not state.is_last_step
    return bool(state.profiled_groups) and not runs_on


def stop_profiling(state: RunState) -> None:
    """Stop the profilers that run."""
    for group in state.profiled_groups:
        group.stop_profile()
    state.profiled_groups = ()


def finish_profiling(profiler: ProfilerConfig, state: RunState, groups: Mapping[str, RayWorkerGroup]) -> None:
    """After the last profiled step, gather the files of other nodes, and let workers run the command of the user.

    A file that cannot be gathered stays where it is, with a warning.
    """
    if any(state.step < step <= state.total_steps for step in profiler.steps or ()):
        return
    folder = save_folder(profiler.save_path)
    if profiler.relocate_results:
        for group in groups.values():
            try:
                wanted = missing_files(folder, group.profile_files(str(folder)))
                for contents in group.read_profile_files(str(folder), wanted) if wanted else ():
                    keep_files(folder, contents)
            except OSError as error:
                logger.warning("profiles of other nodes could not be gathered in %s: %s", folder, error)
    if profiler.finish_hook_cmd is not None:
        ranks = None if profiler.finish_hook_all_ranks else profiler.finish_hook_ranks or [0]
        groups["actor_rollout"].run_profile_command(profiler.finish_hook_cmd, str(folder), ranks)


def end_profiling(state: RunState) -> None:
    """Flush captures still open at exit.

    Workers that an error has ended wrote theirs. A failure here is only logged, because the run is over.
    """
    groups = state.profiled_groups
    state.profiled_groups = ()
    for group in groups:
        if group.ended:
            continue
        group.call_timeout_s = min(group.call_timeout_s, STOP_TIMEOUT_S)
        text = "the profile of a worker group could not be written"
        with only_warning(logger, text, trace=True):  # a failure must not hide the error that ended the run
            group.stop_profile()


def dump_memory(tool: str | None, steps: Collection[int] | None, step: int, actor: RayWorkerGroup) -> None:
    """Let the actor write a memory snapshot after each listed step, or after every step if the list is empty."""
    if tool == "torch_memory" and (steps is None or step in steps):
        actor.dump_memory_snapshot(tag=f"post_update_step{step}", sub_dir=f"step{step}")
