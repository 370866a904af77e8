"""The ``override_*_config`` keys of roles on Megatron-Core, checked against its fields.

The fields are read from the source of Megatron-Core, because importing it takes seconds.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from verl.base_config import Violation

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

OF_PRETRAINING: dict[str, Any] = {
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
    """Return the fields of the classes in files of the installed Megatron-Core; empty if it is not installed."""
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


def override_rules(node: Mapping[str, Any], key: str, model: str) -> Iterator[Violation]:
    """Yield overrides of a ``megatron`` node that Megatron-Core does not have or does not read.

    ``key`` is that of the node and ``model`` the one of the role's model.
    """
    overrides = node.get("override_transformer_config") or {}
    at = f"{key}.override_transformer_config"
    yield from _unknown(overrides, at, TRANSFORMER, "TransformerConfig")
    for name, value in overrides.items():
        if name in node:
            yield Violation(f"{at}.{name}", value, f"stands one level higher: write {key}.{name}")
        elif name in OF_MODEL or name.startswith(OF_OTHER_MODELS):
            expected = f"is of the model, which generates too: write what config.json has in {model}.override_config"
            yield Violation(f"{at}.{name}", value, expected)
        elif name in OF_ENGINE and value is not None:
            yield Violation(f"{at}.{name}", value, "is set by the engine: leave it out")
        elif name in OF_PRETRAINING and value not in (None, OF_PRETRAINING[name]):
            yield Violation.unsupported(f"{at}.{name}", value, "is of pretraining, and not supported: leave it out")
        elif name in UNREAD:
            yield Violation(f"{at}.{name}", value, "has no effect: leave it out")
    yield from _ddp_rules(node.get("override_ddp_config") or {}, f"{key}.override_ddp_config")


def _ddp_rules(overrides: Mapping[str, Any], at: str) -> Iterator[Violation]:
    """Yield options that the module wrapper does not read, or that conflict with a loss that is divided already."""
    yield from _unknown(overrides, at, DDP, "DistributedDataParallelConfig")
    for name, value in overrides.items():
        if name in OF_MEGATRON_FSDP:
            yield Violation(f"{at}.{name}", value, "is read by Megatron-FSDP, which is not used: leave it out")
        elif name == "average_in_collective" and value:
            yield Violation(f"{at}.{name}", value, "must be false: the loss is divided already, gradients add up")
        elif name == "num_distributed_optimizer_instances" and value != 1:
            yield Violation(f"{at}.{name}", value, "must be 1: the optimizer is cut over all data-parallel workers")
        elif name == "align_param_gather":
            yield Violation.unsupported(
                f"{at}.{name}", value, "is not supported: stages gather one by one, leave it out"
            )


def optimizer_rules(node: Mapping[str, Any], key: str) -> Iterator[Violation]:
    """Yield overrides of an ``optim`` node that Megatron-Core does not have or does not read."""
    overrides = node.get("override_optimizer_config") or {}
    at = f"{key}.override_optimizer_config"
    yield from _unknown(overrides, at, OPTIMIZER, "OptimizerConfig")
    for name, value in overrides.items():
        if name in OF_OPTIM:
            yield Violation(f"{at}.{name}", value, f"stands one level higher: write {key}.{OF_OPTIM[name]}")
        elif name == "use_distributed_optimizer":
            yield Violation(f"{at}.{name}", value, "is of the layout: write megatron.use_distributed_optimizer")
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


def _unknown(overrides: Mapping[str, Any], key: str, files: tuple[str, ...], kind: str) -> Iterator[Violation]:
    known = mcore_fields(files)
    for name in (each for each in overrides if known and each not in known):
        near = get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        yield Violation(f"{key}.{name}", overrides[name], f"is no field of megatron-core's {kind}{hint}")


def stage_problem(layers: int, pp: int, stages: int, overrides: Mapping[str, Any]) -> tuple[str | None, str] | None:
    """Return why ``layers`` cannot be cut into ``pp`` stages of ``stages`` virtual ones each: the key among
    ``overrides``, or None for the sizes, and what is wrong; None where they can.
    """
    ends = {
        name: overrides[name]
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if overrides.get(name) is not None
    }
    counted = [
        name
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        if overrides.get(name)
    ]
    if overrides.get("pipeline_model_parallel_layout") is not None:  # Megatron-Core reads it whole
        return None
    for name in (*ends, *counted):
        if pp < 2:
            return name, "needs pipeline_model_parallel_size of 2 or more"
        if ends and counted:
            return counted[0], f"excludes {next(iter(ends))}: leave one of them out"
    for name, count in ends.items():
        if not isinstance(count, int) or count < 1 or count % stages:
            return name, f"must be 1 or more, and a multiple of the {stages} virtual stages"
    rest = layers - sum(ends.values()) + len(counted)
    middle = pp - len(ends)
    if ends and (rest < middle or (rest % (middle * stages) if middle else rest)):
        return next(iter(ends)), f"must leave layers that the other {middle} stages share evenly, {rest} are left"
    if not ends and rest % (pp * stages):
        means = f" ({rest} with embedding and loss counted)" if counted else ""
        return None, f"with {stages} virtual stages must divide the {layers} layers of the model{means}"
    return None
