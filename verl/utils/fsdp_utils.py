"""FSDP2: construction on meta, sharding units, gradient norm, offload and full tensors.

Each function also takes plain modules and tensors, so that a single process needs no process group.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.tensor import DTensor, Shard

from verl.errors import UnsupportedInput
from verl.utils.import_utils import lazy_exports

_FOR_FORKS = (
    "fsdp_version",
    "meta_device_init",
    "get_init_weight_context_manager",
    "init_fn",
    "parallel_load_safetensors",
    "parallel_init_module_fn",
    "get_fsdp_wrap_policy",
    "maybe_patch_fsdp_module",
    "get_shard_placement_fn",
    "fsdp2_clip_grad_norm_",
    "offload_fsdp_model_to_cpu",
    "load_fsdp_model_to_gpu",
    "offload_fsdp2_model_to_cpu",
    "load_fsdp2_model_to_gpu",
    "offload_fsdp_optimizer",
    "load_fsdp_optimizer",
    "get_fsdp_state_ctx",
    "get_fsdp_full_state_dict",
    "fsdp2_load_full_state_dict",
    "replace_lora_wrapper",
    "collect_lora_params",
    "layered_summon_lora_params",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.fsdp_utils"))

logger = logging.getLogger(__name__)

ADAPTER_MARK = ".lora_"
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names of a model that peft wraps."""
ADAPTED = ".base_layer"
"""Suffix of the name of a layer with adapters; peft adds it once for each parameter that has some."""


# ---- construction


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Construct modules with parameters on meta, and compute buffers as usual.

    No checkpoint holds the buffers that a constructor computes (rotary frequencies), so they must not be on meta.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# ---- sharding


WRAP_KEYS = ("disable", "min_num_params", "transformer_layer_cls_to_wrap")
"""The keys of a wrap policy; the first that is set decides."""


def sharding_units(
    module: nn.Module, model: nn.Module, wrap_policy: Mapping[str, Any] | None = None
) -> list[nn.Module]:
    """Choose the sharding units: by size, by class name, or the model's blocks.

    Args: ``model`` is the transformers model within ``module``, which adapters may wrap.
    Raises: ValueError when the model has no module of a class in the policy.
    """
    policy = {key: value for key, value in (wrap_policy or {}).items() if value}
    minimum = policy.get("min_num_params", 0)
    deciding = next((key for key in WRAP_KEYS if key in policy), None)
    if ignored := [f"{key}={value}" for key, value in policy.items() if key != deciding]:
        by = f"{deciding}={policy[deciding]} decides" if deciding else f"the keys are {', '.join(WRAP_KEYS)}"
        logger.warning("fsdp_config.wrap_policy: ignoring %s: %s", ", ".join(ignored), by)
    if deciding == "disable":
        return []
    if deciding == "min_num_params":
        return list(_units_by_size(module, minimum))
    named = policy.get("transformer_layer_cls_to_wrap")
    names = {named} if isinstance(named, str) else set(named or getattr(model, "_no_split_modules", None) or ())
    units = [part for part in module.modules() if type(part).__name__ in names]
    missing = sorted(names - {type(part).__name__ for part in units})
    if named and missing:
        raise ValueError(f"fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={named}: the model has no {missing}")
    get_embeddings: Any = getattr(model, "get_input_embeddings", None)
    embeddings = None if get_embeddings is None else get_embeddings()
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if units and isinstance(embeddings, nn.Module) and not tied:
        units.append(embeddings)
    return units


def _units_by_size(module: nn.Module, minimum: int) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _units_by_size(child, minimum)
        if not isinstance(child, nn.ModuleList) and sum(p.numel() for p in child.parameters()) >= minimum:
            yield child


def apply_fsdp2(
    model: nn.Module, fsdp_kwargs: dict[str, Any], config: Mapping[str, Any], inner: nn.Module | None = None
) -> None:
    """Apply ``fully_shard`` to every unit and to the root; ``config`` is an ``fsdp_config`` node.

    Args: ``inner`` is the transformers model within ``model`` if adapters wrap it.
    """
    units = sharding_units(model, inner if inner is not None else model, config.get("wrap_policy"))
    for unit in units:
        fsdp.fully_shard(unit, **fsdp_kwargs)
    fsdp.fully_shard(model, **fsdp_kwargs)
    if config.get("forward_prefetch"):
        for unit, following in zip(units, units[1:], strict=False):
            assert isinstance(unit, fsdp.FSDPModule) and isinstance(following, fsdp.FSDPModule)
            unit.set_modules_to_forward_prefetch([following])


def get_sharding_strategy(device_mesh: DeviceMesh) -> fsdp.ShardingStrategy:
    """Return FSDP1's strategy for a mesh: full sharding over one axis, hybrid sharding over two.

    Raises: NotImplementedError, which is also a ValueError, for more axes.
    """
    if device_mesh.ndim > 2:
        raise UnsupportedInput(f"a mesh of {device_mesh.ndim} axes has no strategy: use 1 (fsdp) or 2 (ddp, fsdp)")
    return fsdp.ShardingStrategy.FULL_SHARD if device_mesh.ndim == 1 else fsdp.ShardingStrategy.HYBRID_SHARD


# ---- gradients


def local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shards of all existing gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def gradient_norm(gradients: list[Tensor], shard_group: ProcessGroup | None, device: torch.device) -> float:
    """Return the norm of the full gradient, in fp32; replicas count once. Collective over the shards."""
    squared = torch.zeros((), dtype=torch.float32, device=device)
    kept = [g for g in gradients if g.numel()]
    if kept:
        norms = torch.stack(torch._foreach_norm(kept, 2.0, dtype=torch.float32))
        squared += norms.square().sum().to(device)
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(squared, group=shard_group)
    value = squared.item()
    return math.sqrt(value) if math.isfinite(value) else value


def scale_to_norm(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale gradients of norm ``norm`` in place to a norm of at most ``limit``."""
    if norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


# ---- offload


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device | str | int) -> None:
    """Move the moments to ``device``; scalar step counters stay."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device, non_blocking=True)


# ---- full tensors


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the full, detached tensor of a parameter; collective over the ranks that shard it.

    An offloaded shard is gathered on the device, because its process group works only there.
    """
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if tensor.device.type != mesh.device_type:
        local = tensor.to_local().to(mesh.device_type)
        tensor = DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    whole = _gather_rows(tensor) if tensor.device.type == "cpu" else None
    return tensor.full_tensor() if whole is None else whole


def _gather_rows(tensor: DTensor) -> Tensor | None:
    """Gather a CPU tensor with rows sharded over one axis of its mesh; return None for other shardings.

    Every rank broadcasts its rows straight into the result. Gloo's gather would need a second copy of the tensor.
    """
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) != 1 or tensor.placements[axes[0]] != Shard(0):
        return None
    mesh = tensor.device_mesh
    axis = axes[0]
    local = tensor.to_local()
    if mesh.size(axis) == 1:
        return local
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    step = -(-len(whole) // mesh.size(axis))
    for rank in range(mesh.size(axis)):
        rows = whole[rank * step : (rank + 1) * step]
        if rank == mesh.get_local_rank(axis):
            rows.copy_(local)
        if rows.numel():
            dist.broadcast(rows, group=mesh.get_group(axis), group_src=rank)
    return whole


# ---- adapters


def without_wrappers(name: str) -> str:
    """Return the base model's own name of a parameter under peft's."""
    return re.sub(rf"{re.escape(ADAPTED)}(?=\.)", "", name.removeprefix(ADAPTER_PREFIX))
