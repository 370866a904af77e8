"""The lengths of the rows of a batch."""

import torch
from torch import Tensor

from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import is_lazy

PROMPT_LENGTH = "__prompt_length__"
RESPONSE_LENGTH = "__response_length__"
"""Arrays (B,) of a batch with columns by reference: attended tokens of prompt and response."""


def lengths_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the attended tokens of prompt and response of each row, (B,), without reading a column by reference."""
    columns = batch.non_tensor_batch
    if RESPONSE_LENGTH in columns and is_lazy(batch):
        return torch.from_numpy(columns[PROMPT_LENGTH]), torch.from_numpy(columns[RESPONSE_LENGTH])
    attended = tensors_of(batch)["attention_mask"]
    width = tensors_of(batch)["responses"].shape[-1]
    return attended[:, :-width].sum(-1), attended[:, -width:].sum(-1)
