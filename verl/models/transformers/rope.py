"""RoPE by row: frequencies that depend on the length of a row, and attention temperatures that depend on the position.

For the types ``dynamic`` and ``longrope`` transformers chooses the frequencies once for all rows of a pass, by the
longest one, and keeps the choice for later passes (``dynamic_rope_update``). With this module each row gets the
frequencies that it would get alone. Or all rows get the frequencies of one length, like a generation engine that uses
one length for the whole run.

Works with transformers 5.16 to 5.19. Remove this module when transformers chooses row by row and accepts the length of
a run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.models.transformers.names import LENGTH_ROPES
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHARED_ROPE = (
    "needs positions that do not depend on the length of a row, those of RoPE scaling of type dynamic or longrope do: "
    "write false"
)
"""Why rows that choose by themselves cannot share tokens, as the end of a sentence about the key."""
_FORWARD = "forward"
_POSITIONS = "_verl_positions"
"""Attribute of an attention layer: the positions of the tokens of its last pass."""


class RowRope:
    """The lengths that select the RoPE frequencies of a model.

    Attributes:
        length: the length for all rows; None if each row uses its own.
        pretrained: the longest row that uses the frequencies of the pretraining.
        switches: whether all longer rows share one other set of frequencies (``longrope``), not one for each length.
    """

    def __init__(self) -> None:
        self.length: int | None = None
        self.pretrained = 0
        self.switches = False
        self._rows: Tensor | None = None

    @contextmanager
    def rows(self, lengths: Tensor) -> Iterator[None]:
        """Let passes inside the context choose frequencies by ``lengths`` (b, L), the row length of each token."""
        self._rows = lengths
        try:
            yield
        finally:
            self._rows = None

    def of(self, positions: Tensor) -> Tensor:
        """Return the lengths (b, L) for positions (..., b, L); without ``rows`` they follow from the positions."""
        shape = positions.shape[-2:]
        if self.length is not None:
            return torch.full(shape, self.length, device=positions.device)
        if self._rows is not None:
            return self._rows.to(positions.device).expand(shape)
        return (positions.reshape(-1, *shape).amax(dim=(0, 2)) + 1)[:, None].expand(shape)


def row_lengths(positions: Tensor, attended: Tensor) -> Tensor:
    """Return for each token of padded rows the length of its row: the last attended position plus 1.

    Args: positions are (b, L) or (C, b, L), ``attended`` is (b, L). Returns: (b, L).
    """
    last = positions.reshape(-1, *attended.shape).amax(0).masked_fill(attended == 0, 0).amax(-1, keepdim=True)
    return (last + 1).expand(attended.shape)


def packed_row_lengths(positions: Tensor, lengths: list[int]) -> Tensor:
    """Return the row length of each token in packed rows with these lengths: (1, T) for positions (..., 1, T)."""
    flat = positions.reshape(-1, positions.shape[-1]).amax(0)
    counts = torch.tensor(lengths, device=flat.device)
    row = torch.arange(len(lengths), device=flat.device).repeat_interleave(counts, output_size=len(flat))
    last = flat.new_zeros(len(lengths)).scatter_reduce(0, row, flat, "amax")
    return (last + 1)[row].unsqueeze(0)


def has_length_rope(config: "PretrainedConfig") -> bool:
    """Return whether the language model of a configuration has a type whose frequencies depend on the length."""
    found = getattr(config.get_text_config(), "rope_parameters", None)
    parameters: Mapping[str, Json] = found if isinstance(found, Mapping) else {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, Mapping))]
    return any(each.get("rope_type", each.get("type")) in LENGTH_ROPES for each in kinds)


def foreign_rope(config: "PretrainedConfig") -> str:
    """Return why the frequencies of a model cannot be chosen by row, as the end of a sentence about its path."""
    return (
        f"model_type={config.model_type!r}: its code computes RoPE scaling of type dynamic or longrope otherwise than "
        "transformers, so a row would depend on the others of its pass: write another rope_type into override_config"
    )


def install_row_rope(model: nn.Module, length: int | None = None) -> RowRope | None:
    """Let the RoPE of a model choose frequencies by row, or by one length; None if they do not depend on the length.

    A model that already has a ``RowRope`` keeps it, and gets the ``length``.
    """
    found = row_rope_of(model) or RowRope()
    found.length = length
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            if kind not in LENGTH_ROPES:
                continue
            found.pretrained = _pretrained(module, kind, layer_type)
            found.switches = kind == "longrope"
            if _FORWARD not in vars(module):
                setattr(module, _FORWARD, partial(_forward, module, found))
    return found if found.pretrained else None


def row_rope_of(model: nn.Module) -> RowRope | None:
    """Return the row rope that ``install_row_rope`` put into a model."""
    replaced = (vars(module).get(_FORWARD) for module in model.modules())
    return next((each.args[1] for each in replaced if isinstance(each, partial) and each.func is _forward), None)


def _kinds(module: nn.Module) -> Mapping[str | None, str | None]:
    """Return the types of a module of rotary positions, by kind of layer; None stands for all layers."""
    kinds = getattr(module, "rope_type", None)
    if not hasattr(module, "rope_type") or not hasattr(module, "config"):
        return {}
    return kinds if isinstance(kinds, Mapping) else {None: kinds}


def _forward(
    rotary: nn.Module, rows: RowRope, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Compute rotary angles by one call of the module for each group of rows with equal frequencies.

    A call has one position more, the last one of the length by which the group chooses.
    """
    kinds = _kinds(rotary)
    kind = kinds.get(layer_type, kinds.get(None))
    options = {} if layer_type is None else {"layer_type": layer_type}
    own = partial(type(rotary).forward, rotary)
    if kind not in LENGTH_ROPES:
        return own(x, position_ids, **options)
    shape = position_ids.shape[-2:]
    lengths = rows.of(position_ids)
    if rows.length is None:  # positions may continue into the padding of a row
        position_ids = torch.minimum(position_ids, lengths - 1)
    flat = position_ids.flatten(-2).unsqueeze(-2)  # (..., 1, b L)
    chosen = _choices(rotary, kind, layer_type, lengths).flatten()
    joined: list[Tensor] = []
    is_tensor = False
    for length in sorted(set(chosen.tolist())):
        at = (chosen == length).nonzero().squeeze(1)
        last = flat.new_full((*flat.shape[:-1], 1), length - 1)
        _forget(rotary, kind, layer_type)
        found = own(x, torch.cat([flat[..., at], last], dim=-1), **options)
        is_tensor = isinstance(found, Tensor)
        parts = [part[..., :-1, :] for part in ((found,) if is_tensor else found)]
        joined = joined or [part.new_zeros((*part.shape[:-2], flat.shape[-1], part.shape[-1])) for part in parts]
        joined = [whole.index_copy(-2, at, part) for whole, part in zip(joined, parts, strict=True)]
    _forget(rotary, kind, layer_type)
    whole = tuple(each.squeeze(-3).reshape(*each.shape[:-3], *shape, each.shape[-1]) for each in joined)
    return whole[0] if is_tensor else whole


