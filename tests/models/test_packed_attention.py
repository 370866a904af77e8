"""Packed attention equals an explicit softmax over one sequence at a time."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from verl.models.transformers.attention import varlen_attention_forward
from verl.models.transformers.packed_sequences import PackedSequences

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def packed(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    return [
        torch.randn(1, heads, total, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def written_out(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    parts = []
    for q, k, v in zip(*(t[0].split(lengths, dim=1) for t in (query, key, value)), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
        at = torch.arange(q.shape[1])
        seen = at.unsqueeze(1) >= at
        if window is not None:
            seen &= at.unsqueeze(1) - at < window
        parts.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v)
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 5, 6, 7, 7, 20], [1, 1, 30, 2]])
def test_equals_attention_written_out(lengths: list[int], window: int | None) -> None:
    inputs = packed(lengths)
    sequences = PackedSequences(lengths, "cpu")
    out, _ = varlen_attention_forward(
        SimpleNamespace(is_causal=True), *inputs, None, scaling=WIDTH**-0.5, sliding_window=window,
        packed_sequences=sequences,
    )  # fmt: skip
    expected = written_out(*inputs, lengths, window)
    torch.testing.assert_close(out, expected)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    got = torch.autograd.grad((out * direction).sum(), inputs)
    for grad, expected_grad in zip(got, torch.autograd.grad((expected * direction).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_bounds_and_groups() -> None:
    sequences = PackedSequences([2, 2, 10, 11], "cpu")
    assert sequences.cu_seqlens.tolist() == [0, 2, 4, 14, 25] and sequences.max_length == 11
    first, second = sequences.padded_groups
    assert (first.start, first.stop, first.count, first.length, first.index) == (0, 4, 2, 2, None)
    assert second.count == 2 and second.index is not None
    assert second.index.tolist() == [*range(10), *range(11, 22)]


def test_features_that_the_kernels_lack_are_refused() -> None:
    with pytest.raises(ValueError, match="softcap.*use_remove_padding=False"):
        varlen_attention_forward(
            SimpleNamespace(is_causal=True),
            *packed([3]),
            None,
            softcap=30.0,
            packed_sequences=PackedSequences([3], "cpu"),
        )
    with pytest.raises(ValueError, match="'attention_mask' of SimpleNamespace"):
        mask = torch.zeros(1, 1, 3, 3)
        varlen_attention_forward(
            SimpleNamespace(is_causal=True), *packed([3]), mask, packed_sequences=PackedSequences([3], "cpu")
        )
