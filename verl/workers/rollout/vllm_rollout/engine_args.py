"""Turn the rollout config into vLLM's engine arguments, with the checks that vLLM makes late or not at all."""

from typing import TYPE_CHECKING, Any

import torch

from verl.errors import WrongInput
from verl.models.transformers.vision import is_vision_config
from verl.utils.device import get_device_name
from verl.utils.json_types import mapping_at
from verl.workers.config.model import TRAINED_ROUTER
from verl.workers.config.overrides import merged
from verl.workers.rollout.engine_rope import engine_rope
from verl.workers.rollout.engine_settings import (
    cache_bytes_per_token,
    check_context,
    check_parallel_sizes,
    check_prefill,
    cpu_cache_tokens,
    has_latent_cache,
    head_size,
)
from verl.workers.rollout.vllm_rollout.media import media_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.workers.config import HFModelConfig, RolloutConfig

_NODE = "actor_rollout_ref.rollout"
_CPU_BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes: small blocks waste less memory, and cache shorter prefixes."""
_LATENT_SIZE = 576  # latent size of DeepSeek-V2 and later; vLLM's CPU kernel has no other


_CPU_LATENT_ATTENTION: dict[str, Any] = {
    "attention_backend": "CPU_MLA",  # another one, for AMX, computes in bf16 only
    "block_size": 16,
    # vLLM 0.32's CPU kernel rotates a query wrongly that is a part of a wider tensor.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}

WEIGHT_BACKEND = "verl"
"""The name of our receiver of weights in vLLM's ``weight_transfer_config``."""
INVARIANT_VARIABLE = "VERL_ENGINE_BATCH_INVARIANT"
"""Set for the processes of a standalone engine: whether no response depends on the others of its batch."""


def build_engine_args(
    config: "RolloutConfig", model_config: "HFModelConfig", standalone: bool = False
) -> dict[str, Any]:
    """Return the keyword arguments of ``vllm.LLM``; ``engine_kwargs.vllm`` overrides them.

    Args: a ``standalone`` engine has separate processes, and gets its weights from another process.
    Raises: ValueError naming the key of a size that cannot work.
    """
    on_cpu = get_device_name() == "cpu"
    max_model_len = check_context(config, model_config.hf_config)
    check_prefill(config, max_model_len)
    if not standalone:
        check_parallel_sizes(config)
    args: dict[str, Any] = {
        "model": model_config.local_path,
        "hf_config_path": _if_other(model_config.local_hf_config_path, model_config.local_path),
        "tokenizer": _if_other(model_config.local_tokenizer_path, model_config.local_path),
        "trust_remote_code": model_config.trust_remote_code,
        "hf_overrides": _overrides(config, model_config) or None,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "generation_config": "vllm",  # the sampling defaults of the model's folder must not apply
        "load_format": config.load_format,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1 or None,
        "disable_custom_all_reduce": True,
        "disable_log_stats": config.disable_log_stats,
        "enforce_eager": config.enforce_eager or on_cpu,
        "logprobs_mode": "processed_logprobs",  # log-probs of the sampled distribution, with temperature
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if standalone:
        args |= _standalone_args(config)
    elif torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        args["distributed_executor_backend"] = "external_launcher"
    if on_cpu:
        args["block_size"] = _CPU_BLOCK_TOKENS
        if has_latent_cache(model_config.hf_config):
            args |= _CPU_LATENT_ATTENTION
        args["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(config, model_config.hf_config, max_model_len)
    else:
        args["enable_sleep_mode"] = config.free_cache_engine and not standalone
        if config.cudagraph_capture_sizes and not config.enforce_eager:
            args["compilation_config"] = {"cudagraph_capture_sizes": list(config.cudagraph_capture_sizes)}
    if is_vision_config(model_config.hf_config):
        args |= media_arguments(config)
    args |= {name: value for name, value in (config.engine_kwargs.get("vllm") or {}).items() if name != "hf_overrides"}
    if args.get("otlp_traces_endpoint"):
        args["disable_log_stats"] = False  # a trace of a request tells its statistics
    return {name: value for name, value in args.items() if value is not None}


def _standalone_args(config: "RolloutConfig") -> dict[str, Any]:
    return {
        "data_parallel_size": config.data_parallel_size,
        "distributed_executor_backend": "mp" if config.tensor_model_parallel_size > 1 else "uni",
        "worker_extension_cls": f"{__package__}.engine_process.WorkerExtension",
        "weight_transfer_config": {"backend": WEIGHT_BACKEND},
    }


def cpu_kv_cache_bytes(config: "RolloutConfig", hf_config: "PreTrainedConfig", max_model_len: int) -> int:
    """Return the bytes of the key-value cache on a CPU; see ``cpu_cache_tokens``.

    Raises: ValueError if the attention kernel does not support the head size, or if not even one sequence fits.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    is_latent = has_latent_cache(hf_config)
    size = head_size(hf_config)
    sizes = [_LATENT_SIZE] if is_latent else CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:  # vLLM accepts others at start and fails later
        raise WrongInput(
            f"vLLM's CPU attention has no kernel for head size {size} of actor_rollout_ref.model.path; it has "
            f"{sizes}. Use such a model, or {_NODE}.name=hf"
        )
    usual = _CPU_LATENT_ATTENTION["block_size"] if is_latent else _CPU_BLOCK_TOKENS
    block_tokens = (config.engine_kwargs.get("vllm") or {}).get("block_size") or usual
    tokens = cpu_cache_tokens(config, hf_config, max_model_len, block_tokens)
    return tokens * cache_bytes_per_token(config, hf_config)


def _overrides(config: "RolloutConfig", model_config: "HFModelConfig") -> dict[str, Any]:
    """Return the fields of ``config.json`` that differ in training."""
    overrides = merged(
        model_config.config_changes(), engine_rope("vllm", model_config.hf_config, config.context_length)
    )
    if model_config.hf_config.model_type == "kimi_vl" and config.load_format == "dummy":  # weights come from training
        overrides["text_config"] = {**mapping_at(overrides, "text_config"), **TRAINED_ROUTER}
    return merged(overrides, (config.engine_kwargs.get("vllm") or {}).get("hf_overrides") or {})


def _if_other(path: str | None, usual: str) -> str | None:
    return path if path != usual else None
