"""Helpers under the established names of ``verl.utils.megatron_utils``, for users' forks that build their model."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER
from verl.utils.device import current_device, get_device_id
from verl.utils.fs import local_mkdir_safe
from verl.utils.megatron import cpu_support
from verl.utils.megatron_utils import current_sizes, unwrap_model

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig

    from verl.utils.megatron.offload import Offload

Given = TypeVar("Given")


def get_dist_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of a checkpoint's tensors."""
    return local_mkdir_safe(os.path.join(checkpoint_path, TENSORS_FOLDER))


def get_hf_model_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of a checkpoint's configuration and tokenizer."""
    return local_mkdir_safe(os.path.join(checkpoint_path, "huggingface"))


def get_transformer_config_checkpoint_path(checkpoint_path: str, use_dist_checkpointing: bool = True) -> str:
    """Return the file of Megatron-Core's configuration in a checkpoint."""
    return os.path.join(local_mkdir_safe(checkpoint_path), "transformer_config.json")


def get_model_config(model: nn.Module) -> "TransformerConfig":
    """Return the ``TransformerConfig`` of a module, wrapped or not."""
    return unwrap_model(model).config


def mcore_model_parallel_config(sequence_parallel: bool, params_dtype: torch.dtype) -> "ModelParallelConfig":
    """Return the configuration of the parallel layout of this process."""
    cpu_support.install()
    from megatron.core import ModelParallelConfig

    return ModelParallelConfig(
        **current_sizes(),
        sequence_parallel=sequence_parallel,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
    )


def broadcast_from_megatron_pp(tensor: Tensor | None) -> Tensor:
    """Return on all stages the tensor that exactly one of them passes; the others pass None.

    Raises: ValueError on all stages unless exactly one passes a tensor.
    """
    group = _pipeline_group()
    (shape, dtype), holder = _only_one(None if tensor is None else (tensor.shape, tensor.dtype), group)
    whole = torch.empty(shape, dtype=dtype, device=get_device_id()) if tensor is None else tensor.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, holder), group=group)
    return whole


def broadcast_str_from_megatron_pp(obj: Given | None) -> Given:
    """Return on all stages the object that exactly one of them passes; the others pass None.

    Raises: ValueError on all stages unless exactly one passes an object.
    """
    return _only_one(obj, _pipeline_group())[0]


def _pipeline_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


def _only_one(own: Given | None, group: dist.ProcessGroup) -> tuple[Given, int]:
    """Return the object that one stage passes, and the rank of that stage."""
    given: list[Given | None] = [None] * group.size()
    dist.all_gather_object(given, own, group=group)
    found = [(each, rank) for rank, each in enumerate(given) if each is not None]
    if len(found) != 1:
        raise ValueError(f"exactly one pipeline stage must pass a value, stages {[rank for _, rank in found]} do")
    return found[0]


_OFFLOAD = "_verl_offload"
"""Attribute of a chunk or optimizer that holds its ``Offload``."""


def _offload_of(
    owner: "nn.Module | MegatronOptimizer", modules: Sequence[nn.Module], optimizer: "MegatronOptimizer | None"
) -> "Offload":
    cpu_support.install()
    from verl.utils.megatron.offload import Offload

    found: Offload | None = getattr(owner, _OFFLOAD, None)
    if found is None:
        found = Offload(modules, optimizer, current_device())
        setattr(owner, _OFFLOAD, found)
    return found


def offload_megatron_model_to_cpu(models: Sequence[nn.Module]) -> None:
    """Move the parameters of chunks to the host and free their gradients."""
    for model in models:
        for part in ("model", "grad"):
            _offload_of(model, [model], None).unload(part)


def load_megatron_model_to_gpu(models: Sequence[nn.Module], load_grad: bool = True) -> None:
    """Move parameters back to the device; with ``load_grad`` also allocate gradients, as zeros."""
    for model in models:
        for part in ("model", "grad") if load_grad else ("model",):
            _offload_of(model, [model], None).load(part)


def offload_megatron_copy_params(optimizers: "MegatronOptimizer") -> None:
    """Move the fp32 copies of half-precision parameters to the host."""
    _offload_of(optimizers, (), optimizers).unload("copies")


def load_megatron_copy_params(optimizers: "MegatronOptimizer") -> None:
    """Move the fp32 copies of parameters back to the device."""
    _offload_of(optimizers, (), optimizers).load("copies")


def offload_megatron_optimizer(optimizers: "MegatronOptimizer") -> None:
    """Move the state of an optimizer to the host: its moments and the copies of parameters."""
    _offload_of(optimizers, (), optimizers).unload("optimizer")


def load_megatron_optimizer(optimizers: "MegatronOptimizer") -> None:
    """Move the state of an optimizer back to the device, including the copies of parameters."""
    for part in ("copies", "optimizer"):
        _offload_of(optimizers, (), optimizers).load(part)
