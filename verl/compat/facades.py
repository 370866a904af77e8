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


_OLD = "no fork builds on version 0.6 or an earlier one"
_ROLES_TAKEN = "forks of versions up to 0.6 build their workers on verl.workers.roles"
_DROPPED = "the established project drops the path"
_NOT_ACTORS = dict.fromkeys(
    ("FullyAsyncRollouter", "FullyAsyncTrainer", "MessageQueue", "MessageQueueClient", "ParameterSynchronizer"),
    "one driver schedules, trains and publishes: derive from verl.trainer.asynchronous.trainer.AsyncTrainer",
)
_SCRIPTS_MOVED = "launch scripts that name the path start the command of verl.trainer or of the recipe"


class Facade(NamedTuple):
    """An established import path: who needs it, its names and their modules, why others are missing, when it can go.

    A name that has changed is written ``module:name``.
    """

    needed_by: str
    until: str
    names: Mapping[str, str]
    absent: Mapping[str, str] = {}


FACADES = {
    # Versions up to 0.6. These paths import the names themselves, so that type checkers see the classes.
    "verl.workers.rollout.schemas": Facade(
        "loops of forks that drive the conversations of SGLang by themselves",
        "forks leave conversations to verl.experimental.agent_loop",
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
        "trainers of forks that build their model and optimizer with Megatron-Core",
        _ROLES_TAKEN,
        {"MegatronPPOActor": _WORKERLESS},
    ),
    "verl.workers.critic": Facade(
        "trainers of forks that build their model and optimizer",
        _ROLES_TAKEN,
        dict.fromkeys(("BasePPOCritic", "DataParallelPPOCritic"), _WORKERLESS),
    ),
    "verl.workers.critic.dp_critic": Facade(
        "as verl.workers.critic", _ROLES_TAKEN, {"DataParallelPPOCritic": _WORKERLESS}
    ),
    "verl.workers.critic.megatron_critic": Facade(
        "as verl.workers.critic", _ROLES_TAKEN, {"MegatronPPOCritic": _WORKERLESS}
    ),
    "verl.workers.reward_model": Facade(
        "workers of forks with a model of rewards", _ROLES_TAKEN, {"BasePPORewardModel": _WORKERLESS}
    ),
    "verl.workers.reward_model.megatron": Facade(
        "as verl.workers.reward_model", _ROLES_TAKEN, {"MegatronRewardModel": _WORKERLESS}
    ),
    "verl.utils.logger": Facade(
        "workers of forks that log by rank",
        _OLD,
        {
            **dict.fromkeys(
                (
                    "DecoratorLoggerBase",
                    "log_with_rank",
                    "print_rank_0",
                    "print_with_rank",
                    "print_with_rank_and_timer",
                ),
                "verl.compat.logger",
            ),
            "LocalLogger": "verl.utils.observe.tracking",
        },
    ),
    "verl.utils.experimental.torch_functional": Facade(
        "models of forks with a fused head",
        "forks take verl.utils.kernel.linear_cross_entropy",
        {"FusedLinearForPPO": "verl.compat.fused_linear"},
    ),
    "verl.utils.megatron.pipeline_parallel": Facade(
        "workers of forks that run pipeline schedules",
        _ROLES_TAKEN,
        dict.fromkeys(("compute_transformers_input_shapes", "make_batch_generator"), "verl.compat.megatron_parallel"),
    ),
    "verl.utils.megatron.sequence_parallel": Facade(
        "models of forks on Megatron-Core",
        _ROLES_TAKEN,
        dict.fromkeys(
            ("is_sequence_parallel_param", "mark_parameter_as_sequence_parallel", "pad_to_sequence_parallel"),
            "verl.compat.megatron_parallel",
        ),
    ),
    "verl.models.transformers.monkey_patch": Facade(
        "workers of forks that build their model", _ROLES_TAKEN, {"apply_monkey_patch": "verl.compat.monkey_patch"}
    ),
    "verl.workers.sharding_manager.fsdp_ulysses": Facade(
        "workers of forks that run attention with sequence parallelism",
        _ROLES_TAKEN,
        {"FSDPUlyssesShardingManager": "verl.compat.ulysses_context"},
    ),
    "verl.utils.vllm.patch": Facade(
        "forks that load weights into vLLM by themselves",
        "vLLM's load_weights takes the loader of an expert from its layer",
        {"patch_vllm_moe_model_weight_loader": "verl.compat.expert_loaders"},
    ),
    # Versions since October 2025. These paths load the names when they are asked for.
    "verl.workers.engine_workers": Facade(
        "scripts since 0.7, which start a worker of both strategies",
        _DROPPED,
        {"ActorRolloutRefWorker": _ROLES},
        dict.fromkeys(("TrainingWorker", "TrainingWorkerConfig"), _WORKERS),
    ),
    "verl.checkpoint_engine": Facade(
        "forks since 0.7, which move the weights in a way of their own",
        _DROPPED,
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
        _DROPPED,
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
        _DROPPED,
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
        _DROPPED,
        {"LLMServerClient": "verl.experimental.agent_loop.servers:AsyncLLMServerManager"},
        dict.fromkeys(
            ("LLMServerManager", "GlobalRequestLoadBalancer"),
            _SERVERS,
        ),
    ),
    "verl.utils.skip": Facade(
        "trainers of forks since 0.8, which wrap their rollout workers",
        _DROPPED,
        {"RolloutSkip": "verl.trainer.ppo.rollout_skip"},
        dict.fromkeys(
            ("SkipManager", "BaseSkip"),
            "rollouts are reused by RolloutSkip of this module: set actor_rollout_ref.rollout.skip_rollout",
        ),
    ),
    "verl.trainer.main_ppo_sync": Facade(
        "launch scripts since 0.8",
        _SCRIPTS_MOVED,
        dict.fromkeys(("main", "run_ppo", "TaskRunner"), "verl.trainer.main_ppo"),
        {"PPOTrainer": "the trainer is verl.trainer.ppo.ray_trainer.RayPPOTrainer"},
    ),
    "verl.trainer.sft_trainer_ray": Facade(
        "launch scripts since 0.7",
        _SCRIPTS_MOVED,
        dict.fromkeys(("main", "run_checked"), "verl.trainer.sft_trainer"),
        {"SFTTrainer": "the trainer is verl.trainer.sft.trainer.SFTTrainer"},
    ),
    "verl.experimental.one_step_off_policy": Facade(
        "forks of the recipe since 0.7",
        "forks import recipe.one_step_off_policy",
        {
            "OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer",
            "OneStepOffTaskRunner": "recipe.one_step_off_policy.main_ppo",
        },
    ),
    "verl.experimental.one_step_off_policy.main_ppo": Facade(
        "launch scripts since 0.7",
        _SCRIPTS_MOVED,
        dict.fromkeys(("main", "OneStepOffTaskRunner"), "recipe.one_step_off_policy.main_ppo"),
    ),
    "verl.experimental.fully_async_policy": Facade(
        "forks of the recipe since 0.7",
        "forks import recipe.fully_async_policy",
        {
            "FullyAsyncTaskRunner": "verl.trainer.main_ppo",
            "AsyncTrainer": "verl.trainer.asynchronous.trainer",
        },
        _NOT_ACTORS,
    ),
    "verl.experimental.fully_async_policy.fully_async_main": Facade(
        "launch scripts since 0.7",
        _SCRIPTS_MOVED,
        {
            "main": "recipe.fully_async_policy.fully_async_main",
            "FullyAsyncTaskRunner": "verl.trainer.main_ppo",
        },
        _NOT_ACTORS,
    ),
    "verl.experimental.one_step_off_policy.ray_trainer": Facade(
        "forks of the recipe since 0.7",
        "forks import recipe.one_step_off_policy",
        {"OneStepOffRayTrainer": "recipe.one_step_off_policy.ray_trainer"},
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
