"""Check a model with remote code before it trains: its attention must tell sequences apart."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.errors import WrongInput
from verl.protocol import DataProto

_TOLERANCE = 0.1
"""Share of the effect of a sequence's own first token that its neighbour may have: 1 and more if attention sees it,
0 in fp32 and rounding in bf16 if it does not.
"""


def check_remote_code(model: Any, infer: Callable[[DataProto], Tensor], packed: bool, sp_size: int) -> None:
    """Run a sequence with two different neighbours, and with another first token.

    The neighbour is the sequence before it in the pack, or the padding before it in a padded row. The neighbour must
    not change the result, and the first token must change it, also if Ulysses ranks share the sequence. All ranks take
    part.

    Args:
        model: the transformers model.
        infer: returns the outputs (B, R) of the engine for a batch.
        packed: whether the engine packs sequences.
        sp_size: number of Ulysses ranks that share a sequence.

    Raises: WrongInput when the remote code does otherwise.
    """
    vocab_size = model.config.get_text_config().vocab_size
    size = 2 * sp_size  # the ranks get 8 tokens each, and the long sequence is on all of them
    tokens = torch.randint(vocab_size, (6 * size,), generator=torch.Generator().manual_seed(0)) % vocab_size
    sequence = tokens[: 3 * size]
    neighbours = tokens[3 * size : 5 * size].view(2, size)
    other = sequence.clone()
    other[0] = tokens[-1] if tokens[-1] != sequence[0] else (tokens[-1] + 1) % vocab_size
    build = _packed if packed else _padded
    plain, moved, changed = (
        infer(build(own, neighbour))[-1].float()
        for own, neighbour in ((sequence, neighbours[0]), (sequence, neighbours[1]), (other, neighbours[0]))
    )
    own_effect = (changed - plain)[-size:].abs().max()
    leak = (moved - plain).abs().max()
    name = type(model).__name__
    key = f"use_remove_padding={packed}"
    if not own_effect > 0:
        raise WrongInput(
            f"{key}, ulysses_sequence_parallel_size={sp_size}: in {name}, from the repository of "
            "model.path, the first token of a sequence does not reach its last ones: write "
            "ulysses_sequence_parallel_size=1, or use_remove_padding=False"
        )
    if leak > _TOLERANCE * own_effect:
        what = "sequences that are packed one after another" if packed else "the padding before a sequence"
        raise WrongInput(
            f"{key}: the attention of {name}, from the repository of model.path, sees {what}: outputs of a sequence "
            f"change by {leak:.2g} with its neighbour, and by {own_effect:.2g} with its own first token. "
            f"Write use_remove_padding={not packed}"
        )


def _packed(sequence: Tensor, neighbour: Tensor) -> DataProto:
    """Return two test rows; the engine packs the shorter one first."""
    ids = torch.zeros(2, len(sequence), dtype=torch.long)
    ids[0, : len(neighbour)] = neighbour
    ids[1] = sequence
    attention = torch.ones_like(ids)
    attention[0, len(neighbour) :] = 0
    return _rows(ids, attention)


def _padded(sequence: Tensor, neighbour: Tensor) -> DataProto:
    """Return a row with the neighbour as padding."""
    ids = torch.cat([neighbour, sequence]).unsqueeze(0)
    return _rows(ids, (torch.arange(ids.shape[1]) >= len(neighbour)).long().unsqueeze(0))


def _rows(ids: Tensor, attention: Tensor) -> DataProto:
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    tensors = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    mask = attention[:, 1:] * attention[:, :-1]  # a token after another one of its sequence
    return DataProto.from_dict(tensors | {"responses": ids[:, 1:], "response_mask": mask})
