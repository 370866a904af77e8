"""Rules for changed keys without effect: another option switches them off, or this version does not support them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from verl.algos.names import ADV_ESTIMATORS, BY_LENGTH, LOSS_AGG_MODES, POLICY_LOSSES
from verl.base_config import Idle, Kind, NodeReader, Violation, as_yaml
from verl.models.transformers.packing import packs_rows
from verl.trainer.config.async_training import AsyncTrainingConfig
from verl.trainer.config.keys import ABSENT, free_nodes, is_under, select
from verl.trainer.config.run_config import RunConfig, critic_class, default_of
from verl.utils.json_types import Json, mapping_at
from verl.workers.config import MultiTurnConfig, PolicyLossConfig
from verl.workers.config.reward_model import WITHOUT_MODEL

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REWARD = "reward_model"


# ---- switched off by another option: named once, in one line


_OPTIONS_OF_ESTIMATORS = ("gamma", "lam", "norm_adv_by_std_in_grpo")
_READ_BY_ESTIMATOR: dict[str | None, tuple[str, ...]] = {
    "gae": ("gamma", "lam"),
    "reinforce_plus_plus": ("gamma",),
    "grpo": ("norm_adv_by_std_in_grpo",),
    "grpo_vectorized": ("norm_adv_by_std_in_grpo",),
    "grpo_passk": ("norm_adv_by_std_in_grpo",),
}
_CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_CLIPS = (*_CLIP_RANGE, "clip_ratio_c")
OPTIONS_OF_LOSSES = tuple(name for name in PolicyLossConfig() if name not in ("_target_", "loss_mode"))
_READ_BY_LOSS: dict[str, tuple[str, ...]] = {
    "vanilla": _CLIPS,
    "gspo": _CLIP_RANGE,
    "geo_mean": _CLIP_RANGE,
    "cispo": _CLIP_RANGE,
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": (*_CLIP_RANGE, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
}
FOLLOWS = dict.fromkeys((f"{ACTOR}.loss_scale_factor", "critic.loss_scale_factor"), "data.max_response_length")
"""Keys whose default in YAML is the value of another key."""
_SCHEDULE = ("min_lr_ratio", "num_cycles")
_OFFLOADS = ("param_offload", "optimizer_offload")
_MCORE_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")
_WEIGHTS = ("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold")
_PASSES = ("micro_batch_size", "micro_batch_size_per_gpu", "max_length", "ulysses_sequence_parallel_size")
_OF_GENERATIVE = ("engine_kwargs", "data_processor_config", "sampling_config")
_TURNS = tuple(name for name in MultiTurnConfig() if name not in ("_target_", "enable", "num_repeat_rollouts"))
_LOOPS = ("num_workers", "default_agent_loop", "agent_loop_config_path", "on_failure", "num_retries")
_DEADLINES = ("turn_timeout_s", "tool_timeout_s", "trajectory_timeout_s", "step_timeout_s", "server_timeout_s")
_PACE = tuple(name for name in AsyncTrainingConfig() if name not in ("_target_", "mode", "replay"))  # which is refused
_ENGINE = f"{ROLLOUT}.name"
_OTHER_ENGINES = (("vllm", "sglang"), ("sglang", "vllm"), ("hf", "vllm"), ("hf", "sglang"))
_DEVICE = "trainer.device"


def _without(names: tuple[str, ...], read: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in read)


IDLE = [
    Idle(f"{ACTOR}.use_kl_loss", False, ACTOR, ("kl_loss_coef", "kl_loss_type")),
    *(
        Idle(f"{ACTOR}.policy_loss.loss_mode", loss, node, _without(names, _READ_BY_LOSS.get(loss, ())))
        for loss in POLICY_LOSSES
        for node, names in ((ACTOR, _CLIPS), (f"{ACTOR}.policy_loss", OPTIONS_OF_LOSSES))
    ),
    *(
        Idle(
            "algorithm.adv_estimator",
            name,
            "algorithm",
            _without(_OPTIONS_OF_ESTIMATORS, _READ_BY_ESTIMATOR.get(name, ())),
        )
        for name in (*ADV_ESTIMATORS, None)
    ),
    *(
        Idle(f"{role}.loss_agg_mode", mode, role, ("loss_scale_factor",))
        for role in (ACTOR, "critic")
        for mode in LOSS_AGG_MODES
        if mode != BY_LENGTH
    ),
    Idle(f"{ACTOR}.optim.lr_scheduler_type", "constant", f"{ACTOR}.optim", _SCHEDULE),
    Idle("critic.optim.lr_scheduler_type", "constant", "critic.optim", _SCHEDULE),
    Idle("algorithm.use_kl_in_reward", False, "algorithm", ("kl_penalty",)),
    Idle("algorithm.use_kl_in_reward", False, "algorithm.kl_ctrl", ("type", "kl_coef", "horizon", "target_kl")),
    Idle("algorithm.filter_groups.enable", False, "algorithm.filter_groups", ("metric", "max_num_gen_batches")),
    Idle(f"{ROLLOUT}.n", 1, "algorithm.filter_groups", ("enable",)),
    Idle(f"{REWARD}.overlong_buffer.enable", False, f"{REWARD}.overlong_buffer", ("len", "penalty_factor", "log")),
    Idle("algorithm.rollout_is_threshold", None, "algorithm", _WEIGHTS),
    Idle("algorithm.use_pf_ppo", False, "algorithm.pf_ppo", ("reweight_method", "weight_pow")),
    Idle(f"{MODEL}.lora_rank", 0, MODEL, ("lora_alpha", "target_modules", "exclude_modules")),
    Idle("critic.model.lora_rank", 0, "critic.model", ("lora_alpha", "target_modules")),
    Idle(f"{ROLLOUT}.val_kwargs.do_sample", False, f"{ROLLOUT}.val_kwargs", ("temperature", "top_p", "top_k")),
    Idle(f"{ROLLOUT}.do_sample", False, ROLLOUT, ("top_p", "top_k")),
    Idle(f"{REWARD}.enable", False, REWARD, ("enable_resource_pool", *_PASSES, *_OF_GENERATIVE)),
    Idle("custom_reward_function.path", None, "custom_reward_function", ("reward_kwargs",)),
    Idle(f"{REWARD}.enable", False, f"{REWARD}.model", ("path", "trust_remote_code", "use_shm", "use_remove_padding")),
    Idle(f"{REWARD}.enable_resource_pool", False, REWARD, ("n_gpus_per_node", "nnodes")),
    Idle(f"{REWARD}.model.input_tokenizer", None, REWARD, ("max_length",)),
    Idle(f"{ROLLOUT}.mode", "sync", f"{ROLLOUT}.multi_turn", _TURNS),
    Idle(f"{ROLLOUT}.mode", "sync", f"{ROLLOUT}.agent", _LOOPS + _DEADLINES),
    Idle(f"{ROLLOUT}.mode", "sync", ROLLOUT, ("over_sample_rate",)),
    Idle(f"{ROLLOUT}.agent.on_failure", "fail", f"{ROLLOUT}.agent", ("num_retries",)),
    Idle(f"{ROLLOUT}.mode", "sync", f"{ROLLOUT}.agent.custom_async_server", ("path", "name")),
    Idle("actor_rollout_ref.hybrid_engine", True, ROLLOUT, ("nnodes", "n_gpus_per_node")),
    Idle(f"{ROLLOUT}.skip_rollout", False, ROLLOUT, ("skip_dump_dir",)),
    Idle(f"{ROLLOUT}.share_weights", True, ROLLOUT, ("update_weights_bucket_megabytes",)),
    Idle("async_training.mode", "sync", "async_training", _PACE),
    Idle("async_training.max_off_policy_threshold", None, "async_training", ("off_policy_strategy",)),
    Idle("async_training.mode", "one_step_off", "async_training", ("require_batches", "use_rollout_log_probs")),
    Idle("trainer.resume_mode", "auto", "trainer", ("resume_from_path",)),
    Idle("trainer.resume_mode", "disable", "trainer", ("resume_from_path",)),
    Idle(_ENGINE, "hf", ROLLOUT, ("gpu_memory_utilization", "free_cache_engine", "max_num_batched_tokens")),
    Idle(_ENGINE, "hf", ROLLOUT, ("enforce_eager", "cudagraph_capture_sizes", "layered_summon")),
    Idle(_ENGINE, "hf", ROLLOUT, ("tensor_model_parallel_size", "expert_parallel_size")),
    Idle(_ENGINE, "hf", ROLLOUT, ("enable_chunked_prefill", "enable_prefix_caching")),
    *(Idle(_ENGINE, name, ROLLOUT, (f"engine_kwargs.{other}",)) for name, other in _OTHER_ENGINES),
    Idle(_ENGINE, "sglang", ROLLOUT, ("layered_summon",)),
    Idle(_ENGINE, "hf", ROLLOUT, ("disable_log_stats", "skip_tokenizer_init")),
    *(Idle(f"{ROLLOUT}.mode", mode, "data", ("return_multi_modal_inputs",)) for mode in ("sync", "async")),
    # training reads them, see loaders.complete_data_node
    Idle(_DEVICE, "npu", ROLLOUT, ("layered_summon",)),
    Idle(_DEVICE, "cpu", ROLLOUT, ("cudagraph_capture_sizes", "layered_summon")),
    *(Idle(_DEVICE, "cpu", f"{role}.fsdp_config", _OFFLOADS) for role in (ACTOR, REF, "critic.model")),
    Idle(_DEVICE, "cpu", f"{REWARD}.model.fsdp_config", ("param_offload",)),
    Idle(_DEVICE, "cpu", MODEL, ("enable_activation_offload",)),
    Idle(_DEVICE, "cpu", "critic.model", ("enable_activation_offload",)),
    *(Idle(_DEVICE, "cpu", f"{role}.megatron", _MCORE_OFFLOADS) for role in (ACTOR, REF, "critic", REWARD)),
    *(
        Idle(f"{role}.megatron.use_dist_checkpointing", False, f"{role}.megatron", ("dist_checkpointing_path",))
        for role in (ACTOR, REF, "critic", REWARD)
    ),
]

IDLE_IN_A_WORKER = Idle(
    "actor_rollout_ref.hybrid_engine", True, f"{ROLLOUT}.server", ("max_start_wait_time", "heartbeat_timeout")
)
"""For an engine that runs in the process of the trainer's worker, as vLLM does."""

