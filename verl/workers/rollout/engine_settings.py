"""The settings that all engines read: context length, layout, key-value cache, and batch invariance."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import WrongInput, WrongSetting
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.workers.config.model import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.workers.config import RolloutConfig

_NODE = "actor_rollout_ref.rollout"


def media_settings(engine: str, engine_kwargs: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return how many images and videos a prompt may have, by kind, and the arguments of the model's processor.

    Args: ``engine_kwargs`` are those of the engine, as its own names have them.
    """
    limits: Mapping[str, int] | None
    options: Mapping[str, Any] | None
    if engine == "sglang":
        given = engine_kwargs.get("mm_process_config") or {}
        limits = engine_kwargs.get("limit_mm_data_per_request")
        options = {f"{kind}s_kwargs": dict(given[kind]) for kind in ("image", "video") if given.get(kind)}
    else:
        limits, options = (engine_kwargs.get(name) for name in ("limit_mm_per_prompt", "mm_processor_kwargs"))
    return dict(limits or {}), dict(options or {})


def check_context(config: "RolloutConfig", hf_config: "PreTrainedConfig") -> int:
    """Return the engine's context length.

    Raises: WrongSetting if prompt and response do not fit into it, or it exceeds the model's.
    """
    needed = config.prompt_length + config.response_length
    length = config.context_length
    sizes = f"{_NODE}.prompt_length + response_length = {config.prompt_length} + {config.response_length} = {needed}"
    if length < needed:
        raise WrongSetting(f"{_NODE}.max_model_len={length} is below {sizes}: write at least {needed}, or null")
    context = positions_of(hf_config.get_text_config().to_dict())
    if context is not None and length > context:
        raise WrongSetting(
            f"the engine's context {length} ({_NODE}.max_model_len, or {sizes}) exceeds the model's "
            f"max_position_embeddings={context}: shorten prompt_length or response_length, or set "
            "actor_rollout_ref.model.override_config.rope_scaling"
        )
    return int(length)


def check_prefill(config: "RolloutConfig", context_length: int) -> None:
    """Raise WrongInput if prompts must not be cut into chunks and the longest does not fit into a pass."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < context_length:
        raise WrongInput(
            f"{_NODE}.max_num_batched_tokens={config.max_num_batched_tokens} is below the context {context_length} and "
            f"enable_chunked_prefill=false: write at least {context_length}, or enable chunked prefill"
        )


def check_parallel_sizes(config: "RolloutConfig") -> None:
    """Raise ValueError for layouts that an engine on the trainer's devices does not support."""
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


def has_latent_cache(hf_config: "PreTrainedConfig") -> bool:
    """Return whether the cache holds one latent for all heads, as in DeepSeek-V2 and later."""
    return getattr(hf_config.get_text_config(), "kv_lora_rank", None) is not None


def head_size(hf_config: "PreTrainedConfig") -> int:
    """Return the elements of a head, or of the latent that the cache holds instead."""
    text = hf_config.get_text_config()
    if has_latent_cache(hf_config):
        return int(text.kv_lora_rank + text.qk_rope_head_dim)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def cache_bytes_per_token(config: "RolloutConfig", hf_config: "PreTrainedConfig") -> int:
    """Return the bytes of the keys and values of a token in one worker of an engine."""
    text = hf_config.get_text_config()
    values = head_size(hf_config)
    if not has_latent_cache(hf_config):
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        values *= 2 * max(1, heads // config.tensor_model_parallel_size)
    return int(text.num_hidden_layers * values * engine_dtype(config, hf_config).itemsize)


def engine_dtype(config: "RolloutConfig", hf_config: "PreTrainedConfig") -> torch.dtype:
    """Return the dtype of the engine's weights and cache; that of the model for ``auto``."""
    if config.dtype == "auto":
        found = getattr(hf_config.get_text_config(), "dtype", None) or torch.float32
        return getattr(torch, found) if isinstance(found, str) else found
    return {"half": torch.float16, "float": torch.float32}.get(config.dtype) or getattr(torch, config.dtype)


def cpu_cache_tokens(
    config: "RolloutConfig", hf_config: "PreTrainedConfig", context_length: int, block_tokens: int = 1
) -> int:
    """Return the tokens of the key-value cache on a CPU: enough for ``max_num_seqs`` full sequences, within memory.

    The cache may use ``gpu_memory_utilization`` of the free memory, shared by the workers of this machine. A sequence
    takes whole blocks of tokens, and one to spare.

    Raises: WrongInput if not even one sequence fits.
    """
    import psutil

    sequence_tokens = (math.ceil(context_length / block_tokens) + 1) * block_tokens
    sequence_bytes = cache_bytes_per_token(config, hf_config) * sequence_tokens
    # LOCAL_WORLD_SIZE is 1 in each of Ray's workers.
    workers = envs.integer("RAY_LOCAL_WORLD_SIZE", envs.integer("LOCAL_WORLD_SIZE", 1))
    available = int(psutil.virtual_memory().available * config.gpu_memory_utilization / workers)
    if sequence_bytes > available:
        raise WrongInput(
            f"the key-value cache of one sequence of {context_length} tokens needs {sequence_bytes >> 20} MiB, and "
            f"{_NODE}.gpu_memory_utilization={config.gpu_memory_utilization} of the free memory, shared by {workers} "
            f"workers, is {available >> 20} MiB: shorten the context, raise the share, or use fewer workers"
        )
    return min(sequence_tokens * config.max_num_seqs, available // cache_bytes_per_token(config, hf_config))
