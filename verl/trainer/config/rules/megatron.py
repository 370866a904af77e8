"""Roles on Megatron-Core: check layouts against workers, model and each other, and reject options that cannot run."""

import ast
import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl.base_config import Violation, as_yaml
from verl.models.mcore_limits import LIMITS, Limit, causal_name, default_implementation, model_limits
from verl.models.transformers.prefix_sharing import mcore_sharing_problems, sharing_problems
from verl.trainer.config.keys import select
from verl.trainer.config.rules.reward import reward_world_size
from verl.trainer.config.run_config import RunConfig
from verl.utils import envs
from verl.utils.json_types import Json, mapping_at
from verl.utils.megatron.ranks import expert_layout_problem
from verl.workers.config import BaseModelConfig, HFModelConfig, McoreEngineConfig
from verl.workers.config.actor_critic import ActorConfig, CriticConfig, McoreActorConfig, McoreCriticConfig
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig, RefConfig
from verl.workers.config.model import ConfigFields, path_problems, read_config_json
from verl.workers.config.overrides import ROPE_KEYS, overridden
from verl.workers.config.reward_model import RewardModelConfig, RewardModelModelConfig

logger = logging.getLogger(__name__)

Tree = Mapping[str, Json]

ARCHITECTURES = tuple(sorted(LIMITS))

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
EP = "expert_model_parallel_size"
SHARED = (TP, PP, "context_parallel_size", EP, f"virtual_{PP}", "expert_tensor_parallel_size")
"""Keys of a ``megatron`` node that roles of one process have in common."""

