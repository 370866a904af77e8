"""Helpers for Megatron-Core modules under their established names; each imports Megatron-Core when it is called."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER
from verl.utils.device import current_device, get_device_id
from verl.utils.fs import local_mkdir_safe
from verl.utils.import_utils import lazy_exports
from verl.utils.megatron import cpu_support
from verl.utils.megatron.ranks import AXES

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig

    from verl.utils.megatron.offload import Offload

Given = TypeVar("Given")

_ABOVE = (
    "McoreModuleWrapperConfig",
    "convert_config",
    "default_tp_concat_fn",
    "make_megatron_module",
    "per_tensor_generator",
)
"""Established names whose code needs the model families; it lives in the layer above."""


__getattr__ = lazy_exports(__name__, dict.fromkeys(_ABOVE, "verl.models.mcore.modules"))


# ---- checkpoint folders, created if missing


def get_dist_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of a checkpoint's tensors."""
    return local_mkdir_safe(os.path.join(checkpoint_path, TENSORS_FOLDER))


def get_hf_model_checkpoint_path(checkpoint_path: str) -> str:
    """Return the folder of a checkpoint's configuration and tokenizer."""
    return local_mkdir_safe(os.path.join(checkpoint_path, "huggingface"))


def get_transformer_config_checkpoint_path(checkpoint_path: str, use_dist_checkpointing: bool = True) -> str:
    """Return the file of Megatron-Core's configuration in a checkpoint."""
    return os.path.join(local_mkdir_safe(checkpoint_path), "transformer_config.json")


# ---- modules


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Remove the wrappers of one module or of a list of modules; ``module_instances`` are the wrapper classes."""
    cpu_support.install()
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    wrappers = module_instances or (DistributedDataParallel, Float16Module)
    found = []
    for module in model if isinstance(model, list) else [model]:
        while isinstance(module, wrappers):
            module = module.module  # type: ignore[union-attr]
        found.append(module)
    return found if isinstance(model, list) else found[0]


def get_model_config(model: nn.Module) -> "TransformerConfig":
    """Return the ``TransformerConfig`` of a module, wrapped or not."""
    return unwrap_model(model).config


def get_model(
    model_provider_func: Callable[..., nn.Module],
    wrap_with_ddp: bool = True,
    use_distributed_optimizer: bool = True,
    override_ddp_config: dict[str, Any] | None = None,
) -> list[nn.Module]:
    """Build the chunks of this rank on the device, with gradient buffers unless ``wrap_with_ddp`` is false.

    ``model_provider_func`` takes ``pre_process`` and ``post_process``, and ``vp_stage`` with virtual stages.
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


def current_sizes() -> dict[str, int | None]:
    """Return the ``<axis>_parallel_size`` fields of the parallel layout of this process."""
    from megatron.core import parallel_state

    return {f"{axis}_parallel_size": getattr(parallel_state, f"get_{axis}_parallel_world_size")() for axis in AXES}


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


def get_transformer_layer_offset(pipeline_rank: int | None, vp_stage: int | None, config: "TransformerConfig") -> int:
    """Return the number of layers before a stage; None means the stage of this rank."""
    cpu_support.install()
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset as offset

    return offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)


# ---- pipelines


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


# ---- memory


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
