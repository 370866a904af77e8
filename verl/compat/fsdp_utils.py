"""Helpers under the established names of ``verl.utils.fsdp_utils``, for workers of users' forks that build a model."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from verl.utils.device import current_device, get_device_name, get_torch_device
from verl.utils.fsdp_utils import (
    ADAPTER_MARK,
    full_tensor,
    gradient_norm,
    local_gradients,
    move_optimizer_state,
    parameters_on_meta,
    scale_to_norm,
    sharding_units,
    without_wrappers,
)
from verl.utils.model import check_exclude_modules, check_target_modules

if TYPE_CHECKING:
    from peft import LoraConfig


def fsdp_version(model: nn.Module) -> int:
    """Return 1 or 2 for a wrapped module, 0 for a plain one."""
    if isinstance(model, fsdp.FullyShardedDataParallel):
        return 1
    return 2 if isinstance(model, fsdp.FSDPModule) else 0


meta_device_init = parameters_on_meta


def get_init_weight_context_manager(
    use_meta_tensor: bool = True, mesh: DeviceMesh | None = None
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which all ranks except the first of the mesh construct parameters on meta."""
    place = mesh.get_coordinate() if mesh is not None else None
    rank = place[-1] if place else _rank()
    return parameters_on_meta if use_meta_tensor and rank != 0 else nullcontext


def init_fn(module: nn.Module) -> nn.Module:
    """Allocate the meta tensors of a module on the device, without values; a ``param_init_fn`` for FSDP1."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return module.to_empty(device=current_device(), recurse=False) if any(t.is_meta for t in tensors) else module


def parallel_load_safetensors(filepath: str) -> dict[str, Tensor | int]:
    """Read this rank's share of a checkpoint's files; return these tensors, and the owning rank of each other tensor.

    Raises: FileNotFoundError when the folder holds no safetensors under the usual names.
    """
    index = os.path.join(filepath, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            file_of: dict[str, str] = json.load(file)["weight_map"]
    else:
        with safe_open(os.path.join(filepath, "model.safetensors"), framework="pt") as whole:
            file_of = dict.fromkeys(whole.keys(), "model.safetensors")
    files = sorted(set(file_of.values()))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    reader = {file: at * ranks // len(files) if len(files) > ranks else at for at, file in enumerate(files)}
    states: dict[str, Tensor | int] = {name: reader[file] for name, file in file_of.items()}
    for own in (file for file in files if reader[file] == _rank()):
        states |= load_file(os.path.join(filepath, own), device=str(current_device()))
    return states


def parallel_init_module_fn(
    module: nn.Module, shard_states: Mapping[str, Tensor | int]
) -> Callable[[nn.Module], nn.Module]:
    """Return a ``param_init_fn`` that fills meta tensors with the result of ``parallel_load_safetensors``.

    Every rank calls it on the same modules in the same order: the rank that holds a tensor broadcasts it. Tied tensors
    stay tied. When called, it raises a ValueError naming a tensor that the checkpoint lacks or has in another shape.
    """
    names: dict[Tensor, str] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if tensor not in names or name in shard_states:
            names[tensor] = name
    made: dict[Tensor, Tensor] = {}
    device = current_device()

    def make(meta: Tensor) -> Tensor:
        name = names[meta]
        if name not in shard_states:
            raise ValueError(f"the checkpoint lacks {name!r}, which the model needs: use a complete checkpoint")
        state = shard_states[name]
        new = state.to(device, meta.dtype) if isinstance(state, Tensor) else torch.empty_like(meta, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(new, src=_rank() if isinstance(state, Tensor) else state)
        if new.shape != meta.shape:
            raise ValueError(f"{name!r} has shape {tuple(new.shape)}, the model needs {tuple(meta.shape)}")
        return nn.Parameter(new, meta.requires_grad) if isinstance(meta, nn.Parameter) else new

    @torch.no_grad()
    def fill(part: nn.Module) -> nn.Module:
        for owner in part.modules():
            for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = make(tensor)
                    setattr(owner, attribute, made[tensor])
        return part

    return fill


def get_fsdp_wrap_policy(
    module: nn.Module, config: Mapping[str, Any] | None = None, is_lora: bool = False
) -> Callable[[nn.Module], bool] | None:
    """Return a predicate for modules that become sharding units; None if only the root is one."""
    units = {id(unit) for unit in sharding_units(module, module, config)}
    return (lambda part: id(part) in units) if units else None


def maybe_patch_fsdp_module(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``fully_shard`` accepts the model; torch 2.11 and later need no patch."""
    return nullcontext()


def get_shard_placement_fn(fsdp_size: int) -> Callable[[nn.Parameter], Shard]:
    """Return a function that shards the first dim that ``fsdp_size`` divides, else dim 0."""

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(next((dim for dim, size in enumerate(parameter.shape) if size % fsdp_size == 0), 0))

    return placement


