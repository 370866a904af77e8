"""Start and stop of the role profilers around the steps that ``global_profiler.steps`` lists, and where they write."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from verl.base_config import ConfigError, Violation
from verl.utils.profiler import marked_timer
from verl.utils.profiler.captures import save_folder

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

NODES = {
    "actor_rollout": ("actor_rollout_ref.actor.profiler", "actor_rollout_ref.rollout.profiler"),
    "ref": ("actor_rollout_ref.ref.profiler",),
    "critic": ("critic.profiler",),
    "rm": ("reward_model.profiler",),
}
"""Worker group -> the nodes of its roles."""
STOP_TIMEOUT_S = 600.0
"""How long workers may take to write what they have captured, where the run is over."""


# ---- before the workers start


def absolute_save_paths(config: Any) -> None:
    """Write out in full where profilers write: a worker may have another working folder than the driver."""
    for key in ("global_profiler", *(node for nodes in NODES.values() for node in nodes)):
        node = OmegaConf.select(config, key)
        if node is not None:
            with open_dict(node):
                node.save_path = str(save_folder(node.get("save_path")))


def check_steps(config: Any, total_steps: int, resumed_step: int = 0) -> None:
    """Hold the listed steps against those that the run takes.

    Raises: ConfigError where one lies behind the end; those before a resume are only told.
    """
    steps = list(OmegaConf.select(config, "global_profiler.steps") or ())
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        expected = f"steps {beyond} never come, the run has {total_steps}: lower them, or raise trainer.total_epochs"
        raise ConfigError([Violation("global_profiler.steps", steps, expected)])
    done = [step for step in steps if step <= resumed_step]
    if done:
        logger.warning("global_profiler.steps: %s are not profiled, the run resumes after step %d", done, resumed_step)


def nsys_ranks(config: Any, groups: Iterable[str]) -> list[int] | None:
    """Return the ranks that nsys has to wrap for groups of one pool, None for all."""
    nodes = [OmegaConf.select(config, node) for group in groups for node in NODES[group]]
    used = [node for node in nodes if node is not None and node.enable and node.tool == "nsys"]
    if any(node.all_ranks for node in used):
        return None
    return sorted({rank for node in used for rank in node.ranks})


def nsys_group_options(config: Any, groups: Iterable[str]) -> dict[str, Any]:
    """Return what the worker groups of a pool need to have nsys wrap their processes; nothing where it is not used.

    Raises: ValueError when the options of nsys are missing.
    """
    steps = OmegaConf.select(config, "global_profiler.steps")
    if not steps or config.global_profiler.tool != "nsys":
        return {}
    options = OmegaConf.select(config, "global_profiler.global_tool_config.nsys.worker_nsight_options")
    if options is None:
        raise ValueError("global_profiler.global_tool_config.nsys.worker_nsight_options must be set for nsys")
    return {
        "profile_steps": list(steps),
        "profile_ranks": nsys_ranks(config, groups),
        "profile_save_path": config.global_profiler.save_path,
        "worker_nsight_options": OmegaConf.to_container(options),
    }


# ---- around the steps


def start_profiling(trainer: "RayPPOTrainer", timing: dict[str, float]) -> None:
    """Start, unless the step is not listed or the profilers run on from the one before."""
    step = trainer.global_steps
    if is_profiled(trainer, step) and not trainer.profiled_groups:
        trainer.profiled_groups = [trainer.actor_rollout_wg, *other_groups(trainer)]
        with marked_timer("start_profile", timing):
            trainer.actor_rollout_wg.start_profile(role="e2e", profile_step=str(step))
            for group in other_groups(trainer):
                group.start_profile(profile_step=str(step))


def stop_profiling(trainer: "RayPPOTrainer", timing: dict[str, float]) -> None:
    """Stop, unless the step is not listed or the profilers run on into the next one."""
    runs_on = continuous(trainer) and is_profiled(trainer, trainer.global_steps + 1) and not trainer.is_last_step
    if trainer.profiled_groups and not runs_on:
        with marked_timer("stop_profile", timing):
            for group in trainer.profiled_groups:
                group.stop_profile()
        trainer.profiled_groups = ()


def end_profiling(trainer: "RayPPOTrainer") -> None:
    """Stop what still runs at the end of a run, so that a capture that was to go on is written as far as it came.

    Workers that an error has ended have written theirs. What fails here is only told: it is no reason to fail for a
    run that is over, and where an error ends it, that is the one to show.
    """
    groups, trainer.profiled_groups = trainer.profiled_groups, ()
    for group in groups:
        if group.ended:
            continue
        group.call_timeout_s = min(group.call_timeout_s, STOP_TIMEOUT_S)
        try:
            group.stop_profile()
        except Exception:  # see above
            logger.warning("the profile of a worker group could not be written", exc_info=True)


def is_profiled(trainer: "RayPPOTrainer", step: int) -> bool:
    """Whether a step is listed."""
    steps = trainer.config.global_profiler.steps
    return steps is not None and step in steps


def continuous(trainer: "RayPPOTrainer") -> bool:
    """Whether neighbouring steps share one capture."""
    return bool(trainer.config.global_profiler.profile_continuous_steps)


def other_groups(trainer: "RayPPOTrainer") -> list[Any]:
    """Return the worker groups besides the actor's."""
    ref = None if trainer.ref_in_actor else trainer.ref_policy_wg
    return [group for group in (ref, trainer.critic_wg, trainer.rm_wg) if group is not None]


def dump_memory(trainer: "RayPPOTrainer") -> None:
    """Have the actor write a snapshot of its memory after a listed step, or after each where none is listed."""
    profiler, step = trainer.config.global_profiler, trainer.global_steps
    if profiler.tool == "torch_memory" and (profiler.steps is None or step in profiler.steps):
        trainer.actor_rollout_wg.dump_memory_snapshot(tag=f"post_update_step{step}", sub_dir=f"step{step}")