_FUSIONS = ("apply_rope_fusion", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion")
_KERNELS = ("moe_grouped_gemm", "moe_enable_deepep", "tp_comm_overlap", "enable_cuda_graph", "use_kitchen")
_LOW_PRECISION = ("fp8", "fp4", "symmetric_ar_type", "batch_invariant_mode")
_OFFLOADS = ("cpu_offloading", "fine_grained_activation_offloading")
CUDA_ONLY = _FUSIONS + _KERNELS + _LOW_PRECISION + _OFFLOADS
"""Fields of TransformerConfig whose code runs on CUDA only."""

CUDA_OPTIMIZERS = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")
"""Fields of OptimizerConfig whose code runs on CUDA only."""

ASCEND = "is not supported with trainer.device=npu: Megatron-Core runs on CUDA and CPU. Write "

_OF_THE_WHOLE = ("architectures", "auto_map", "model_type", "vision_config")
"""Fields of ``config.json`` that belong to a vision-language model, and not to its language model."""

ACTOR_MODEL = "actor_rollout_ref.model"
"""The key of the model of actor and reference."""


class EngineRole(NamedTuple):
    """A role with a training engine; ``shares`` says whether it lives in the actor's processes."""

    key: str
    node: ActorConfig | RefConfig | CriticConfig | RewardModelConfig
    model_key: str
    model: HFModelConfig | BaseModelConfig | RewardModelModelConfig
    world: int
    shares: bool = True

    @property
    def is_megatron(self) -> bool:
        """Whether the role runs on Megatron-Core."""
        return self.node.strategy == "megatron"

    @property
    def engine_key(self) -> str:
        """The key of the role's layout."""
        return f"{self.key}.megatron"


def _roles(run: RunConfig, use_reference: bool) -> list[EngineRole]:
    """Return the roles with a training engine, the actor first."""
    shared = run.actor_rollout_ref
    reward = run.reward_model
    world = run.trainer.world_size
    roles = [EngineRole("actor_rollout_ref.actor", shared.actor, ACTOR_MODEL, shared.model, world)]
    if use_reference and not shared.model.lora_rank:
        roles.append(EngineRole("actor_rollout_ref.ref", shared.ref, ACTOR_MODEL, shared.model, world))
    if run.critic is not None:
        roles.append(EngineRole("critic", run.critic, "critic.model", run.critic.model, world))
    if reward.enable and not reward.is_generative:
        size = reward_world_size(run)
        shares = not reward.enable_resource_pool
        roles.append(EngineRole("reward_model", reward, "reward_model.model", reward.model, size, shares))
    return roles


def megatron_engines(run: RunConfig) -> list[McoreEngineConfig]:
    """Return the layouts of the roles that run on Megatron-Core."""
    engines = [role.node.engine for role in _roles(run, run.needs_reference) if role.is_megatron]
    return [engine for engine in engines if isinstance(engine, McoreEngineConfig)]


def tell_slow_layers(device: str, engines: Iterable[McoreEngineConfig]) -> None:
    """Tell that Megatron-Core computes without Transformer Engine, unless the configuration chooses its layers."""
    is_open = any("transformer_impl" not in engine.override_transformer_config for engine in engines)
    if is_open and device == "cuda" and default_implementation(device) == "local":
        logger.warning(
            "Transformer Engine is not installed: Megatron-Core runs verl's layers in plain torch, which are slower. "
            "Install it (docs/install.md), or choose them: override_transformer_config.transformer_impl=local"
        )


def megatron_rules(run: RunConfig, use_reference: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield faults of roles on Megatron-Core; rules that need a broken key are skipped."""
    if any(key.startswith(("trainer.n", "reward_model.n")) for key in broken):
        return
    roles = _roles(run, use_reference)
    yield from _strategy_rules(roles)
    for role in roles:
        if not role.is_megatron:
            continue
        if run.trainer.device == "npu":
            expected = f"{ASCEND}--config-name=ppo_trainer, which uses FSDP"
            yield Violation.unsupported(f"{role.key}.strategy", "megatron", expected)
            continue
        engine = role.node.engine
        if not isinstance(engine, McoreEngineConfig):
            yield Violation(f"{role.key}.strategy", "megatron", "needs --config-name=ppo_megatron_trainer")
        elif not any(key.startswith(role.engine_key) for key in broken):
            yield from _option_rules(run, role, engine)
            yield from _world_rules(role, engine, run.trainer.device == "cpu")
            yield from _model_rules(run.actor_rollout_ref, role, engine, run.trainer.device)
            actor = roles[0].node.engine
            if role.shares and isinstance(actor, McoreEngineConfig):
                yield from _shared_rules(role, engine, actor)


def _strategy_rules(roles: list[EngineRole]) -> Iterator[Violation]:
    """Yield roles on Megatron-Core that share processes with others on FSDP."""
    actor = roles[0]
    for role in roles[1:]:
        if role.shares and role.is_megatron != actor.is_megatron:
            expected = (
                f"shares its workers with the actor, whose strategy is {actor.node.strategy}: choose both by "
                "--config-name, ppo_trainer or ppo_megatron_trainer"
            )
            yield Violation(f"{role.key}.strategy", role.node.strategy, expected)


def mcore_sharing_rules(
    key: str, fields: Mapping[str, Json], engine: McoreEngineConfig, device: str, trains: bool = True
) -> Iterator[Violation]:
    """Yield the reasons why a model or layout on Megatron-Core does not support shared prefixes.

    Args: ``key`` is the node of the model, ``fields`` its config.json with overrides.
    """
    kind = engine.override_transformer_config.get("transformer_impl") or default_implementation(device)
    problems = [*sharing_problems(fields, trains)]
    layout = (engine.context_parallel_size, engine.use_mbridge, kind)
    problems += mcore_sharing_problems(fields, *layout, engine.override_transformer_config, trains)
    yield from (Violation(f"{key}.use_prefix_sharing", True, problem) for problem in problems)


def _option_rules(run: RunConfig, role: EngineRole, engine: McoreEngineConfig) -> Iterator[Violation]:
    """Yield options of model and engine that do not exist on Megatron-Core, or not on these devices."""
    for name, wanted in (("lora_rank", 0), ("use_liger", False), ("enable_activation_offload", False)):
        value = select(role.model, name, wanted)
        if value != wanted:
            expected = f"is not supported with strategy=megatron: write {as_yaml(wanted)}"
            yield Violation.unsupported(f"{role.model_key}.{name}", value, expected)
    if select(role.model, "use_prefix_sharing", False) and not list(path_problems(role.model.path)):
        fields = overridden(read_config_json(role.model.path), mapping_at(role.model, "override_config"))
        trains = not isinstance(role.node, RefConfig | RewardModelConfig)
        yield from mcore_sharing_rules(role.model_key, fields, engine, run.trainer.device, trains)
    folder = engine.dist_checkpointing_path if engine.use_dist_checkpointing else None
    if folder is not None and "://" not in folder and not os.path.isdir(os.path.expanduser(folder)):
        expected = "no such folder: write one that scripts/converter_hf_to_mcore.py made, or a checkpoint"
        yield Violation(f"{role.engine_key}.dist_checkpointing_path", folder, expected)
    yield from override_rules(engine, role.engine_key, role.model_key)
    of_optimizer: Tree = {}
    if isinstance(role.node, McoreActorConfig | McoreCriticConfig):
        of_optimizer = role.node.optim.override_optimizer_config
    yield from optimizer_rules(of_optimizer, f"{role.key}.optim")
    of_model = engine.override_transformer_config
    key = f"{role.engine_key}.override_transformer_config"
    fused = f"{ACTOR_MODEL}.use_fused_kernels"
    is_fused = role.model_key == ACTOR_MODEL and run.actor_rollout_ref.model.use_fused_kernels
    if of_model.get("defer_embedding_wgrad_compute") and is_fused:
        expected = f"needs logits: leave it out, or write {fused}=false"
        yield Violation(f"{key}.defer_embedding_wgrad_compute", True, expected)
    on_cpu = run.trainer.device == "cpu"
    dispatcher = of_model.get("moe_token_dispatcher_type", "alltoall")
    dispatchers = ("alltoall",) if on_cpu else ("alltoall", "flex")
    if dispatcher not in dispatchers:
        expected = f"must be {' or '.join(dispatchers)}, because micro-batch lengths vary"
        yield Violation(f"{key}.moe_token_dispatcher_type", dispatcher, expected)
    if not on_cpu:
        return
    if of_model.get("deallocate_pipeline_outputs"):
        expected = "must be false with trainer.device=cpu: gloo still reads the buffer"
        yield Violation(f"{key}.deallocate_pipeline_outputs", True, expected)
    if of_model.get("transformer_impl") == "transformer_engine":
        expected = "needs CUDA: write local with trainer.device=cpu"
        yield Violation(f"{key}.transformer_impl", "transformer_engine", expected)
    at_optimizer = f"{role.key}.optim.override_optimizer_config"
    for node, overrides, names in ((key, of_model, CUDA_ONLY), (at_optimizer, of_optimizer, CUDA_OPTIMIZERS)):
        for name in names:
            if overrides.get(name):
                expected = "needs CUDA: leave it out with trainer.device=cpu"
                yield Violation(f"{node}.{name}", overrides[name], expected)


def _world_rules(role: EngineRole, engine: McoreEngineConfig, on_cpu: bool) -> Iterator[Violation]:
    """Yield sizes that do not divide the workers."""
    tp = engine.tensor_model_parallel_size
    pp = engine.pipeline_model_parallel_size
    cp = engine.context_parallel_size
    if role.world % (tp * pp * cp):
        expected = f"x pipeline_model_parallel_size={pp} x context_parallel_size={cp} must divide the {role.world}"
        yield Violation(f"{role.engine_key}.{TP}", tp, f"{expected} workers (n_gpus_per_node x nnodes)")
    elif (found := expert_layout_problem(role.world, engine, on_cpu)) is not None:
        key, value, expected = found
        yield Violation(f"{role.engine_key}.{key}", value, expected)


def bridged_architecture(node: Tree, fields: ConfigFields | None, engine: McoreEngineConfig) -> str:
    """Return the architecture of a model that mbridge must build; empty if verl's tables have it, or might have it."""
    named = getattr(fields, "architectures", None) or []
    if not engine.use_mbridge or envs.read("VERL_USE_EXTERNAL_MODULES") or node.get("external_lib"):
        return ""
    return "" if not named or [causal_name(name) in ARCHITECTURES for name in named] == [True] else ", ".join(named)


def bridge_rules(architecture: str, engine_key: str, device: str, on_fsdp: str) -> Iterator[Violation]:
    """Yield each obstacle to building a model with mbridge; ``on_fsdp`` is the advice for a run on FSDP."""
    missing = [name for name in ("mbridge", "transformer_engine") if importlib.util.find_spec(name) is None]
    if device != "cuda":
        missing.insert(0, "CUDA devices")
    if missing:
        expected = (
            f"architecture {architecture} is built by mbridge, and this run lacks {', '.join(missing)}: install what "
            f"is missing, or write {on_fsdp}, which uses FSDP"
        )
        yield Violation.unsupported(f"{engine_key}.use_mbridge", True, expected)


def _model_rules(
    shared: ActorRolloutRefConfig, role: EngineRole, engine: McoreEngineConfig, device: str
) -> Iterator[Violation]:
    """Yield an unsupported model, and sizes that do not divide its heads, experts or layers; a hub id is not read."""
    key = role.model_key
    node: Tree = role.model
    if isinstance(role.node, RefConfig):
        key, node = reference_node(shared)
    if (fields := config_fields(node)) is None:
        return
    if bridged := bridged_architecture(node, fields, engine):
        yield from bridge_rules(bridged, role.engine_key, device, "--config-name=ppo_trainer")
        if role.key not in ("actor_rollout_ref.actor", "actor_rollout_ref.ref"):
            expected = f"mbridge builds no value head for architecture {bridged}: use another model, or FSDP"
            yield Violation.unsupported(f"{role.engine_key}.use_mbridge", True, expected)
        return
    yield from family_rules(node, fields, key, "--config-name=ppo_trainer")
    config = vars(fields)
    tp = engine.tensor_model_parallel_size
    pp = engine.pipeline_model_parallel_size
    ep = engine.expert_model_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.get(name)
        if isinstance(count, int) and count % tp:
            yield Violation(f"{role.engine_key}.{TP}", tp, f"must divide {name}={count} of the model")
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    if ep > 1 and "model_type" in config and (not experts or experts % ep):
        yield Violation(f"{role.engine_key}.{EP}", ep, f"must divide the {experts} experts of the model")
    if experts and tp > 1 and not engine.sequence_parallel:
        expected = f"must be true with {TP}={tp}: the model has experts, which need it on Megatron-Core"
        yield Violation(f"{role.engine_key}.sequence_parallel", False, expected)
    elif "vision_config" in config and tp > 1 and not engine.sequence_parallel:
        expected = f"must be true with {TP}={tp}: it is what sums the gradient of the vision tower over the ranks"
        yield Violation(f"{role.engine_key}.sequence_parallel", False, expected)
    layers = config.get("num_hidden_layers")
    overrides = engine.override_transformer_config
    stages = engine.virtual_pipeline_model_parallel_size or 1
    if isinstance(layers, int) and (found := stage_problem(layers, pp, stages, overrides)) is not None:
        override, expected = found
        if override is None:
            yield Violation(f"{role.engine_key}.{PP}", pp, expected)
        else:
            yield Violation(f"{role.engine_key}.override_transformer_config.{override}", overrides[override], expected)
    elif isinstance(layers, int):
        deep = len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
        first = first_stage_layers(layers, pp, stages, overrides)
        if first is not None and first < deep:
            expected = (
                f"with {stages} virtual stages gives the first stage {first} layers, and the vision tower adds "
                f"features after the first {deep}: use fewer stages, or set override_transformer_config."
                f"num_layers_in_first_pipeline_stage to {deep * stages} or more"
            )
            yield Violation(f"{role.engine_key}.{PP}", pp, expected)


def _shared_rules(role: EngineRole, engine: McoreEngineConfig, actor: McoreEngineConfig) -> Iterator[Violation]:
    """Yield differences from the actor's parallel layout in roles that share its processes and process groups."""
    for name in SHARED:
        if engine[name] != actor[name]:
            expected = (
                f"must be {as_yaml(actor[name])}, as in actor_rollout_ref.actor.megatron: roles that share their "
                "workers have one layout"
            )
            yield Violation(f"{role.engine_key}.{name}", engine[name], expected)


# ---- models that Megatron-Core cannot hold, by their config.json


def config_fields(node: Tree) -> ConfigFields | None:
    """Return the fields of ``config.json`` and ``override_config`` of a model node; None if the path is wrong.

    For a hub id, whose files are not on this machine, only ``override_config`` is known. For a vision-language model
    the fields are those of its language model.
    """
    path = node.get("hf_config_path") or node.get("path")
    if not isinstance(path, str) or list(path_problems(path)):
        return None
    content = overridden(read_config_json(path), mapping_at(node, "override_config"))
    return ConfigFields(_language_fields(content) if "vision_config" in content else content)


def _language_fields(content: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields of the language model; older files hold them at the top level."""
    text = content.get("text_config")
    whole = {name: content[name] for name in _OF_THE_WHOLE if name in content}
    return {**(text if isinstance(text, Mapping) else content), **whole}


def reference_node(shared: ActorRolloutRefConfig) -> tuple[str, Tree]:
    """Return the key of the reference's model node, and the node."""
    if not shared.ref.model_path:
        return ACTOR_MODEL, shared.model
    names = ("path", "override_config", "external_lib", "trust_remote_code")
    written = {name: shared.model[name] for name in names}
    if shared.model.hf_config_path != shared.model.path:
        written["hf_config_path"] = shared.model.hf_config_path
    merged: Any = OmegaConf.to_container(OmegaConf.merge(written, shared.ref.model or {}))
    return "actor_rollout_ref.ref.model", merged


def family_rules(
    node: Tree, fields: ConfigFields | None, key: str, on_fsdp: str, path_key: str | None = None
) -> Iterator[Violation]:
    """Yield an architecture that no family has, and fields that its family would compute differently.

    Modules of the user may add families, and remote code may read ``config.json`` in another way: the workers judge
    these.

    Args: ``key`` is the key of ``node``, ``path_key`` the key of its path if that is not below it, ``on_fsdp`` what
        to write for a run on FSDP.
    """
    if fields is None or envs.read("VERL_USE_EXTERNAL_MODULES") or node.get("external_lib"):
        return
    at = (path_key or f"{key}.path", node.get("path"))
    if node.get("hf_config_path") not in (None, node.get("path")):
        at = (f"{key}.hf_config_path", node["hf_config_path"])
    named = getattr(fields, "architectures", None) or []
    if named and [causal_name(name) in ARCHITECTURES for name in named] != [True]:
        expected = f"architecture {', '.join(named)} is not supported with strategy=megatron: it knows "
        yield Violation.unsupported(*at, f"{expected}{', '.join(ARCHITECTURES)}; write {on_fsdp}")
    elif named and not (node.get("trust_remote_code") and getattr(fields, "auto_map", None)):
        yield from _limit_rules(node, named[0], fields, key, at, on_fsdp)


def _limit_rules(
    node: Tree, architecture: str, fields: ConfigFields, key: str, at: tuple[str, Json], on_fsdp: str
) -> Iterator[Violation]:
    """Yield each limit that comes from an override under its key, and the others together under the model's path."""
    overrides = mapping_at(node, "override_config")
    of_file = []
    with suppress(TypeError):  # a field is not a number: transformers says which
        for limit in model_limits(architecture, fields):
            name = _override_of(limit, overrides)
            if name is None:
                of_file.append(str(limit))
            else:
                expected = f"{limit.fault}; leave it out, or write {on_fsdp}"
                yield Violation(f"{key}.override_config.{name}", select(overrides, name), expected)
    if of_file:
        yield Violation(*at, f"{'; '.join(of_file)}; name another model, or write {on_fsdp}")


def _override_of(limit: Limit, overrides: Tree) -> str | None:
    """Return the key among ``overrides`` that a limit comes from; None if it comes from the file."""
    for name in ROPE_KEYS if limit.field == "rope_scaling" else (limit.field,):
        for key, place in ((f"model_config.{name}", mapping_at(overrides, "model_config")), (name, overrides)):
            if name in place:
                return key
    return None


# ---- the ``override_*_config`` keys


TRANSFORMER = ("transformer/transformer_config.py", "model_parallel_config.py")
DDP = ("distributed/distributed_data_parallel_config.py",)
OPTIMIZER = ("optimizer/optimizer_config.py",)

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
_LAYERS = ("activation_func", "activation_func_clamp_value", "gated_linear_unit", "glu_linear_offset")
_NORMS = ("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "qk_l2_norm")
_RESIDUALS = ("apply_residual_connection_post_layernorm", "add_bias_linear", "add_qkv_bias")
_ATTENTION = ("softmax_scale", "softmax_type", "window_size", "window_attn_skip_freq", "attention_output_gate")
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_KINDS = ("multi_latent_attention", "experimental_attention_variant", "heterogeneous_block_specs", "is_hybrid_model")
_ROPE = ("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "rotary_interleaved")
_POSITIONS = ("original_max_position_embeddings", "no_rope_freq", "mrope_section")
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_EXPERTS = ("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_latent_size", "moe_apply_probs_on_input")
_SHARED_EXPERTS = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
_ROUTER = ("moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_topk_limited_devices")
_ROUTER_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")
_ROUTER_SCORES = ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias")
_RANDOM_WEIGHTS = ("init_method_std", "embedding_init_method_std")
_BLOCKS = _SIZES + _LAYERS + _NORMS + _RESIDUALS + _ATTENTION + _LATENT_SIZES + _KINDS + _RANDOM_WEIGHTS
_MIXTURES = _EXPERTS + _SHARED_EXPERTS + _ROUTER + _ROUTER_GROUPS + _ROUTER_SCORES
OF_MODEL = frozenset(_BLOCKS + _ROPE + _POSITIONS + _YARN + _MIXTURES)
"""Fields that a family takes from ``config.json``, or leaves alone as the model has nothing of the kind."""
OF_OTHER_MODELS = ("dsa_", "linear_", "mamba_")
"""Prefixes of fields of model families that are not supported."""

_DTYPES = ("params_dtype", "pipeline_dtype", "bf16", "fp16", "enable_autocast", "autocast_dtype")
_GRADIENTS = ("calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func", "no_sync_func")
_COMMUNICATION = ("grad_sync_func", "param_sync_func", "variable_seq_lengths", "use_ring_exchange_p2p", "timers")
_FIRST_WEIGHTS = ("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device")
_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
OF_ENGINE = frozenset(_DTYPES + _GRADIENTS + _COMMUNICATION + _FIRST_WEIGHTS + _INIT_METHODS)
"""Fields that the engine sets."""

OF_PRETRAINING: dict[str, Json] = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_force_load_balancing": False,
    "mtp_num_layers": 0,
    "qk_clip": False,
}
"""Fields that add something to a step of pretraining, and the value that adds nothing.

Its losses are multiplied by the tokens of a micro-batch, and it would divide the gradient by all tokens. Here the loss
is divided before.
"""

_LOSSES = ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "mtp_loss_scaling_factor", "mtp_standalone")
_LOGS = ("moe_per_layer_logging", "log_max_attention_logit", "config_logger_dir", "test_mode")
_INFERENCE = ("flash_decode", "inference_rng_tracker", "inference_sampling_seed")
_FAST_INFERENCE = ("mlp_chunks_for_prefill", "use_inference_optimized_layers", "inference_fuse_tp_communication")
_OTHER_EXPERTS = ("moe_extended_tp", "moe_token_dropping")
_OTHER_CONTEXT = ("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank")
_QK_CLIP = ("qk_clip_alpha", "qk_clip_threshold")
UNREAD = frozenset(_LOSSES + _LOGS + _INFERENCE + _FAST_INFERENCE + _OTHER_EXPERTS + _OTHER_CONTEXT + _QK_CLIP)
"""Fields of TransformerConfig that nothing reads here."""

OF_OPTIM = {
    **{name: name for name in ("lr", "min_lr", "weight_decay", "clip_grad", "optimizer")},
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "betas"),
}
"""Fields of OptimizerConfig that are keys of ``optim``."""
_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
OPTIMIZER_OF_ENGINE = frozenset(_LOSS_SCALE + ("bf16", "fp16", "params_dtype", "timers"))
_OPTIMIZER_LOGS = ("log_num_zeros_in_grad", "barrier_with_L1_time", "config_logger_dir")
UNREAD_BY_ADAM = frozenset(_OPTIMIZER_LOGS + ("sgd_momentum", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"))

_SWITCHES = ("use_megatron_fsdp", "use_custom_fsdp", "fsdp_double_buffer", "fsdp_manual_registration")
_SHARDING = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "suggested_communication_unit_size")
_BUFFERS = ("preserve_fp32_weights", "keep_fp8_transpose_cache", "disable_symmetric_registration")
OF_MEGATRON_FSDP = frozenset(_SWITCHES + _SHARDING + _BUFFERS + ("gradient_reduce_div_fusion",))
"""Fields of DistributedDataParallelConfig that another wrapper reads."""


@cache
def mcore_fields(files: tuple[str, ...]) -> frozenset[str]:
    """Return the fields of the classes in files of the installed Megatron-Core; empty if it is not installed.

    They are read from its source, because importing it takes seconds.
    """
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        return frozenset()
    names: set[str] = set()
    for file in files:
        path = Path(found.submodule_search_locations[0], file)
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    names.add(field.target.id)
    return frozenset(names)


def override_rules(node: Mapping[str, Json], key: str, model: str) -> Iterator[Violation]:
    """Yield overrides of a ``megatron`` node that Megatron-Core does not have or does not read.

    ``key`` is that of the node and ``model`` the one of the role's model.
    """
    overrides = mapping_at(node, "override_transformer_config")
    at = f"{key}.override_transformer_config"
    yield from _unknown(overrides, at, TRANSFORMER, "TransformerConfig")
    for name, value in overrides.items():
        if name in node:
            yield Violation(f"{at}.{name}", value, f"belongs one level up: write {key}.{name}")
        elif name in OF_MODEL or name.startswith(OF_OTHER_MODELS):
            expected = f"belongs to the model: set the key of config.json in {model}.override_config"
            yield Violation(f"{at}.{name}", value, expected)
        elif name in OF_ENGINE and value is not None:
            yield Violation(f"{at}.{name}", value, "is set by the engine: leave it out")
        elif name in OF_PRETRAINING and value not in (None, OF_PRETRAINING[name]):
            yield Violation.unsupported(f"{at}.{name}", value, "is for pretraining, and not supported: leave it out")
        elif name in UNREAD:
            yield Violation(f"{at}.{name}", value, "has no effect: leave it out")
    yield from _ddp_rules(mapping_at(node, "override_ddp_config"), f"{key}.override_ddp_config")


def _ddp_rules(overrides: Mapping[str, Json], at: str) -> Iterator[Violation]:
    """Yield options that the module wrapper does not read, or that conflict with a normalised loss."""
    yield from _unknown(overrides, at, DDP, "DistributedDataParallelConfig")
    for name, value in overrides.items():
        if name in OF_MEGATRON_FSDP:
            yield Violation(f"{at}.{name}", value, "is read by Megatron-FSDP, which is not used: leave it out")
        elif name == "average_in_collective" and value:
            yield Violation(
                f"{at}.{name}", value, "must be false: the loss is already normalised, so gradients must be summed"
            )
        elif name == "num_distributed_optimizer_instances" and value != 1:
            yield Violation(f"{at}.{name}", value, "must be 1: the optimizer is sharded over all data-parallel workers")
        elif name == "align_param_gather":
            expected = "is not supported, stages gather separately: leave it out"
            yield Violation.unsupported(f"{at}.{name}", value, expected)


def optimizer_rules(overrides: Mapping[str, Json], key: str) -> Iterator[Violation]:
    """Yield ``override_optimizer_config`` of the ``optim`` node ``key`` that Megatron-Core does not have or read."""
    at = f"{key}.override_optimizer_config"
    yield from _unknown(overrides, at, OPTIMIZER, "OptimizerConfig")
    for name, value in overrides.items():
        if name in OF_OPTIM:
            yield Violation(f"{at}.{name}", value, f"belongs one level up: write {key}.{OF_OPTIM[name]}")
        elif name == "use_distributed_optimizer":
            yield Violation(f"{at}.{name}", value, "belongs to the layout: write megatron.use_distributed_optimizer")
        elif name in OPTIMIZER_OF_ENGINE:
            yield Violation(f"{at}.{name}", value, "is set by the engine: leave it out")
        elif name in UNREAD_BY_ADAM or name.startswith("muon_"):
            yield Violation(f"{at}.{name}", value, "has no effect: leave it out")
        elif name.startswith("decoupled_") and name.endswith("lr") and value is not None:
            yield Violation.unsupported(
                f"{at}.{name}", value, "is not supported, all parameters have one learning rate: leave it out"
            )
        elif name.startswith("overlap_param_gather") and value:
            yield Violation(f"{at}.{name}", value, "must be false: write it in megatron.override_ddp_config")


def _unknown(overrides: Mapping[str, Json], key: str, files: tuple[str, ...], kind: str) -> Iterator[Violation]:
    known = mcore_fields(files)
    for name in (each for each in overrides if known and each not in known):
        near = get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        yield Violation(f"{key}.{name}", overrides[name], f"is no field of megatron-core's {kind}{hint}")


_END_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def first_stage_layers(layers: int, pp: int, stages: int, overrides: Mapping[str, Json]) -> int | None:
    """Return how many layers the first virtual stage holds; None if Megatron-Core reads that from a layout."""
    if overrides.get("pipeline_model_parallel_layout") is not None:
        return None
    first, last = (count if isinstance(count := overrides.get(name), int) else 0 for name in _END_STAGES)
    if first:
        return first // stages
    counted = [name for name in _COUNTED_AS_LAYERS if overrides.get(name)]
    share = (layers - last + len(counted)) // ((pp - bool(last)) * stages)
    return share - (_COUNTED_AS_LAYERS[0] in counted)


def stage_problem(layers: int, pp: int, stages: int, overrides: Mapping[str, Json]) -> tuple[str | None, str] | None:
    """Return why ``layers`` cannot be cut into ``pp`` stages of ``stages`` virtual ones each: the key among
    ``overrides``, or None for the sizes, and what is wrong; None where they can.
    """
    ends = {name: overrides[name] for name in _END_STAGES if overrides.get(name) is not None}
    counted = [name for name in _COUNTED_AS_LAYERS if overrides.get(name)]
    if overrides.get("pipeline_model_parallel_layout") is not None:  # Megatron-Core reads it whole
        return None
    for name in (*ends, *counted):
        if pp < 2:
            return name, "needs pipeline_model_parallel_size of 2 or more"
        if ends and counted:
            return counted[0], f"excludes {next(iter(ends))}: leave one of them out"
    at_ends = 0
    for name, count in ends.items():
        if not isinstance(count, int) or count < 1 or count % stages:
            return name, f"must be 1 or more, and a multiple of the {stages} virtual stages"
        at_ends += count
    rest = layers - at_ends + len(counted)
    middle = pp - len(ends)
    if ends and (rest < middle or (rest % (middle * stages) if middle else rest)):
        return next(iter(ends)), f"must leave layers that the other {middle} stages share evenly, {rest} are left"
    if not ends and rest % (pp * stages):
        means = f" ({rest} with embedding and loss counted)" if counted else ""
        return None, f"with {stages} virtual stages must divide the {layers} layers of the model{means}"
    return None
