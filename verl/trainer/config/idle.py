"""Keys that have no effect in a given run: named once, in one line, where they were changed from their default."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from verl.base_config import as_yaml
from verl.trainer.config.refusals import ROLLOUT, select

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ENGINES = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")
REWARD = "reward_model"


class Idle(NamedTuple):
    """Keys below ``node``, with their defaults, that nothing reads while ``switch`` has the value ``off``."""

    switch: str
    off: Any
    node: str
    defaults: Mapping[str, Any]


_SCHEDULE = {"min_lr_ratio": 0.0, "num_cycles": 0.5}
_OF_OTHER_LOSSES = {
    **{"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
    **{"tau_pos": 1.0, "tau_neg": 1.05},
}
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")
_ADAPTERS = {"lora_alpha": 16, "target_modules": "all-linear"}

IDLE: list[Idle] = [
    Idle(f"{ACTOR}.use_kl_loss", False, ACTOR, {"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}),
    Idle(f"{ACTOR}.policy_loss.loss_mode", "vanilla", f"{ACTOR}.policy_loss", _OF_OTHER_LOSSES),
    Idle(f"{ACTOR}.optim.lr_scheduler_type", "constant", f"{ACTOR}.optim", _SCHEDULE),
    Idle("critic.optim.lr_scheduler_type", "constant", "critic.optim", _SCHEDULE),
    Idle("algorithm.use_kl_in_reward", False, "algorithm", {"kl_penalty": "kl"}),
    Idle(
        "algorithm.use_kl_in_reward",
        False,
        "algorithm.kl_ctrl",
        {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1},
    ),
    Idle(
        "algorithm.filter_groups.enable", False, "algorithm.filter_groups", {"metric": None, "max_num_gen_batches": 0}
    ),
    Idle(f"{ROLLOUT}.n", 1, "algorithm.filter_groups", {"enable": False}),
    Idle(
        "reward_model.overlong_buffer.enable",
        False,
        "reward_model.overlong_buffer",
        {"len": 0, "penalty_factor": 0.0, "log": False},
    ),
    Idle(
        "algorithm.rollout_is_threshold",
        None,
        "algorithm",
        {
            "rollout_is_threshold_lower": None,
            "rollout_is_level": "token",
            "rollout_is_mode": "truncate",
            "rollout_is_veto_threshold": 0.0001,
        },
    ),
    Idle("algorithm.use_pf_ppo", False, "algorithm.pf_ppo", {"reweight_method": "pow", "weight_pow": 2.0}),
    Idle(f"{MODEL}.lora_rank", 0, MODEL, _ADAPTERS | {"exclude_modules": None}),
    Idle("critic.model.lora_rank", 0, "critic.model", _ADAPTERS),
    Idle(
        f"{ROLLOUT}.val_kwargs.do_sample", False, f"{ROLLOUT}.val_kwargs", {"temperature": 0, "top_p": 1, "top_k": -1}
    ),
    Idle(f"{ROLLOUT}.do_sample", False, ROLLOUT, {"top_p": 1, "top_k": -1, "repetition_penalty": 1.0}),
    Idle(
        f"{REWARD}.enable",
        False,
        REWARD,
        {
            "enable_resource_pool": False,
            "model.path": "~/models/FsfairX-LLaMA3-RM-v0.1",
            "model.trust_remote_code": False,
            "model.use_shm": False,
            "model.use_remove_padding": False,
            "micro_batch_size": None,
            "micro_batch_size_per_gpu": None,
            "max_length": None,
            "ulysses_sequence_parallel_size": 1,
        },
    ),
    Idle(f"{REWARD}.enable_resource_pool", False, REWARD, {"n_gpus_per_node": 0, "nnodes": 0}),
    Idle(f"{REWARD}.model.input_tokenizer", None, REWARD, {"max_length": None}),
    Idle(f"{ROLLOUT}.skip_rollout", False, ROLLOUT, {"skip_dump_dir": "/tmp/rollout_dump"}),
    Idle("trainer.resume_mode", "auto", "trainer", {"resume_from_path": None}),
    Idle("trainer.resume_mode", "disable", "trainer", {"resume_from_path": None}),
    Idle("trainer.device", "cpu", ROLLOUT, {"cudagraph_capture_sizes": None, "layered_summon": False}),
    Idle("trainer.device", "npu", ROLLOUT, {"layered_summon": False}),
    *(
        Idle("trainer.device", "cpu", engine, {"param_offload": False, "optimizer_offload": False})
        for engine in ENGINES
    ),
    Idle("trainer.device", "cpu", f"{REWARD}.model.fsdp_config", {"param_offload": False}),
    *(
        Idle("trainer.device", "cpu", f"{role}.megatron", dict.fromkeys(_OFFLOADS, False))
        for role in (ACTOR, "actor_rollout_ref.ref", "critic", REWARD)
    ),
    *(Idle("trainer.device", "cpu", node, {"enable_activation_offload": False}) for node in (MODEL, "critic.model")),
    Idle(
        f"{ROLLOUT}.name",
        "hf",
        ROLLOUT,
        {
            "gpu_memory_utilization": 0.5,
            "enforce_eager": False,
            "cudagraph_capture_sizes": None,
            "free_cache_engine": True,
            "tensor_model_parallel_size": 2,
            "expert_parallel_size": 1,
            "max_num_batched_tokens": 8192,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
            "layered_summon": False,
            "engine_kwargs.vllm": {},
        },
    ),
]


def idle_keys(tree: Mapping[str, Any], use_critic: bool = True) -> Iterator[str]:
    """Yield, as ``key=value (why)``, each key that was changed from its default and has no effect in this run."""
    for switch, off, node, defaults in IDLE:
        if select(tree, switch) != off or (node.startswith("critic.") and not use_critic):
            continue
        of_reward_model = any(key.startswith((f"{REWARD}.enable_", f"{REWARD}.model.")) for key in (switch, node))
        if of_reward_model and not select(tree, f"{REWARD}.enable"):
            continue
        for name, default in defaults.items():
            value = select(tree, f"{node}.{name}", default)
            if value != default:
                yield f"{node}.{name}={as_yaml(value)} ({switch}={as_yaml(off)})"