_OF_AN_ENABLED_REWARD_MODEL = (f"{REWARD}.enable_", f"{REWARD}.model.")


def idle_keys(run: RunConfig, tree: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield each key that ``tree`` changes from its default and that has no effect in this run."""
    switched = [Idle(entry.switch, False, entry.node, entry.names) for entry in UNSUPPORTED if entry.switch is not None]
    shared = run.actor_rollout_ref
    parts = (run.data, run.trainer, run.algorithm, shared.actor, shared.rollout, run.reward_model)
    own = [entry for part in parts for entry in part._idle]
    own += [] if shared.rollout.name == "sglang" else [IDLE_IN_A_WORKER]
    own += _padded_models(run)
    for switch, off, node, names, reason in IDLE + own + switched:
        if select(tree, switch) != off or (node.startswith("critic") and run.critic is None):
            continue
        # Other keys may also make the rollout serve, whatever the mode.
        if switch == f"{ROLLOUT}.mode" and shared.rollout.serves != (off == "async"):
            continue
        if not run.reward_model.enable and any(key.startswith(_OF_AN_ENABLED_REWARD_MODEL) for key in (switch, node)):
            continue
        for key, value, _ in _changed(run, tree, node, names):
            yield Violation(key, value, reason or f"{switch}={as_yaml(off)}", Kind.IDLE, (switch,))


_UNCHANGED = {"model_config": {}, "moe_config": {"freeze_moe_router": False}}
"""Entries of the shipped files that the dataclasses do not have."""


def keys_of_absent_roles(run: RunConfig, tree: Mapping[str, Json], use_reference: bool) -> Iterator[Violation]:
    """Yield the entries in free nodes of roles that this run lacks: nothing reads them."""
    absent = {
        "critic": "no critic is trained" if run.critic is None else "",
        REF: "" if use_reference else "there is no reference policy",
        REWARD: "" if run.reward_model.enable else f"{REWARD}.enable=false",
    }
    read = [f"{REWARD}.{name}" for name in WITHOUT_MODEL]
    unread = {role: reason for role, reason in absent.items() if reason}
    yield from (each for each in free_entries(run, tree, unread) if not is_under(each.key, read))


def free_entries(run: RunConfig, tree: Mapping[str, Json], roles: Mapping[str, str]) -> Iterator[Violation]:
    """Yield the entries in free nodes of ``roles`` that are not defaults; ``roles`` has a reason for each role."""
    if run.critic is None:
        run = replace(run, critic=NodeReader().node({}, "critic", critic_class(mapping_at(tree, "critic"))))
    policy = f"{ACTOR}.megatron"
    for node in free_nodes(tree):
        reason = next((roles[role] for role in roles if is_under(node, [role])), None)
        entries = select(tree, node)
        # The actor's node, from which reference and reward model take their defaults.
        followed = select(tree, f"{policy}.{node.rpartition('.')[2]}")
        if reason is None or not isinstance(entries, Mapping) or entries == followed:
            continue
        default = default_of(run, node)
        defaults = default if isinstance(default, Mapping) else {}
        for name, value in entries.items():
            if name != "_target_" and value not in (defaults.get(name, ABSENT), _UNCHANGED.get(name, ABSENT)):
                yield Violation(f"{node}.{name}", value, reason, Kind.IDLE)


def _padded_models(run: RunConfig) -> Iterator[Idle]:
    """Yield keys that padded rows do not read."""
    models = [(MODEL, run.actor_rollout_ref.actor.strategy), (f"{REWARD}.model", run.reward_model.strategy)]
    models += [] if run.critic is None else [("critic.model", run.critic.strategy)]
    for node, strategy in models:
        if not packs_rows(strategy, use_remove_padding=False):
            yield Idle(f"{node}.use_remove_padding", False, node, ("use_prefix_sharing",))


def _changed(
    run: RunConfig, tree: Mapping[str, Json], node: str, names: tuple[str, ...]
) -> Iterator[tuple[str, Json, Json]]:
    """Yield key, value and default of each name below a node whose value in ``tree`` is not the default."""
    for name in names:
        key = f"{node}.{name}"
        value = select(tree, key, ABSENT)
        default = select(tree, FOLLOWS[key]) if key in FOLLOWS else default_of(run, key)
        if isinstance(default, tuple):  # YAML has lists only
            default = list(default)
        if value is not ABSENT and default is not ABSENT and value != default:
            yield key, value, default


# ---- keys that are not supported, and accepted for commands of the established verl interface


class Unsupported(NamedTuple):
    """Keys below ``node`` that must keep their default or, with ``values``, must not have one of these values.

    With a ``switch`` they may change while it is false: nothing reads them then.
    """

    node: str
    names: tuple[str, ...]
    text: str
    values: tuple[Json, ...] = ()
    switch: str | None = None


_NO_HTTP = "is not supported: requests are calls of a server's actor, and rollout.agent.turn_timeout_s is their limit"
_ONE_MODE = "is not supported: actor_rollout_ref.hybrid_engine=false starts servers on separate devices"
_TRAINS = "is not supported for a role that trains"

UNSUPPORTED = [
    Unsupported(ROLLOUT, ("sglang_engine_mode",), _ONE_MODE),
    Unsupported(f"{ROLLOUT}.server", ("timeout", "max_attempts", "retry_delay", "max_connections"), _NO_HTTP),
    Unsupported(
        ROLLOUT,
        ("data_parallel_size",),
        "is not supported with hybrid_engine=true: each group of tensor_model_parallel_size workers is such a replica, "
        "with its share of the batch. To share experts over more workers, write a larger tensor_model_parallel_size "
        "and the same expert_parallel_size. Here",
        switch="actor_rollout_ref.hybrid_engine",
    ),
    Unsupported("actor_rollout_ref.actor", ("fsdp_config.forward_only", "megatron.forward_only"), _TRAINS),
    Unsupported("critic", ("model.fsdp_config.forward_only", "megatron.forward_only"), _TRAINS),
    Unsupported(
        "critic.model.fsdp_config",
        ("entropy_from_logits_with_chunking",),
        "is not supported: a critic computes no entropy",
    ),
    Unsupported(
        "algorithm.filter_groups",
        ("enable",),
        "is not supported here: dynamic sampling is done by python -m recipe.dapo.main_dapo",
    ),
    Unsupported(
        "data",
        ("tokenizer",),
        "is only supported with data.custom_cls: name the tokenizer in actor_rollout_ref.model.tokenizer_path",
    ),
    Unsupported("data", ("return_raw_input_ids",), "is only supported with data.custom_cls"),
]

_READ_BY_CUSTOM_DATASETS = ("data.tokenizer", "data.return_raw_input_ids")


def unsupported_rules(
    run: RunConfig, tree: Mapping[str, Json], recipe_nodes: Collection[str] = ()
) -> Iterator[Violation]:
    """Yield every key that asks for something not supported; nodes that the recipe reads are left to it."""
    custom = _READ_BY_CUSTOM_DATASETS if run.data.custom_cls.path else ()
    for entry in UNSUPPORTED:
        if entry.switch is not None and not select(tree, entry.switch):
            continue
        for key, value, default in _changed(run, tree, entry.node, entry.names):
            if is_under(key, recipe_nodes) or key in custom:
                continue
            if not entry.values:
                instead = "leave it out" if isinstance(default, Mapping) else f"write {as_yaml(default)}"
                yield Violation.unsupported(key, value, f"{entry.text}: {instead}")
            elif value in entry.values:
                yield Violation.unsupported(key, value, entry.text)
