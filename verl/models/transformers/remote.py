"""Run models with remote code: code that lies in their repository (``trust_remote_code``).

Such code lacks two arguments of transformers' own models: the positions at which logits are needed, and the boundaries
of packed sequences. Kimi-VL and MiniCPM-o also merge images in their own way. Here they merge as in
``verl.models.transformers.vision``: the tower runs exactly once per forward pass, before the sequence is sliced over
ranks. The tower gets media that several rows share only once, and a blank image if there are none.

Written against the interfaces of the published repositories (``modeling_kimi_vl.py`` of Kimi-VL-A3B,
``modeling_minicpmo.py`` of MiniCPM-o 2.6), with transformers 5.16 to 5.19.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from verl.errors import WrongInput
from verl.models.transformers.attention import varlen_attention_forward
from verl.models.transformers.names import REMOTE_FAMILIES
from verl.models.transformers.packed_sequences import PackedSequences
from verl.models.transformers.vision import Media, as_shown
from verl.utils.checkpoint.hf_export import REMOTE_MODULES

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel
    from transformers.utils.generic import ModelOutput

_PACKED = "_verl_packed_sequences"
"""Attribute of an attention layer: the boundaries of the sequences of the last forward pass."""
_PLAIN = "_verl_plain_forward"
"""Attribute of a module: the forward of its remote code."""
_ROTATE = "_verl_rotate"
_MLA_LAYERS = "_verl_mla_layers"
_PARTS_OF_MLA = ("kv_a_layernorm", "kv_b_proj", "o_proj", "rotary_emb", "softmax_scale", "qk_rope_head_dim")


def has_remote_code(model: nn.Module) -> bool:
    """Return whether the class of a model, which FSDP may have extended, comes from the model's repository."""
    return any(cls.__module__.startswith(REMOTE_MODULES) for cls in type(model).__mro__)


def is_remote_family(config: "PretrainedConfig | None") -> bool:
    """Return whether a configuration is that of a vision-language family with remote code."""
    return getattr(config, "model_type", None) in REMOTE_FAMILIES


def builds_own_attention(config: "PretrainedConfig | None") -> bool:
    """Return whether the model picks its attention from its own table, which lacks ``verl_varlen``."""
    return getattr(config, "model_type", None) == "kimi_vl"


def adapt(model: "PreTrainedModel", packed: bool) -> None:
    """Adapt a model with remote code to the engine's arguments; ``packed`` means that sequences are packed.

    Raises: WrongInput if its code cannot take packed sequences.
    """
    if is_remote_family(model.config):
        _check_parts(model)
        if packed and builds_own_attention(model.config):
            _pack_attention(model)
        forward = _kimi_forward if model.config.model_type == "kimi_vl" else _minicpmo_forward
        model.forward = MethodType(forward, model)
        return
    known = inspect.signature(model.forward).parameters
    takes_more = any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values())
    if packed and not takes_more and "packed_sequences" not in known:
        raise WrongInput(
            f"use_remove_padding=True: {type(model).__name__}, from the repository of model.path, takes no packed "
            "sequences: write False"
        )
    if "logits_to_keep" not in known:
        model.__dict__[_PLAIN] = model.forward
        model.forward = MethodType(_forward_with_kept_logits, model)


def _forward_with_kept_logits(
    self: "PreTrainedModel",
    *args: Tensor | None,
    logits_to_keep: Tensor | None = None,
    **kwargs: Tensor | bool | None,
) -> "ModelOutput":
    with _kept(self.get_output_embeddings(), logits_to_keep):
        output: ModelOutput = self.__dict__[_PLAIN](*args, **kwargs)
        return output


