"""Start and stop of the role profilers around the steps that ``global_profiler.steps`` lists."""

from typing import TYPE_CHECKING, Any

from verl.utils.profiler import marked_timer

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def start_profiling(trainer: "RayPPOTrainer", timing: dict[str, float]) -> None:
    """Start, unless the step is not listed or the profilers run on from the one before."""
    step = trainer.global_steps
    if is_profiled(trainer, step) and not (continuous(trainer) and is_profiled(trainer, step - 1)):
        with marked_timer("start_profile", timing):
            trainer.actor_rollout_wg.start_profile(role="e2e", profile_step=str(step))
            for group in other_groups(trainer):
                group.start_profile(profile_step=str(step))


def stop_profiling(trainer: "RayPPOTrainer", timing: dict[str, float]) -> None:
    """Stop, unless the step is not listed or the profilers run on into the next one."""
    step = trainer.global_steps
    runs_on = continuous(trainer) and is_profiled(trainer, step + 1) and not trainer.is_last_step
    if is_profiled(trainer, step) and not runs_on:
        with marked_timer("stop_profile", timing):
            for group in [trainer.actor_rollout_wg, *other_groups(trainer)]:
                group.stop_profile()


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