def _choices(rotary: nn.Module, kind: str, layer_type: str | None, lengths: Tensor) -> Tensor:
    """Map row lengths to representatives: rows with the same frequencies get the same length."""
    pretrained = _pretrained(rotary, kind, layer_type)
    if kind == "dynamic":
        return lengths.clamp(min=pretrained)
    return torch.where(lengths > pretrained, pretrained + 1, pretrained)


def _pretrained(rotary: Any, kind: str, layer_type: str | None) -> int:
    """Return the longest row that uses the frequencies of the pretraining."""
    if kind == "dynamic":
        return int(rotary.original_max_seq_len)
    parameters = rotary.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return int(parameters["original_max_position_embeddings"])


def _forget(rotary: Any, kind: str, layer_type: str | None) -> None:
    """Undo the choice of frequencies that transformers keeps from the previous pass."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    if kind == "dynamic":
        setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
        frequencies = getattr(rotary, f"{prefix}original_inv_freq")
        rotary.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    elif layer_type is not None and hasattr(rotary, f"{prefix}long_inv_freq"):
        delattr(rotary, f"{prefix}long_inv_freq")


# ---- attention temperatures


def install_row_temperature(model: nn.Module) -> None:
    """Let layers whose attention sharpens along a row (Llama 4) count the positions of each row.

    transformers counts the columns of a pass, with the padding and the rows before. The layers have no rotary positions
    and no norm behind their queries, so the projection of the queries can give the temperature.
    """
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True):
            attention.attn_temperature_tuning = False
            layer.register_forward_pre_hook(_keep_positions, with_kwargs=True)
            attention.q_proj.register_forward_hook(partial(_sharpen, attention))


def _keep_positions(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    """Store the positions of a pass, or of the part that the backward pass recomputes."""
    layer.self_attn.__dict__[_POSITIONS] = kwargs["position_ids"]


def _sharpen(attention: Any, projection: nn.Module, args: tuple[Tensor, ...], query: Tensor) -> Tensor:
    """Multiply queries (b, L, ...) by the temperature at their positions.

    Source: scalable softmax (arXiv:2501.19399), with the steps of Llama 4.
    """
    step = torch.floor((attention.__dict__[_POSITIONS].float() + 1.0) / attention.floor_scale)
    scale = torch.log1p(step) * attention.attn_scale + 1.0
    return (query * scale.unsqueeze(-1)).to(query.dtype)
