"""Between batches that are padded on both sides and jagged ones without padding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input
from verl.workers.engine.micro_batch import response_mask_of


def left_right_2_no_padding(data: DataProto) -> DataProto:
    """Replace ``input_ids`` and ``position_ids`` (B, L) by jagged tensors, in place, and add a jagged ``loss_mask``.

    ``loss_mask`` marks the response tokens that count. Where everything was is kept: ``indices`` as the places in
    (B * L), of each row, and in ``meta_info`` ``max_seq_len`` and ``max_response_len``.

    Raises: ValueError when a row has no token.
    """
    batch = data.batch
    attention = batch["attention_mask"]
    if not bool(attention.any(dim=-1).all()):
        empty = int((~attention.bool().any(dim=-1)).nonzero()[0])
        raise ValueError(f"attention_mask leaves no token in row {empty}: drop the row")
    length, width = attention.shape[1], batch["responses"].shape[1]
    _, indices, offsets, _, _ = unpad_input(attention.unsqueeze(-1), attention)
    loss_mask = F.pad(response_mask_of(data), (length - width, 0))
    for name, tensor in (
        ("input_ids", batch["input_ids"]),
        ("position_ids", batch["position_ids"]),
        ("loss_mask", loss_mask),
        ("indices", torch.arange(attention.numel(), device=attention.device).view_as(attention)),
    ):
        batch[name] = torch.nested.nested_tensor_from_jagged(
            index_first_axis(tensor.flatten(), indices), offsets.long()
        )
    data.meta_info.update(max_seq_len=length, max_response_len=width)
    return data


def no_padding_2_padding(nested: Tensor, data: DataProto) -> Tensor:
    """Return what a model gave for every token of a jagged batch, shifted to the tokens predicted, as (B, R).

    Value ``t`` of a row belongs to token ``t + 1``, as log-probabilities do; it is zero where ``loss_mask`` is.
    """
    batch, meta = data.batch, data.meta_info
    length, width = meta["max_seq_len"], meta["max_response_len"]
    places, loss_mask = batch["indices"].values(), batch["loss_mask"].values()
    rows = len(batch["indices"].offsets()) - 1
    padded = pad_input(nested.values(), places, rows, length)
    kept = pad_input(loss_mask.to(padded.dtype), places, rows, length)
    return padded[:, length - width - 1 : -1] * kept[:, -width:]
