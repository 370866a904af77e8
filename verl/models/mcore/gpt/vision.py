"""The vision tower of a ``GPTModel``: transformers' own module, whose features replace the embeddings of placeholders.

The tower is a submodule of the first chunk of the first pipeline stage, whole on every tensor-parallel rank. Each rank
runs it on all images of its rows. With sequence parallelism a rank embeds a part of the tokens, so it has a part of
the tower's gradient, and Megatron-Core sums the parts as it does for norms. Context parallelism works in the same way:
its ranks take their tokens' features, and the gradient is summed over them as over data-parallel ranks.

Two kinds of hooks do this, as for head and padding row (``layers.py``): one after the embedding, and for families whose
tower also adds features of its earlier layers (Qwen3-VL) one after each of the first decoder layers.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verl.errors import WrongInput
from verl.models.mcore.families import VisionParts
from verl.models.mcore.gpt.layers import DeepFeatures, PackedRowParams
from verl.models.transformers.vision import Media, read_media
from verl.utils.device import current_device
from verl.utils.fsdp_utils import parameters_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

AXES = 3  # frame, row, column


class AxialRotary(nn.Module):
    """Rotary angles from positions along three axes: each frequency belongs to one of them.

    Source: Qwen2-VL (arXiv:2409.12191), section 2.1; interleaved axes as in transformers' Qwen3-VL.
    """

    inv_freq: Tensor
    axes: Tensor

    def __init__(self, head_dim: int, base: float, sections: list[int], interleaved: bool) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        axes = torch.repeat_interleave(torch.arange(AXES), torch.tensor(sections))
        if interleaved:
            axes = torch.zeros_like(axes)
            for axis in (1, 2):
                axes[axis : AXES * sections[axis] : AXES] = axis
        for name, values in (("inv_freq", 1.0 / base**exponents), ("axes", axes)):
            self.register_buffer(name, values.to(current_device()), persistent=False)

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: ProcessGroup | None = None) -> Tensor:
        """Return angles (T, 1, 1, head_dim) at positions (3, 1, T) of a packed row.

        Attention then takes the part of a context-parallel rank, since the angles are those of the whole row.
        """
        angles = position_ids[self.axes, 0].T.float() * self.inv_freq
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def axial_positions(position_ids: Tensor, place: Tensor, total: int) -> Tensor:
    """Return the positions (3, 1, total) of an aligned row from those of its tokens, (T,) or (3 or 4, T).

    The axes are the last three rows. Text alone has the same position on all axes.
    """
    shown = position_ids[-AXES:] if position_ids.dim() == 2 else position_ids.expand(AXES, -1)
    return shown.new_zeros(AXES, total).index_copy(1, place, shown).unsqueeze(1)


class _DeepContext(Protocol):
    deep: DeepFeatures
    layer: int


class _AddDeepFeatures(torch.autograd.Function):
    """Add the features of one layer to hidden states (t, 1, h)."""

    @staticmethod
    def forward(ctx: _DeepContext, hidden: Tensor, deep: DeepFeatures, layer: int) -> Tensor:
        ctx.deep = deep
        ctx.layer = layer
        return hidden.index_add(0, deep.rows, deep.values[layer].detach().unsqueeze(1))

    @staticmethod
    def backward(ctx: _DeepContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.deep.gradients[ctx.layer] = grads[0].index_select(0, ctx.deep.rows).squeeze(1)
        return grads[0], None, None


class _DeepFeatureGradients(torch.autograd.Function):
    """Pass the embeddings through; in the backward pass, send the gradients of earlier features to the tower."""

    @staticmethod
    def forward(ctx: _DeepContext, embeddings: Tensor, deep: DeepFeatures, *values: Tensor) -> Tensor:
        ctx.deep = deep
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: _DeepContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *ctx.deep.gradients


@dataclass(frozen=True)
class MediaRequest:
    """The media of one packed row.

    Args:
        ids: tokens (1, T) of the row, without the padding that aligns it.
        places: place (T,) of each token among those of this context-parallel rank; -1 if another rank holds it.
        params: boundaries of the row, which carry the deep features to the decoder layers.
    """

    media: Media
    ids: Tensor
    places: Tensor
    params: PackedRowParams


class FeatureMerger:
    """A hook after the embedding that replaces the embeddings of placeholder tokens by the features of their media.

    A request applies to the next forward pass only.
    """

    def __init__(self, model: GPTModel, hf_config: "PretrainedConfig", tp_group: ProcessGroup) -> None:
        self.request: MediaRequest | None = None
        self._tower: PreTrainedModel = model.visual
        self._hf_config = hf_config
        self._tp_group = tp_group if model.config.sequence_parallel else None
        model.embedding.register_forward_hook(self)

    def __call__(self, embedding: nn.Module, args: tuple[Tensor, ...], embeddings: Tensor) -> Tensor:
        """Merge the features into embeddings (t, 1, h), or (t / tp, 1, h) under sequence parallelism."""
        request = self.request
        assert request is not None, "a pass through the first stage of a vision-language model needs its media"
        self.request = None
        places, features, deep = read_media(self._tower, self._hf_config, request.media, request.ids)
        rows = request.places[places]
        if self._tp_group is not None:
            start = self._tp_group.rank() * len(embeddings)
            rows = torch.where(rows < 0, rows, rows - start)
        held = ((rows >= 0) & (rows < len(embeddings))).nonzero().squeeze(1)
        rows = rows[held]

        def of_this_rank(part: Tensor) -> Tensor:
            return part.index_select(0, held).to(embeddings.dtype)

        merged = embeddings.index_copy(0, rows, of_this_rank(features).unsqueeze(1))
        if not deep:
            return merged
        added = DeepFeatures(rows, [of_this_rank(part) for part in deep])
        request.params.deep = added
        with_gradients: Tensor = _DeepFeatureGradients.apply(merged, added, *added.values)  # type: ignore[no-untyped-call]
        return with_gradients


def attach_axes(model: GPTModel, vision: VisionParts) -> None:
    """Let a chunk take positions along three axes; Megatron-Core's own module knows no packed rows."""
    config = model.config
    model.rotary_pos_emb = AxialRotary(
        config.kv_channels, model.rotary_base, list(config.mrope_section), vision.interleaved
    )


