"""Helpers for Megatron-Core modules, by names of the established verl interface; each call imports Megatron-Core."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from verl.utils.device import get_device_id
from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import JsonObject
from verl.utils.megatron import cpu_support
from verl.utils.megatron.ranks import AXES

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


_ABOVE = (
    "McoreModuleWrapperConfig",
    "convert_config",
    "default_tp_concat_fn",
    "make_megatron_module",
    "per_tensor_generator",
)
"""Established names whose code needs the model families; it lives in the layer above."""


_FOR_FORKS = (
    "get_dist_checkpoint_path",
    "get_hf_model_checkpoint_path",
    "get_transformer_config_checkpoint_path",
    "get_model_config",
    "mcore_model_parallel_config",
    "broadcast_from_megatron_pp",
    "broadcast_str_from_megatron_pp",
    "offload_megatron_model_to_cpu",
    "load_megatron_model_to_gpu",
    "offload_megatron_copy_params",
    "load_megatron_copy_params",
    "offload_megatron_optimizer",
    "load_megatron_optimizer",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(_ABOVE, "verl.models.mcore.modules") | dict.fromkeys(_FOR_FORKS, "verl.compat.megatron_utils"),
)


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


def get_model(
    model_provider_func: Callable[..., nn.Module],
    wrap_with_ddp: bool = True,
    use_distributed_optimizer: bool = True,
    override_ddp_config: JsonObject | None = None,
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
        at: dict[str, int] = {} if virtual is None else {"ignore_virtual": False, "vp_stage": stage}
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


def get_transformer_layer_offset(pipeline_rank: int | None, vp_stage: int | None, config: "TransformerConfig") -> int:
    """Return the number of layers before a stage; None means the stage of this rank."""
    cpu_support.install()
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset as offset

    return offset(config, vp_stage=vp_stage, pp_rank=pipeline_rank)