def fsdp2_clip_grad_norm_(
    parameters: Tensor | list[Tensor], max_norm: float, norm_type: float = 2.0, **kwargs: Any
) -> Tensor:
    """Clip the gradient of sharded parameters by its global 2-norm, and return the norm before clipping.

    Raises: ValueError for another norm.
    """
    if norm_type != 2.0:
        raise ValueError(f"norm_type must be 2.0, got {norm_type}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sharded = next((p for p in parameters if isinstance(p, DTensor)), None)
    group = sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1) if sharded is not None else None
    gradients = local_gradients(parameters)
    device = torch.device(get_device_name()) if sharded is not None else gradients[0].device if gradients else None
    norm = gradient_norm(gradients, group, device or torch.device("cpu"))
    scale_to_norm(gradients, norm, max_norm)
    return torch.tensor(norm)


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Move the shards of all parameters to host memory."""
    model.to("cpu")
    if empty_cache and get_device_name() != "cpu":
        get_torch_device().empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Move the shards of all parameters back to the device."""
    model.to(current_device())


offload_fsdp2_model_to_cpu = offload_fsdp_model_to_cpu


load_fsdp2_model_to_gpu = load_fsdp_model_to_gpu


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the moments to host memory."""
    move_optimizer_state(optimizer, "cpu")


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: torch.device | str | int) -> None:
    """Move the moments to a device."""
    move_optimizer_state(optimizer, device_id)


def get_fsdp_state_ctx(
    model: nn.Module,
    state_type: fsdp.StateDictType,
    state_cfg: fsdp.StateDictConfig | None = None,
    optim_cfg: fsdp.OptimStateDictConfig | None = None,
) -> AbstractContextManager[None]:
    """Return the context that selects FSDP1's kind of state dict; FSDP2 and plain modules have one kind."""
    if fsdp_version(model) == 1:
        return fsdp.FullyShardedDataParallel.state_dict_type(model, state_type, state_cfg, optim_cfg)
    return nullcontext()


def get_fsdp_full_state_dict(
    model: nn.Module, offload_to_cpu: bool = True, rank0_only: bool = True
) -> dict[str, Tensor]:
    """Gather all tensors of a model, one at a time; with ``rank0_only`` other ranks get an empty dict."""
    keep = not rank0_only or _rank() == 0
    whole: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensor = full_tensor(value) if isinstance(value, Tensor) else value
        if keep:
            whole[name] = tensor.cpu() if offload_to_cpu and isinstance(tensor, Tensor) else tensor
    return whole


def fsdp2_load_full_state_dict(
    model: nn.Module,
    full_state: dict[str, Tensor],
    device_mesh: DeviceMesh | None = None,
    cpu_offload: fsdp.CPUOffloadPolicy | None = None,
) -> None:
    """Shard full tensors, which every rank holds, into the parameters of a model.

    Raises: ValueError naming the first tensor that ``full_state`` lacks.
    """
    own = model.state_dict()
    missing = sorted(set(own) - set(full_state))
    if missing:
        raise ValueError(f"full_state lacks {len(missing)} tensors of the model, the first is {missing[0]!r}")
    with torch.no_grad():
        for name, value in own.items():
            whole = full_state[name].to(value.device, value.dtype)
            if isinstance(value, DTensor):
                whole = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
            value.copy_(whole)


def replace_lora_wrapper(k: str, peft_config: "LoraConfig") -> str:
    """Return the rollout engine's name of the base tensor ``k``; adapted modules get ``base_layer``."""
    module, _, kind = k.rpartition(".")
    adapted = check_target_modules(peft_config, module) and not check_exclude_modules(peft_config, module)
    return f"{module}.base_layer.{kind}" if adapted and kind in ("weight", "bias") else k


def collect_lora_params(
    module: nn.Module, layered_summon: bool = False, base_sync_done: bool = True
) -> "OrderedDict[str, Tensor]":
    """Gather the adapters under peft's names or, before the base is synced, the base under the engine's names."""
    configs: Any = module.peft_config
    collected: OrderedDict[str, Tensor] = OrderedDict()
    for name, parameter in module.named_parameters():
        adapter = ADAPTER_MARK in name
        if adapter != base_sync_done:
            continue
        tensor = full_tensor(parameter).cpu()
        own = (
            name.replace(".default.", ".")
            if adapter
            else replace_lora_wrapper(without_wrappers(name), configs["default"])
        )
        collected[own] = tensor
    return collected


def layered_summon_lora_params(fsdp_module: nn.Module) -> "OrderedDict[str, Tensor]":
    """Gather the adapters one tensor at a time."""
    return collect_lora_params(fsdp_module, layered_summon=True, base_sync_done=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
