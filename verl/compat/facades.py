"""Import paths that only forks and other versions need, mapped to the modules of this version."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_REWARDS = "verl.workers.rewards.managers"
_ROLES = "verl.workers.roles"
_WORKERLESS = "verl.compat.workerless"
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
    """An import path: who needs it, its names with their module, why others are missing, and when the path can go.

    A name that has changed is written ``module:name``.
    """

    needed_by: str
    names: Mapping[str, str]
    absent: Mapping[str, str] = {}
    until: str = "no supported version of the established project has the path"


FACADES = {
    # Versions up to 0.6. These paths import the names themselves, so that type checkers see the classes.
    "verl.workers.rollout.schemas": Facade(
        "loops of forks that drive the conversations of SGLang by themselves",
        {
            **dict.fromkeys(
                ("AsyncRolloutRequest", "AsyncRolloutRequestStateEnum", "FinishReasonTypeEnum"),
                "verl.compat.rollout_requests",
            ),
            "Message": "verl.tools.schemas",
            "TokenizationSanityCheckModeEnum": "verl.utils.chat:SanityCheckMode",
        },
    ),
    "verl.workers.actor.megatron_actor": Facade(
        "trainers of forks that build their model and optimizer with Megatron-Core", {"MegatronPPOActor": _WORKERLESS}
    ),
    "verl.workers.critic": Facade(
        "trainers of forks that build their model and optimizer",
        dict.fromkeys(("BasePPOCritic", "DataParallelPPOCritic"), _WORKERLESS),
    ),
    "verl.workers.critic.dp_critic": Facade("as verl.workers.critic", {"DataParallelPPOCritic": _WORKERLESS}),
    "verl.workers.critic.megatron_critic": Facade("as verl.workers.critic", {"MegatronPPOCritic": _WORKERLESS}),
    "verl.workers.reward_model": Facade(
        "workers of forks with a model of rewards", {"BasePPORewardModel": _WORKERLESS}
    ),
    "verl.workers.reward_model.megatron": Facade("as verl.workers.reward_model", {"MegatronRewardModel": _WORKERLESS}),
    "verl.utils.vllm.patch": Facade(
        "forks that load weights into vLLM by themselves",
        {"patch_vllm_moe_model_weight_loader": "verl.compat.expert_loaders"},
        until="vLLM's load_weights takes the loader of an expert from its layer",
    ),
    # Versions since October 2025. These paths load the names when they are asked for.
    "verl.workers.engine_workers": Facade(
        "scripts since 0.7, which start a worker of both strategies",
        {"ActorRolloutRefWorker": _ROLES},
        dict.fromkeys(("TrainingWorker", "TrainingWorkerConfig"), _WORKERS),
    ),
    "verl.checkpoint_engine": Facade(
        "forks since 0.7, which move the weights in a way of their own",
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
    "verl.experimental.reward_loop": Facade(
        "reward managers of forks since 0.7",
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
    "verl.trainer.ppo.rollout_corr_helper": Facade(
        "losses and trainers of forks since 0.7; those before import verl.trainer.ppo.mismatch_helper",
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
    "verl.workers.rollout.llm_server": Facade(
        "agent loops of forks since 0.8",
        {"LLMServerClient": "verl.experimental.agent_loop.servers:AsyncLLMServerManager"},
        dict.fromkeys(
            ("LLMServerManager", "GlobalRequestLoadBalancer"),
            _SERVERS,
        ),
    ),
    "verl.utils.skip": Facade(
        "trainers of forks since 0.8, which wrap their rollout workers",
        {"RolloutSkip": "verl.trainer.ppo.rollout_skip"},
        dict.fromkeys(
            ("SkipManager", "BaseSkip"),
            "rollouts are reused by RolloutSkip of this module: set actor_rollout_ref.rollout.skip_rollout",
        ),
    ),
    "verl.trainer.main_ppo_sync": Facade(
        "launch scripts since 0.8",
        dict.fromkeys(("main", "run_ppo", "TaskRunner"), "verl.trainer.main_ppo"),
        {"PPOTrainer": "the trainer is verl.trainer.ppo.ray_trainer.RayPPOTrainer"},
    ),
    "verl.trainer.sft_trainer_ray": Facade(
        "launch scripts since 0.7",
        dict.fromkeys(("main", "run_checked"), "verl.trainer.sft_trainer"),
        {"SFTTrainer": "the trainer is verl.trainer.sft.trainer.SFTTrainer"},
    ),
    "verl.experimental.one_step_off_policy": Facade(
        "forks of the recipe since 0.7",
        {
            "OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer",
            "OneStepOffTaskRunner": "recipe.one_step_off_policy.main_ppo",
        },
    ),
    "verl.experimental.one_step_off_policy.main_ppo": Facade(
        "launch scripts since 0.7",
        dict.fromkeys(("main", "OneStepOffTaskRunner"), "recipe.one_step_off_policy.main_ppo"),
    ),
    "verl.experimental.one_step_off_policy.ray_trainer": Facade(
        "forks of the recipe since 0.7", {"OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer"}
    ),
}
"""Every path that imports this package, and no other module may: the checks of layers leave these out."""


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