def takes_axes(model: nn.Module) -> bool:
    """Return whether a chunk, which may be of any stage, takes positions along three axes."""
    return isinstance(getattr(model, "rotary_pos_emb", None), AxialRotary)


def attach_tower(model: GPTModel, hf_config: "PretrainedConfig", tp_group: ProcessGroup) -> None:
    """Give a chunk with an embedding the vision tower, without its weights.

    Raises: ValueError if the chunk lacks a decoder layer that takes features of the tower.
    """
    tower = _new_tower(hf_config, model.config)
    model.visual = tower
    model.merger = FeatureMerger(model, hf_config, tp_group)
    deep = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ())
    if len(model.decoder.layers) < deep:
        raise WrongInput(
            f"megatron.pipeline_model_parallel_size={model.config.pipeline_model_parallel_size}: the first stage, or "
            f"virtual stage, holds {len(model.decoder.layers)} layers, and the vision tower adds features after the "
            f"first {deep}: give it {deep} layers or more"
        )
    for at, layer in enumerate(model.decoder.layers[:deep]):
        layer.register_forward_hook(_DeepHook(at), with_kwargs=True)


class _LayerArguments(TypedDict):
    packed_seq_params: PackedRowParams


@dataclass(frozen=True)
class _DeepHook:
    """A hook after a decoder layer that adds the features of the tower."""

    layer: int

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: _LayerArguments, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        hidden, context = output
        deep = kwargs["packed_seq_params"].deep
        return _AddDeepFeatures.apply(hidden, deep, self.layer), context  # type: ignore[no-untyped-call]


def _new_tower(hf_config: "PretrainedConfig", config: TransformerConfig) -> "PreTrainedModel":
    """Return a tower without weights on the device, taken from a model whose language model has no layers."""
    from transformers import AutoModel

    shallow = copy.deepcopy(hf_config)
    shallow.text_config.num_hidden_layers = 0
    with parameters_on_meta():
        tower: PreTrainedModel = AutoModel.from_config(shallow, dtype=config.params_dtype).visual
    device = current_device()
    for module in tower.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(torch.empty_like(parameter, device=device))
                made.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
                module._parameters[name] = made
    if config.recompute_granularity == "full":
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tower
