"""Build Megatron-Core modules and convert their weights, under the signatures of the established verl interface.

``verl.utils.megatron_utils`` and ``verl.utils.model`` export these names.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from verl.models import mcore
from verl.models.mcore.families import WeightConverter, head_dim
from verl.models.mcore.weights import QueryKeyValue, Stacked
from verl.models.weight_loader_registry import get_weight_loader
from verl.utils.fs import copy_to_local
from verl.utils.json_types import ConfigJson, JsonObject
from verl.utils.megatron.ranks import AXES
from verl.utils.megatron_utils import get_model, unwrap_model

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig


@dataclass
class McoreModuleWrapperConfig:
    """The head and the wrappers of the model that ``make_megatron_module`` builds."""

    is_value_model: bool = False
    share_embeddings_and_output_weights: bool = False
    wrap_with_ddp: bool = True
    use_distributed_optimizer: bool = True


def make_megatron_module(
    wrap_config: McoreModuleWrapperConfig,
    tf_config: "TransformerConfig",
    hf_config: "PretrainedConfig",
    bridge: None = None,
    override_model_config: ConfigJson | None = None,
    override_ddp_config: JsonObject | None = None,
) -> list[nn.Module]:
    """Build the chunks of a model on this rank, without loading weights.

    It reads ``moe_config.freeze_moe_router`` from ``override_model_config``. Raises: ValueError for a ``bridge``.
    """
    if bridge is not None:
        raise ValueError("bridge is not supported: pass None, verl.models.mcore converts the weights")
    moe = (override_model_config or {}).get("moe_config") or {}

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> nn.Module:
        return mcore.init_mcore_model(
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


def convert_config(hf_config: "PretrainedConfig", megatron_config: "ModelParallelConfig") -> "TransformerConfig":
    """Return the ``TransformerConfig`` of a model in the layout and dtype of ``megatron_config``."""
    sizes = {f"{axis}_parallel_size": getattr(megatron_config, f"{axis}_parallel_size") for axis in AXES}
    return mcore.hf_to_mcore_config(
        hf_config, megatron_config.params_dtype, sequence_parallel=megatron_config.sequence_parallel, **sizes
    )


def per_tensor_generator(
    actor_module: Sequence[nn.Module],
    model_config: "PretrainedConfig",
    weight_converter: WeightConverter | None,
    transformer_config: "TransformerConfig | None" = None,
    layer_name_mapping: Mapping[str, str] | None = None,
    convert_qkv_gate_up_by_simple_split: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor) of a model in any layout, one parameter at a time; collective.

    ``model_config`` is the Hugging Face configuration. Without a ``weight_converter`` the tables of the model's family
    convert the tensors. The remaining arguments are accepted and not used.
    """
    from verl.models.mcore.gpt.export import module_weights

    convert = None if weight_converter is None else weight_converter.convert_param
    yield from module_weights(actor_module, model_config, convert)


def default_tp_concat_fn(
    layer_name_mapping: Mapping[str, str],
    name: str,
    train_params: Tensor,
    infer_params: Sequence[Tensor],
    model_config: "PretrainedConfig",
    hf_config: "PretrainedConfig | None" = None,
    convert_qkv_gate_up_by_simple_split: bool = False,
) -> Tensor | list[Tensor]:
    """Join one parameter from the parts ``infer_params`` of all tensor-parallel ranks.

    The entries ``qkv_layer_name`` and ``gate_proj_layer_name`` of ``layer_name_mapping`` name the parameters that
    hold several projections. Their projections are returned as a list with ``convert_qkv_gate_up_by_simple_split``,
    else concatenated. ``train_params``, the part of this rank, holds the sharded dim. The sizes come from
    ``hf_config``, else from ``model_config``.
    """
    config = hf_config or model_config
    if layer_name_mapping["qkv_layer_name"] in name and "layer_norm" not in name:
        joint = QueryKeyValue(("q", "k", "v"), config.num_attention_heads, config.num_key_value_heads, head_dim(config))
        tensors = joint.export(infer_params)
    elif layer_name_mapping["gate_proj_layer_name"] in name and "layer_norm" not in name:
        tensors = Stacked(("gate", "up"), 0).export(infer_params)
    elif getattr(train_params, "tensor_model_parallel", False):
        return torch.cat(list(infer_params), dim=train_params.partition_dim)  # type: ignore[attr-defined]
    else:
        return infer_params[0]
    return tensors if convert_qkv_gate_up_by_simple_split else torch.cat(tensors)


class _FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder of safetensors, read on access."""

    def __init__(self, folder: str) -> None:
        from safetensors import safe_open

        files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]
        opened = [safe_open(file, framework="pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_megatron_gptmodel_weights(
    config: DictConfig,
    model_config: "PretrainedConfig",
    parallel_model: list[nn.Module],
    params_dtype: torch.dtype,
    is_value_model: bool = False,
    local_cache_path: str = "~/.cache/verl/rlhf",
) -> None:
    """Load this rank's parts of ``config.model.path`` into its chunks, one tensor at a time.

    Raises: ValueError naming a tensor that is missing or has another shape.
    """
    folder = copy_to_local(os.path.expanduser(config.model.path), cache_dir=os.path.expanduser(local_cache_path))
    load = get_weight_loader((model_config.architectures or ["none"])[0])
    load(_FolderTensors(folder), parallel_model, model_config, params_dtype, is_value_model)


def load_mcore_dist_weights(
    parallel_model: list[nn.Module], dist_weight_path: str, is_value_model: bool = False
) -> list[nn.Module]:
    """Load a folder in the torch_dist format into the chunks of this rank, in any layout; collective.

    A value model keeps its head. Returns: the chunks. Raises: CheckpointError naming the problem.
    """
    from verl.utils.megatron.dist_checkpointing import chunk_names, load_dist_checkpointing, sharded_weights

    chunks = unwrap_model(list(parallel_model))
    state = sharded_weights(chunks)
    if is_value_model:
        for part in state.values():
            for name in [name for name in part if name.startswith("output_layer.")]:
                del part[name]
    loaded = load_dist_checkpointing(state, dist_weight_path)
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=False)
    return parallel_model
