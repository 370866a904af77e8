"""Turn the rollout config into vLLM's engine arguments, with the checks that vLLM makes late or not at all."""

import math
from typing import TYPE_CHECKING, Any

import torch

from verl.base_config import WrongInput
from verl.models.transformers.vision import is_vision_config
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.workers.config.model import TRAINED_ROUTER, flat_overrides, positions_of
from verl.workers.rollout.vllm_rollout.media import media_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.workers.config import HFModelConfig, RolloutConfig

_NODE = "actor_rollout_ref.rollout"
_CPU_BLOCK_TOKENS = 32
"""The smallest size that vLLM's CPU attention takes: it wastes less of a block, and caches shorter prefixes."""
_LATENT_SIZE = 576  # of DeepSeek-V2 and later, the only one that vLLM's CPU kernel has


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


class ContextLengthError(WrongInput, AssertionError):
    """Prompt and response do not fit into the context."""


def build_engine_args(
    config: "RolloutConfig", model_config: "HFModelConfig", standalone: bool = False
) -> dict[str, Any]:
    """Return the keyword arguments of ``vllm.LLM``; ``engine_kwargs.vllm`` overrides them.

    Args: a ``standalone`` engine has processes of its own, and gets its weights from another one.
    Raises: ValueError naming the key of a size that cannot work.
    """
    on_cpu = get_device_name() == "cpu"
    max_model_len = check_context(config, model_config.hf_config)
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise WrongInput(
            f"{_NODE}.max_num_batched_tokens={config.max_num_batched_tokens} is below the context {max_model_len} and "
            f"enable_chunked_prefill=false: write at least {max_model_len}, or enable chunked prefill"
        )
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
    args |= dict(config.engine_kwargs.get("vllm") or {})
    return {name: value for name, value in args.items() if value is not None}


def _standalone_args(config: "RolloutConfig") -> dict[str, Any]:
    return {
        "data_parallel_size": config.data_parallel_size,
        "distributed_executor_backend": "mp" if config.tensor_model_parallel_size > 1 else "uni",
        "worker_extension_cls": f"{__package__}.engine_process.WorkerExtension",
        "weight_transfer_config": {"backend": WEIGHT_BACKEND},
    }


def is_batch_invariant(config: "RolloutConfig") -> bool:
    """Whether the log-probabilities of a request must not depend on the other requests of a step.

    Raises: ValueError on a CPU if several threads share a product, whose parts then depend on the number of rows.
    """
    threads = torch.get_num_threads()
    if get_device_name() != "cpu":
        return bool(config.batch_invariant)
    if config.batch_invariant and threads > 1:
        raise WrongInput(
            f"{_NODE}.batch_invariant=true: needs one thread on a CPU, and there are {threads}: set OMP_NUM_THREADS=1, "
            "or write null"
        )
    if config.batch_invariant is None:
        return config.dtype in ("float32", "float") and threads == 1
    return config.batch_invariant


def check_context(config: "RolloutConfig", hf_config: "PreTrainedConfig") -> int:
    """Return the engine's context length.

    Raises: ContextLengthError if prompt and response do not fit into it, or it exceeds the model's.
    """
    needed = config.prompt_length + config.response_length
    length = config.context_length
    sizes = f"{_NODE}.prompt_length + response_length = {config.prompt_length} + {config.response_length} = {needed}"
    if length < needed:
        raise ContextLengthError(f"{_NODE}.max_model_len={length} is below {sizes}: write at least {needed}, or null")
    context = positions_of(hf_config.get_text_config().to_dict(), {})
    if context is not None and length > context:
        raise ContextLengthError(
            f"the engine's context {length} ({_NODE}.max_model_len, or {sizes}) exceeds the model's "
            f"max_position_embeddings={context}: shorten prompt_length or response_length, or set "
            "actor_rollout_ref.model.override_config.rope_scaling"
        )
    return int(length)


