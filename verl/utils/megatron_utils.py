"""Helpers around Megatron-Core modules under their established names; it is imported when one of them is called."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER
from verl.utils.device import get_device_id
from verl.utils.fs import local_mkdir_safe
from verl.utils.megatron import cpu_support

# ---- folders of a checkpoint


def get_dist_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of the tensors of a checkpoint, made where it is missing."""
    return local_mkdir_safe(os.path.join(checkpoint_path, TENSORS_FOLDER))


def get_hf_model_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of configuration and tokenizer of a checkpoint, made where it is missing."""
    return local_mkdir_safe(os.path.join(checkpoint_path, "huggingface"))


def get_transformer_config_checkpoint_path(checkpoint_path: str, use_dist_checkpointing: bool = True) -> str:
    """Return the file of Megatron-Core's configuration in a checkpoint, whose folder is made where it is missing."""
    return os.path.join(local_mkdir_safe(checkpoint_path), "transformer_config.json")


# ---- modules


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Return what wrappers hold: of one module or of a list; ``module_instances`` says which count as wrappers."""
    cpu_support.install()
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    wrappers = module_instances or (DistributedDataParallel, Float16Module)
    found = []
    for module in model if isinstance(model, list) else [model]:
        while isinstance(module, wrappers):
            module = module.module
        found.append(module)
    return found if isinstance(model, list) else found[0]


def get_model_config(model: Any) -> Any:
    """Return the ``TransformerConfig`` of a module, wrapped or not."""
    return unwrap_model(model).config


def get_model(
    model_provider_func: Callable[..., Any],
    wrap_with_ddp: bool = True,
    use_distributed_optimizer: bool = True,
    override_ddp_config: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the chunks of this rank, made by ``provider(pre_process=, post_process=)``, and ``vp_stage=`` where the
    layout has virtual stages; on the device, with gradient buffers unless ``wrap_with_ddp`` is false.
    """
    cpu_support.install()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(virtual or 1):
        at: dict[str, Any] = {} if virtual is None else {"ignore_virtual": False, "vp_stage": stage}
        chunk = model_provider_func(
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            **({} if virtual is None else {"vp_stage": stage}),
        )
        chunks.append(chunk.to(get_device_id()))
    if not wrap_with_ddp:
        return chunks
    values = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": use_distributed_optimizer}
    settings = DistributedDataParallelConfig(**(values | (override_ddp_config or {})))
    return [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=at > 0)
        for at, chunk in enumerate(chunks)
    ]


def get_transformer_layer_offset(pipeline_rank: int | None, vp_stage: int | None, config: Any) -> int:
    """Return how many layers stand before those of a stage; None is the stage of this rank."""
    cpu_support.install()
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset as offset

    found: int = offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
    return found


# ---- pipelines


def broadcast_from_megatron_pp(tensor: Tensor | None) -> Tensor:
    """Return on all stages the tensor that exactly one of them gives; the others give None.

    Raises: ValueError on all stages when not exactly one gives a tensor.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    own = None if tensor is None else (tensor.shape, tensor.dtype)
    given: list[Any] = [None] * group.size()
    dist.all_gather_object(given, own, group=group)
    holders = [rank for rank, each in enumerate(given) if each is not None]
    if len(holders) != 1:
        raise ValueError(f"exactly one pipeline stage must give a tensor, stages {holders} do")
    shape, dtype = given[holders[0]]
    whole = torch.empty(shape, dtype=dtype, device=get_device_id()) if tensor is None else tensor.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, holders[0]), group=group)
    return whole


def broadcast_str_from_megatron_pp(obj: Any) -> Any:
    """Return on all stages what exactly one of them gives; the others give None. Raises: ValueError as above."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    given: list[Any] = [None] * group.size()
    dist.all_gather_object(given, obj, group=group)
    holders = [rank for rank, each in enumerate(given) if each is not None]
    if len(holders) != 1:
        raise ValueError(f"exactly one pipeline stage must give an object, stages {holders} do")
    return given[holders[0]]
