"""Convert between batches padded on both sides and jagged batches without padding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.protocol import DataProto, tensors_of
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input
from verl.workers.engine.passes import response_mask_of


def left_right_2_no_padding(data: DataProto) -> DataProto:
    """Replace ``input_ids`` and ``position_ids`` (B, L) by jagged tensors, in place, and add a jagged ``loss_mask``.

    ``loss_mask`` marks the response tokens that count. ``indices`` keeps the places of the tokens in (B * L), and
    ``meta_info`` the widths ``max_seq_len`` and ``max_response_len``.

    Raises: ValueError when a row has no token.
    """
    batch = tensors_of(data)
    attention = batch["attention_mask"]
    if not bool(attention.any(dim=-1).all()):
        empty = int((~attention.bool().any(dim=-1)).nonzero()[0])
        raise ValueError(f"attention_mask leaves no token in row {empty}: drop the row")
    length = attention.shape[1]
    width = batch["responses"].shape[1]
    _, indices, offsets, _, _ = unpad_input(attention.unsqueeze(-1), attention)
    for name, value in (
        ("input_ids", batch["input_ids"]),
        ("position_ids", batch["position_ids"]),
        ("loss_mask", F.pad(response_mask_of(data), (length - width, 0))),
        ("indices", torch.arange(attention.numel(), device=attention.device).view_as(attention)),
    ):
        batch[name] = torch.nested.nested_tensor_from_jagged(index_first_axis(value.flatten(), indices), offsets.long())
    data.meta_info.update(max_seq_len=length, max_response_len=width)
    return data


def no_padding_2_padding(nested: Tensor, data: DataProto) -> Tensor:
    """Return per-token outputs of a model for a jagged batch as (B, R), zero outside ``loss_mask``.

    Output ``t`` of a row belongs to token ``t + 1``, which it predicts.
    """
    batch = tensors_of(data)
    length: int = data.meta_info["max_seq_len"]
    width: int = data.meta_info["max_response_len"]
    places = batch["indices"].values()
    loss_mask = batch["loss_mask"].values()
    rows = batch["indices"].shape[0]
    padded = pad_input(nested.values(), places, rows, length)
    kept = pad_input(loss_mask.to(padded.dtype), places, rows, length)
    return padded[:, length - width - 1 : -1] * kept[:, -width:]