def check_parallel_sizes(config: "RolloutConfig") -> None:
    """Raise ValueError for layouts that an engine in the worker's process does not support."""
    if config.data_parallel_size > 1:
        raise WrongInput(
            f"{_NODE}.data_parallel_size={config.data_parallel_size}: write 1; there is an engine per "
            "tensor-parallel group already, and each takes its shard of the batch"
        )
    if torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world % config.tensor_model_parallel_size:
            raise WrongInput(
                f"{_NODE}.tensor_model_parallel_size={config.tensor_model_parallel_size} must divide {world} workers"
            )
    elif config.tensor_model_parallel_size > 1:
        raise WrongInput(
            f"{_NODE}.tensor_model_parallel_size={config.tensor_model_parallel_size} needs a process group: "
            "call torch.distributed.init_process_group first"
        )


def cpu_kv_cache_bytes(config: "RolloutConfig", hf_config: "PreTrainedConfig", max_model_len: int) -> int:
    """Return the bytes of the key-value cache on a CPU: enough for ``max_num_seqs`` full sequences, within memory.

    The cache may use ``gpu_memory_utilization`` of the free memory, shared by the workers of this machine.

    Raises: ValueError if the attention kernel does not support the head size, or if not even one sequence fits.
    """
    import psutil
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text_config = hf_config.get_text_config()
    heads = text_config.num_attention_heads
    kv_heads = max(1, (getattr(text_config, "num_key_value_heads", None) or heads) // config.tensor_model_parallel_size)
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    values_per_layer = 2 * kv_heads * head_dim
    block = _CPU_BLOCK_TOKENS
    if has_latent_cache(hf_config):
        head_dim = text_config.kv_lora_rank + text_config.qk_rope_head_dim
        sizes = [_LATENT_SIZE]
        values_per_layer = head_dim
        block = _CPU_LATENT_ATTENTION["block_size"]
    if head_dim not in sizes:  # vLLM accepts others at start and fails later
        raise WrongInput(
            f"vLLM's CPU attention has no kernel for head size {head_dim} of actor_rollout_ref.model.path; it has "
            f"{sizes}. Use such a model, or {_NODE}.name=hf"
        )
    item_bytes = 4 if config.dtype in ("float32", "float") else 2
    if config.dtype == "auto":
        item_bytes = (getattr(text_config, "dtype", None) or torch.float32).itemsize
    block_tokens = (config.engine_kwargs.get("vllm") or {}).get("block_size") or block
    tokens = (math.ceil(max_model_len / block_tokens) + 1) * block_tokens
    sequence_bytes = text_config.num_hidden_layers * values_per_layer * item_bytes * tokens
    # LOCAL_WORLD_SIZE is 1 in each of Ray's workers.
    workers = envs.integer("RAY_LOCAL_WORLD_SIZE", envs.integer("LOCAL_WORLD_SIZE", 1))
    available = int(psutil.virtual_memory().available * config.gpu_memory_utilization / workers)
    if sequence_bytes > available:
        raise WrongInput(
            f"the key-value cache of one sequence of {max_model_len} tokens needs {sequence_bytes >> 20} MiB, and "
            f"{_NODE}.gpu_memory_utilization={config.gpu_memory_utilization} of the free memory, shared by {workers} "
            f"workers, is {available >> 20} MiB: shorten the context, raise the share, or use fewer workers"
        )
    return int(min(sequence_bytes * config.max_num_seqs, available))


def has_latent_cache(hf_config: "PreTrainedConfig") -> bool:
    """Return whether the cache holds one latent for all heads, as in DeepSeek-V2 and later."""
    return getattr(hf_config.get_text_config(), "kv_lora_rank", None) is not None


def _overrides(config: "RolloutConfig", model_config: "HFModelConfig") -> dict[str, Any]:
    """Return the fields of ``config.json`` that differ in training."""
    overrides = flat_overrides(model_config.override_config)
    if model_config.hf_config.model_type == "kimi_vl" and config.load_format == "dummy":  # weights come from training
        overrides["text_config"] = {**overrides.get("text_config", {}), **TRAINED_ROUTER}
    return overrides


def _if_other(path: str | None, usual: str) -> str | None:
    return path if path != usual else None
