"""Helpers around Megatron-Core modules under their established names; it is imported when one of them is called."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fs import local_mkdir_safe
from verl.utils.megatron import cpu_support

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.utils.megatron.offload import Offload

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


@dataclass
class McoreModuleWrapperConfig:
    """What ``make_megatron_module`` makes: the head of the model, and what is around it."""

    is_value_model: bool = False
    share_embeddings_and_output_weights: bool = False
    wrap_with_ddp: bool = True
    use_distributed_optimizer: bool = True


def make_megatron_module(
    wrap_config: McoreModuleWrapperConfig,
    tf_config: Any,
    hf_config: "PretrainedConfig",
    bridge: Any = None,
    override_model_config: Mapping[str, Any] | None = None,
    override_ddp_config: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the chunks of a model on this rank, whose weights are not loaded yet.

    Of ``override_model_config`` it reads ``moe_config.freeze_moe_router``. Raises: ValueError for a ``bridge``.
    """
    if bridge is not None:
        raise ValueError("bridge is not supported: give none, verl.models.mcore converts the weights")
    from verl.models.mcore import init_mcore_model

    moe = (override_model_config or {}).get("moe_config") or {}

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        return init_mcore_model(
            tf_config,
            hf_config,
            pre_process,
            post_process,
            share_embeddings_and_output_weights=wrap_config.share_embeddings_and_output_weights,
            value=wrap_config.is_value_model,
            freeze_moe_router=bool(moe.get("freeze_moe_router")),
            vp_stage=vp_stage,
        )

    return get_model(provider, wrap_config.wrap_with_ddp, wrap_config.use_distributed_optimizer, override_ddp_config)


def mcore_model_parallel_config(sequence_parallel: bool, params_dtype: torch.dtype) -> Any:
    """Return Megatron-Core's ``ModelParallelConfig`` for the layout of the process."""
    cpu_support.install()
    from megatron.core import ModelParallelConfig, parallel_state

    return ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
    )


def convert_config(hf_config: "PretrainedConfig", megatron_config: Any) -> Any:
    """Return the ``TransformerConfig`` of a model in the layout and dtype of a ``ModelParallelConfig``."""
    from verl.models.mcore import hf_to_mcore_config

    names = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {f"{name}_parallel_size": getattr(megatron_config, f"{name}_parallel_size") for name in names}
    dtype, shares = megatron_config.params_dtype, megatron_config.sequence_parallel
    return hf_to_mcore_config(hf_config, dtype, sequence_parallel=shares, **sizes)


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


# ---- memory


_OFFLOAD = "_verl_offload"
"""Where a chunk or an optimizer keeps what of it is away from the device."""


def _offload_of(owner: Any, modules: Sequence[Any], optimizer: Any) -> "Offload":
    cpu_support.install()
    from verl.utils.megatron.offload import Offload

    found: Offload | None = getattr(owner, _OFFLOAD, None)
    if found is None:
        name = get_device_name()
        device = torch.device(name) if name == "cpu" else torch.device(name, int(get_device_id()))
        found = Offload(modules, optimizer, device)
        setattr(owner, _OFFLOAD, found)
    return found


def offload_megatron_model_to_cpu(models: Sequence[Any]) -> None:
    """Move the parameters of chunks to the host, and free their gradients, until they are loaded again."""
    for model in models:
        for part in ("model", "grad"):
            _offload_of(model, [model], None).unload(part)


def load_megatron_model_to_gpu(models: Sequence[Any], load_grad: bool = True) -> None:
    """Bring parameters back, and gradients as zeros; without ``load_grad`` those stay away."""
    for model in models:
        for part in ("model", "grad") if load_grad else ("model",):
            _offload_of(model, [model], None).load(part)


def offload_megatron_copy_params(optimizers: Any) -> None:
    """Move the copies of parameters that an optimizer updates to the host: of half-precision ones, in fp32."""
    _offload_of(optimizers, (), optimizers).unload("copies")


def load_megatron_copy_params(optimizers: Any) -> None:
    """Bring the copies of parameters back."""
    _offload_of(optimizers, (), optimizers).load("copies")


def offload_megatron_optimizer(optimizers: Any) -> None:
    """Move the state of an optimizer to the host: its moments, and copies of parameters."""
    _offload_of(optimizers, (), optimizers).unload("optimizer")


def load_megatron_optimizer(optimizers: Any) -> None:
    """Bring the state of an optimizer back, copies of parameters too."""
    for part in ("copies", "optimizer"):
        _offload_of(optimizers, (), optimizers).load(part)


# ---- weights


def per_tensor_generator(
    actor_module: Sequence[Any],
    model_config: "PretrainedConfig",
    weight_converter: Any,
    transformer_config: Any = None,
    layer_name_mapping: Mapping[str, str] | None = None,
    convert_qkv_gate_up_by_simple_split: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor) of a model in any layout, one parameter at a time; collective.

    ``model_config`` is the Hugging Face configuration. The tensors are those of ``weight_converter.convert_param``,
    or with None of the tables of the model's family; the arguments behind it are not read.
    """
    cpu_support.install()
    from verl.models.mcore.gpt.export import CurrentRanks, exported_weights
    from verl.models.mcore.gpt.heads import ValueHead

    chunks = unwrap_model(list(actor_module))
    has_values = any(isinstance(getattr(chunk, "output_layer", None), ValueHead) for chunk in chunks)
    convert = None if weight_converter is None else weight_converter.convert_param
    yield from exported_weights(chunks, model_config, has_values, CurrentRanks.of_process(), convert=convert)


def default_tp_concat_fn(
    layer_name_mapping: Mapping[str, str],
    name: str,
    train_params: Tensor,
    infer_params: Sequence[Tensor],
    model_config: Any,
    hf_config: "PretrainedConfig | None" = None,
    convert_qkv_gate_up_by_simple_split: bool = False,
) -> Tensor | list[Tensor]:
    """Put one parameter together from the parts ``infer_params`` of all tensor-parallel ranks.

    ``layer_name_mapping`` says by ``qkv_layer_name`` and ``gate_proj_layer_name`` which names hold several
    projections: those come as a list with ``convert_qkv_gate_up_by_simple_split``, else one behind the other.
    ``train_params`` is the part of this rank, which says where it is cut. Sizes are those of ``hf_config``, or without
    it of ``model_config``.
    """
    from verl.models.mcore.families import head_dim
    from verl.models.mcore.weights import QueryKeyValue, Stacked

    config = hf_config or model_config
    if layer_name_mapping["qkv_layer_name"] in name and "layer_norm" not in name:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        tensors = QueryKeyValue("q", "k", "v", heads, groups, head_dim(config)).export(infer_params)
    elif layer_name_mapping["gate_proj_layer_name"] in name and "layer_norm" not in name:
        tensors = Stacked(("gate", "up"), 0).export(infer_params)
    elif getattr(train_params, "tensor_model_parallel", False):
        return torch.cat(list(infer_params), dim=train_params.partition_dim)  # type: ignore[attr-defined]
    else:
        return infer_params[0]
    return tensors if convert_qkv_gate_up_by_simple_split else torch.cat(tensors)
