"""Import paths of versions since October 2025, mapped to the modules of this version."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_REWARDS = "verl.workers.rewards.managers"
_ROLES = "verl.workers.roles"
_BUCKETS = (
    "weights reach the engine by buckets (verl.workers.sharding_manager); a way of your own is not supported: set "
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes only"
)
_WORKERS = "actor, critic and reward model have workers of their own: derive from EngineWorker in verl.workers.roles"
_SERVERS = "verl.experimental.agent_loop.AgentLoopManager starts the servers, and each client balances its requests"
_REJECTION = "algorithm.rollout_correction.rollout_rs is not in this version yet"
_COROUTINE = (
    "scores are made by the managers of verl.workers.reward_manager, whose __call__ takes a batch: derive from "
    "AbstractRewardManager there, and see docs/reward_functions.md"
)


class Facade(NamedTuple):
    """The names of a path: available names with their module, and the reasons why others are missing.

    A name that has changed is written ``module:name``.
    """

    names: Mapping[str, str]
    absent: Mapping[str, str] = {}


FACADES = {
    # scripts that start a worker of both strategies, since 0.7
    "verl.workers.engine_workers": Facade(
        {"ActorRolloutRefWorker": _ROLES}, dict.fromkeys(("TrainingWorker", "TrainingWorkerConfig"), _WORKERS)
    ),
    # forks that add a way of the weights, since 0.7
    "verl.checkpoint_engine": Facade(
        {},
        dict.fromkeys(
            (
                "CheckpointEngine",
                "CheckpointEngineManager",
                "CheckpointEngineRegistry",
                "CheckpointEngineWithCache",
                "CheckpointEngineWorker",
                "ColocatedCheckpointEngine",
                "TensorMeta",
            ),
            _BUCKETS,
        ),
    ),
    # reward managers of forks, since 0.7
    "verl.experimental.reward_loop": Facade(
        {
            **dict.fromkeys(("get_reward_manager_cls", "register"), _REWARDS),
            **dict.fromkeys(("NaiveRewardManager", "DAPORewardManager", "AbstractRewardManager"), _REWARDS),
            "load_reward_manager": "verl.workers.rewards.loading",
        },
        dict.fromkeys(
            ("RewardLoopManager", "RewardLoopWorker", "RewardModelManager", "RewardManagerBase", "RemoteRewardManager"),
            _COROUTINE,
        ),
    ),
    # losses and trainers of forks, since 0.7; ``verl.trainer.ppo.mismatch_helper`` before
    "verl.trainer.ppo.rollout_corr_helper": Facade(
        {
            "compute_offpolicy_metrics": "verl.algos.mismatch:compute_mismatch_metrics",
            **dict.fromkeys(
                ("compute_is_metrics", "compute_mismatch_metrics", "compute_rollout_importance_weights"),
                "verl.algos.mismatch",
            ),
        },
        {
            **dict.fromkeys(
                (
                    "compute_rollout_rejection_mask",
                    "compute_rs_metrics",
                    "compute_rollout_correction_and_rejection_mask",
                ),
                _REJECTION,
            ),
            **dict.fromkeys(
                (
                    "compute_rollout_correction_weights",
                    "compute_rollout_correction_and_add_to_batch",
                    "compute_rollout_corr_metrics_from_logprobs",
                    "apply_bypass_mode",
                    "apply_rollout_correction",
                ),
                "call compute_rollout_importance_weights of this module, or set actor.use_rollout_log_probs",
            ),
        },
    ),
    # agent loops of forks, since 0.8
    "verl.workers.rollout.llm_server": Facade(
        {"LLMServerClient": "verl.experimental.agent_loop.servers:AsyncLLMServerManager"},
        dict.fromkeys(
            ("LLMServerManager", "GlobalRequestLoadBalancer"),
            _SERVERS,
        ),
    ),
    "verl.utils.skip": Facade(
        {"RolloutSkip": "verl.trainer.ppo.rollout_skip"},
        dict.fromkeys(
            ("SkipManager", "BaseSkip"),
            "rollouts are reused by RolloutSkip of this module: set actor_rollout_ref.rollout.skip_rollout",
        ),
    ),
    # commands
    "verl.trainer.main_ppo_sync": Facade(
        dict.fromkeys(("main", "run_ppo", "TaskRunner"), "verl.trainer.main_ppo"),
        {"PPOTrainer": "the trainer is verl.trainer.ppo.ray_trainer.RayPPOTrainer"},
    ),
    "verl.trainer.sft_trainer_ray": Facade(
        dict.fromkeys(("main", "run_checked"), "verl.trainer.sft_trainer"),
        {"SFTTrainer": "the trainer is verl.trainer.sft.trainer.SFTTrainer"},
    ),
    "verl.experimental.one_step_off_policy": Facade(
        {
            "OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer",
            "OneStepOffTaskRunner": "recipe.one_step_off_policy.main_ppo",
        }
    ),
    "verl.experimental.one_step_off_policy.main_ppo": Facade(
        dict.fromkeys(("main", "OneStepOffTaskRunner"), "recipe.one_step_off_policy.main_ppo")
    ),
    "verl.experimental.one_step_off_policy.ray_trainer": Facade(
        {"OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer"}
    ),
}
"""Every façade of these versions. They import their names when they are asked for."""


def facade(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a façade.

    Raises: ImportError, when a name is asked for that this version does not have, with the reason.
    """
    known = FACADES[module]

    def load(name: str) -> Any:
        if name in known.absent:
            raise ImportError(f"{module}.{name} is not here: {known.absent[name]}", name=module)
        if name not in known.names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, other = known.names[name].partition(":")
        return getattr(importlib.import_module(place), other or name)

    return load