@contextmanager
def _kept(head: nn.Module, columns: Tensor | None) -> Iterator[None]:
    """Let a head see only the given columns of the hidden states (b, T, H)."""
    if columns is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, args: (args[0].index_select(1, columns), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def _check_parts(model: "PreTrainedModel") -> None:
    """Raise WrongInput naming a part that the code of a model lacks, so that another version is not run by mistake."""
    needed = {
        "kimi_vl": ("language_model", "_extract_image_features", "get_input_embeddings", "get_output_embeddings"),
        "minicpmo": ("llm", "vpm", "resampler", "get_vllm_embedding"),
    }[model.config.model_type]
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise WrongInput(
            f"model.path: {type(model).__name__}, from the model's repository, has no {missing[0]!r}, by which "
            f"model_type={model.config.model_type!r} is trained: use the published version of its code"
        )


# ---- images


class _KimiVL(nn.Module):
    """The parts of Kimi-VL that the forward pass reads."""

    config: "PretrainedConfig"
    language_model: nn.Module
    get_input_embeddings: Callable[[], nn.Module]
    get_output_embeddings: Callable[[], nn.Module]
    _extract_image_features: Callable[[Tensor, Tensor], Tensor]


class _Slices(TypedDict):
    """The image slices of one row, in MiniCPM-o's format."""

    input_ids: Tensor
    pixel_values: list[list[Tensor]]
    tgt_sizes: list[Tensor]
    image_bound: list[Tensor]


class _MiniCPMO(nn.Module):
    """The parts of MiniCPM-o that the forward pass reads."""

    config: "PretrainedConfig"
    llm: nn.Module
    get_input_embeddings: Callable[[], nn.Module]
    get_vllm_embedding: Callable[[_Slices], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class _Merged:
    """Arguments of a language model: embeddings (b, T, H) with the features of images in their places."""

    inputs_embeds: Tensor
    position_ids: Tensor


def _merge(embeddings: Tensor, positions: Tensor, places: Tensor, features: Tensor, media: Media) -> _Merged:
    """Put features (n, H) at the flat token places (n,), and take this rank's slice of the sequence.

    Without places the features stay unread and still get a gradient, of zero.

    Raises: ValueError when their numbers differ.
    """
    if not len(places):
        features = features[:0]
    if len(places) != len(features):
        raise ValueError(
            f"the prompts of a micro-batch hold {len(places)} image tokens, but multi_modal_inputs gives "
            f"{len(features)} features: keep each row's prompt and processor output together, and do not truncate "
            "prompts within an image"
        )
    flat = embeddings.flatten(0, 1).index_copy(0, places, features.to(embeddings.dtype))
    embeddings = flat.view_as(embeddings)
    if media.window is not None:
        start, width = media.window
        embeddings = embeddings.narrow(1, start, width)
        positions = positions.narrow(-1, start, width)
    return _Merged(embeddings, positions)


def _kimi_forward(
    self: _KimiVL,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    media: Media,
    logits_to_keep: Tensor,
    packed_sequences: PackedSequences | None = None,
    **others: Tensor | int | None,
) -> "ModelOutput":
    """Run Kimi-VL; ``others`` repeat the boundaries of packed sequences in other forms."""
    embeddings = self.get_input_embeddings()(input_ids)
    is_placeholder = (input_ids == self.config.media_placeholder_token_id) & ~media.sampled
    places = is_placeholder.flatten().nonzero().squeeze(1)
    vision = self.config.vision_config
    down, right = vision.merge_kernel_size
    if media.inputs.get("pixel_values") is not None:
        pixels = media.inputs["pixel_values"].to(embeddings.dtype)
        grids = torch.as_tensor(media.inputs["image_grid_hws"], device=embeddings.device)
    elif len(places):
        raise ValueError(f"the prompts hold {len(places)} image tokens, but multi_modal_inputs has no pixel_values")
    else:
        pixels = embeddings.new_zeros(down * right, 3, vision.patch_size, vision.patch_size)
        grids = torch.tensor([[down, right]], device=embeddings.device)
    features = self._extract_image_features(pixels, grids)
    sizes = (grids.prod(-1) // (down * right)).tolist()
    features = as_shown(features, sizes, list(media.shown.get("image_grid_hws", range(len(sizes)))))
    merged = _merge(embeddings, position_ids, places, features, media)
    for attention in self.__dict__.get(_MLA_LAYERS, ()):
        attention.__dict__[_PACKED] = packed_sequences
    with _kept(self.get_output_embeddings(), logits_to_keep):
        output: ModelOutput = self.language_model(
            inputs_embeds=merged.inputs_embeds,
            position_ids=merged.position_ids,
            attention_mask=attention_mask,
            use_cache=False,
            return_dict=True,
        )
    return output


def _minicpmo_forward(
    self: _MiniCPMO,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    media: Media,
    **options: Tensor | bool | None,
) -> "ModelOutput":
    """Run MiniCPM-o, whose language model is transformers' own and takes the other ``options``."""
    options = {name: value for name, value in options.items() if value is not None}  # adapters add empty ones
    embeddings = self.get_input_embeddings()(input_ids)
    distinct = {id(row["pixel_values"]): row for row in media.rows if len(row.get("pixel_values", ()))}
    numbers: dict[int, list[int]] = {}
    slices: list[Tensor] = []
    for key, row in distinct.items():
        numbers[key] = list(range(len(slices), len(slices) + len(row["pixel_values"])))
        slices += row["pixel_values"]
    shown = [number for row in media.rows for number in numbers.get(id(row.get("pixel_values")), [])]
    sizes = [torch.as_tensor(row["tgt_sizes"]) for row in distinct.values()]
    if not slices:
        side = self.config.vision_config.patch_size
        slices = [torch.zeros(3, side, 4 * side)]
        sizes = [torch.tensor([[2, 2]])]
        shown = [0]
    features = _features_of_slices(self, slices, torch.cat(sizes), embeddings)[shown]
    merged = _merge(embeddings, position_ids, _slice_places(input_ids, media), features.flatten(0, 1), media)
    output: ModelOutput = self.llm(
        inputs_embeds=merged.inputs_embeds, position_ids=merged.position_ids, attention_mask=attention_mask, **options
    )
    return output


def _features_of_slices(model: _MiniCPMO, slices: list[Tensor], sizes: Tensor, like: Tensor) -> Tensor:
    """Return the features (n, queries, H) of slices, by the model's remote code, in one call of its tower.

    That code cuts many slices into several calls. Ranks that share the tower would then differ in their calls.
    """
    data: _Slices = {
        "input_ids": torch.zeros(1, 1, dtype=torch.long, device=like.device),
        "pixel_values": [[part.to(like) for part in slices]],
        "tgt_sizes": [sizes.to(like.device)],
        "image_bound": [torch.zeros(0, 2, dtype=torch.long)],
    }
    config = model.config
    limit = getattr(config, "vision_batch_size", None)
    config.vision_batch_size = len(slices)
    try:
        _, seen = model.get_vllm_embedding(data)
    finally:
        config.vision_batch_size = limit
    return seen[0]


def _slice_places(ids: Tensor, media: Media) -> Tensor:
    """Return the flat places of the image tokens of all rows, from ``image_bound`` in columns of the padded prompt.

    Raises: ValueError when a bound holds padding, sampled tokens, or tokens other than those of images.
    """
    found = []
    for number, row in enumerate(media.rows):
        for start, stop in torch.as_tensor(row.get("image_bound", ())).reshape(-1, 2).tolist():
            assert media.places is not None
            if not 0 <= start < stop <= media.places.shape[1]:
                raise ValueError(f"image_bound of a row is [{start}, {stop}], outside of its prompt")
            found.append(media.places[number, start:stop])
    places = torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=ids.device)
    tokens = ids.flatten()[places]
    if (places < 0).any() or media.sampled.flatten()[places].any() or (tokens != tokens[:1]).any():
        raise ValueError(
            "image_bound points at tokens that are no placeholders of an image: it counts the columns of the padded "
            "prompt, so do not pad prompts again, and use the data set class of recipe/minicpmo"
        )
    return places


# ---- packed multi-head latent attention


class _LatentAttention(nn.Module):
    """The parts of the attention in DeepSeek-V3's published code that the packed pass reads."""

    q_lora_rank: int | None
    kv_lora_rank: int
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    attention_dropout: float
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    rotary_emb: nn.Module
    o_proj: nn.Module


def _pack_attention(model: "PreTrainedModel") -> None:
    """Let the attention of DeepSeek-V3's published code attend within packed sequences, which Ulysses may share out.

    Raises: WrongInput if the code has other parts than expected.
    """
    layers = [
        module for module in model.get_submodule("language_model").modules() if hasattr(module, "kv_a_proj_with_mqa")
    ]
    for layer in layers:
        rotate = getattr(sys.modules[type(layer).__module__], "apply_rotary_pos_emb", None)
        missing = [name for name in _PARTS_OF_MLA if not hasattr(layer, name)]
        if missing or rotate is None:
            raise WrongInput(
                f"use_remove_padding=True: {type(layer).__name__}, from the repository of model.path, has no "
                f"{missing[0] if missing else 'apply_rotary_pos_emb'!r}: write False"
            )
        layer.__dict__ |= {_PLAIN: layer.forward, _ROTATE: rotate}
        layer.forward = MethodType(_packed_mla, layer)
    model.__dict__[_MLA_LAYERS] = layers
    inner = model.get_submodule("language_model.model")
    if hasattr(inner, "_use_flash_attention_2"):
        inner._use_flash_attention_2 = True  # type: ignore[assignment]  # then it makes no mask (T, T) for the whole row


def _packed_mla(
    self: _LatentAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_value: "Cache | None" = None,
    **options: Tensor | bool | None,
) -> tuple[Tensor, None, "Cache | None"]:
    """Attend within the packed sequences of the pass; the boundaries hold until the backward pass, which repeats this.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    packed: PackedSequences | None = self.__dict__.get(_PACKED)
    if packed is None:
        plain: tuple[Tensor, None, Cache | None] = self.__dict__[_PLAIN](
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **options,
        )
        return plain
    batch, length, _ = hidden_states.shape
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = query.view(batch, length, self.num_heads, -1).transpose(1, 2)
    q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
    k_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    cos, sin = self.rotary_emb(value, seq_len=packed.max_length)
    q_rope, k_rope = self.__dict__[_ROTATE](q_rope, k_rope.unsqueeze(1), cos, sin, position_ids)
    out, _ = varlen_attention_forward(
        self,
        torch.cat([q_nope, q_rope], dim=-1),
        torch.cat([k_nope, k_rope.expand_as(q_rope)], dim=-1),
        value,
        None,
        scaling=self.softmax_scale,
        dropout=self.attention_dropout if self.training else 0.0,
        packed_sequences=packed,
        is_causal=True,
    )
    return self.o_proj(out.flatten(2)), None, past_key_value
