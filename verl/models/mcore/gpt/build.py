"""Build this rank's chunks of a ``GPTModel`` from a Hugging Face configuration, name their parameters and load them."""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.distributed import ProcessGroup

from verl.errors import UnsupportedInput, WrongInput
from verl.models.mcore import families
from verl.models.mcore.gpt.layers import (
    ATTENTION_OUTPUT_BIAS,
    LATENT_EPSILON,
    FusedHead,
    PositionPicker,
    ValueHead,
    block_spec,
    detach_padding_row,
)
from verl.models.mcore.gpt.vision import attach_axes, attach_tower
from verl.models.mcore.weights import ReadPart, Rule, Shard, reading_stacks
from verl.models.mcore_limits import default_implementation
from verl.utils.device import get_device_name
from verl.utils.megatron.tensor_parallel import padded_vocab_size
from verl.utils.megatron_utils import current_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<at>\d+)\.(?P<part>.+)|(?P<projection>linear_fc[12])\.weight(?P<grouped>\d+))"
)
"""One expert of this rank: a separate module, or a part of Transformer Engine's grouped projections."""


def hf_to_mcore_config(hf_config: "PretrainedConfig", dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """Return Megatron-Core's configuration for the process's layout; ``overrides`` are its fields and take precedence.

    Raises: UnsupportedInput for an unsupported model, ValueError for an unknown field.
    """
    on_cpu = get_device_name() == "cpu"
    values: dict[str, Any] = {
        "activation_func": F.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
        "calculate_per_token_loss": True,  # verl normalises the loss, so gradients of ranks are summed
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # Megatron-Core demands it for variable lengths, even of dense models
        # Gloo still reads the output while the next chunk runs; NCCL has queued its copy by then.
        "deallocate_pipeline_outputs": not on_cpu,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "transformer_impl": default_implementation(get_device_name()),
    }
    values |= _current_layout() | families.find_family(hf_config).config(hf_config) | overrides
    output_bias = values.pop(ATTENTION_OUTPUT_BIAS, False)
    kernels = values.pop("attention_backend", None)  # only Transformer Engine reads it
    if kernels is not None and values["transformer_impl"] == "transformer_engine":
        values["attention_backend"] = _attention_backend(kernels, bool(values.get("multi_latent_attention")))
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    if values["transformer_impl"] == "transformer_engine":
        _refuse_transformer_engine(hf_config, output_bias)
    unknown = sorted(values.keys() - kind.__dataclass_fields__.keys())
    if unknown:
        raise WrongInput(
            f"megatron.override_transformer_config has unknown keys {unknown}: use fields of megatron-core's "
            "TransformerConfig"
        )
    built = kind(**values)
    setattr(built, ATTENTION_OUTPUT_BIAS, output_bias)
    return built


def _current_layout() -> dict[str, Any]:
    """Return the fields of Megatron-Core's current parallel layout; empty before it is initialised."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    values: dict[str, Any] = current_sizes()
    values["sequence_parallel"] = values["tensor_model_parallel_size"] > 1
    if values["virtual_pipeline_model_parallel_size"] is not None:
        # Batched exchange gives wrong results, see McoreEngineConfig.
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return values


def _attention_backend(name: str | AttnBackend, is_latent: bool) -> AttnBackend:
    """Return the attention kernels by name.

    ``flash`` becomes ``auto`` without flash-attn, and for latent attention: its keys and values differ in width, which
    flash-attn 2 does not support.
    """
    if name == "flash" and (is_latent or importlib.util.find_spec("flash_attn") is None):
        return AttnBackend.auto
    return name if isinstance(name, AttnBackend) else AttnBackend[name]


def _refuse_transformer_engine(hf_config: "PretrainedConfig", output_bias: bool) -> None:
    """Raise UnsupportedInput for model options that only verl's layers support."""
    text = families.text_of(hf_config)
    latent = getattr(text, "kv_lora_rank", None) and text.rms_norm_eps != LATENT_EPSILON
    for unsupported, option in ((output_bias, "attention_bias"), (latent, "latent norms with a separate epsilon")):
        if unsupported:
            raise UnsupportedInput(
                f"Transformer Engine's layers do not support {option}: set "
                "megatron.override_transformer_config.transformer_impl=local"
            )


def init_mcore_model(
    tf_config: TransformerConfig,
    hf_config: "PretrainedConfig",
    pre_process: bool | None = None,
    post_process: bool | None = None,
    *,
    share_embeddings_and_output_weights: bool = False,
    value: bool = False,
    freeze_moe_router: bool = False,
    vp_stage: int | None = None,
) -> GPTModel:
    """Return one chunk of the model on this rank, without loading its weights.

    Args:
        pre_process: whether the chunk has the embedding; None lets the layout decide.
        post_process: whether the chunk has the head; None lets the layout decide.
        value: replace the language model's head by a value head.
    """
    stage: dict[str, Any] = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    if pre_process is None:
        pre_process = parallel_state.is_pipeline_first_stage(**stage)
    if post_process is None:
        post_process = parallel_state.is_pipeline_last_stage(**stage)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    family = families.find_family(hf_config)
    text = families.text_of(hf_config)
    model = GPTModel(
        config=tf_config,
        transformer_layer_spec=block_spec(tf_config, vp_stage),
        vocab_size=padded_vocab_size(text.vocab_size, tf_config.tensor_model_parallel_size),
        max_sequence_length=text.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=share_embeddings_and_output_weights and not value,
        vp_stage=vp_stage,
        pg_collection=groups,
        **family.rope(hf_config),
    )
    padding = getattr(text, "pad_token_id", None)
    if pre_process and padding is not None:
        detach_padding_row(model.embedding.word_embeddings, padding % text.vocab_size, groups.tp)
    if family.vision is not None:
        attach_axes(model, family.vision)
        if pre_process:
            attach_tower(model, hf_config, groups.tp)
    if post_process:
        if value:
            model.output_layer = ValueHead(tf_config)
        attach_picker(model, groups.tp)
    # The optimizer must reduce the gradients of experts over their own group if their tensor parallelism differs from
    # that of the dense layers. Megatron-Core 0.16.1 marks them for expert parallelism only. Without the mark it would
    # not sum the gradients of experts that each tensor-parallel worker holds whole.
    marks_experts = tf_config.expert_tensor_parallel_size != tf_config.tensor_model_parallel_size
    for name, parameter in model.named_parameters():
        if freeze_moe_router and ".router." in name:
            parameter.requires_grad_(False)
        if marks_experts and ".experts." in name:
            parameter.allreduce = False
    _mark_shards(model, hf_config, value)
    return model


def _mark_shards(model: GPTModel, hf_config: "PretrainedConfig", is_value_model: bool) -> None:
    """Mark parameters that tensor parallelism shards, as Megatron-Core does when it initialises them, which is skipped.

    The gradient of an unmarked parameter would count as replicated, and the gradient norm would be wrong.
    """
    for named in named_parameters(model, hf_config, is_value_model):
        if named.rule.shard_dim is not None and not hasattr(named.parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(named.parameter, True, named.rule.shard_dim, 1)


def attach_picker(model: GPTModel, tp_group: ProcessGroup) -> None:
    """Let a chunk's head, if it has one, run at selected positions only."""
    if not model.post_process or hasattr(model, "picker"):
        return
    config = model.config
    if not isinstance(model.output_layer, ValueHead):  # the picker gathers the sequence before the head
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
    model.picker = PositionPicker(model.output_layer, config.sequence_parallel, tp_group)


def attach_fused_head(model: GPTModel, vocab_size: int, tp_group: ProcessGroup, backend: str = "torch") -> None:
    """Let a chunk's head, if it has one, score tokens without materialising logits.

    Raises: ValueError if Megatron-Core would compute the head's weight gradient elsewhere.
    """
    if not model.post_process or hasattr(model, "fused_head"):
        return
    if model.config.defer_embedding_wgrad_compute:
        raise WrongInput(
            "megatron.override_transformer_config.defer_embedding_wgrad_compute=true does not work with "
            "use_fused_kernels=true: remove one of the two"
        )
    attach_picker(model, tp_group)
    model.fused_head = FusedHead(model.output_layer, vocab_size, tp_group, backend)


# Names and weights


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank: its name with global layer and expert numbers, its rule and its checkpoint names."""

    name: str
    rule: Rule
    checkpoint_names: tuple[str, ...]
    parameter: torch.Tensor
    is_expert: bool = False


def named_parameters(model: GPTModel, hf_config: "PretrainedConfig", is_value_model: bool) -> Iterator[NamedParameter]:
    """Yield a chunk's parameters, and the buffers that checkpoints hold.

    Raises: ValueError naming a parameter without a rule.
    """
    outer = families.outer_rules(hf_config, is_value_model, model.share_embeddings_and_output_weights)
    layer_rules = families.find_family(hf_config).layer(hf_config)
    layer_rules |= {te: layer_rules[name] for name, te in families.FUSED_NORMS.items() if name in layer_rules}
    prefix = families.LAYER.split("{")[0]
    expert_prefix = families.EXPERT.split("{")[0]
    held = (families.num_experts(hf_config) or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = held * parallel_state.get_expert_model_parallel_rank()
    parameters = dict(model.named_parameters())
    for name, parameter in chain(parameters.items(), model.named_buffers()):
        layer = expert = None
        is_buffer = name not in parameters
        rule = outer.get(name) or (None if is_buffer else families.tower_rule(hf_config, name))
        if name.startswith(prefix):
            local, rest = name.removeprefix(prefix).split(".", 1)
            layer = model.decoder.layers[int(local)].layer_number - 1
            if (found := expert_of(rest)) is not None:
                local_expert, part = found
                expert = local_expert + first_expert
                rule = layer_rules.get(f"{families.EXPERT}{part}")
                rest = f"{expert_prefix}{expert}.{part}"
            else:
                rule = layer_rules.get(rest)
            name = f"{prefix}{layer}.{rest}"
        if rule is None:
            if is_buffer:  # such as positions and counts, which checkpoints do not hold
                continue
            raise ValueError(f"no rule maps Megatron-Core's {name!r} to checkpoint tensors")
        names = tuple(each.format(layer=layer, expert=expert) for each in rule.names)
        yield NamedParameter(name, rule, names, parameter, expert is not None)


def expert_of(name: str) -> tuple[int, str] | None:
    """Return the local expert number and the name within the expert for a layer's parameter; None for others."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    return int(found["at"] or found["grouped"]), found["part"] or f"{found['projection']}.weight"


def load_parts(
    chunks: Sequence[GPTModel],
    hf_config: "PretrainedConfig",
    is_value_model: bool,
    read: ReadPart,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Fill the parameters of this rank's chunks with their ``parts``, and mark shards, as ``init_mcore_model`` does."""
    for chunk in chunks:
        _mark_shards(chunk, hf_config, is_value_model)
    with torch.no_grad():
        for part, parameter in parts(chunks, hf_config, is_value_model, read, shapes):
            parameter.copy_(part)


def parts(
    chunks: Sequence[GPTModel],
    hf_config: "PretrainedConfig",
    is_value_model: bool,
    read: ReadPart,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (value, parameter) for this rank's chunks, in their order; ``read`` is asked only for this rank's parts.

    ``shapes`` are those of the stored tensors, for families whose checkpoints come in two layouts.
    """
    groups = (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group())
    dense, in_expert = (Shard(group.rank(), group.size()) for group in groups)
    read = reading_stacks(read, families.num_experts(hf_config) or 0, shapes)
    for chunk in chunks:
        for named in named_parameters(chunk, hf_config, is_value_model):
            shard = in_expert if named.is_expert else dense
            part = named.rule.load(read, shard, named.checkpoint_names, named.parameter.shape)
            if part.device.type != "meta":  # a dry run reads nothing
                yield part, named.parameter
