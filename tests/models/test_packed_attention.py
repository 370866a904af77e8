"""Packed attention equals an explicit softmax over one sequence at a time.

The comparison is in float64, where sums in another order differ by less than the default tolerance of 1e-7.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from verl.models.transformers import attention_terms
from verl.models.transformers.attention import LocalMask, varlen_attention_forward
from verl.models.transformers.attention_terms import Terms
from verl.models.transformers.packed_sequences import PackedSequences

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def packed(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    return [
        torch.randn(1, heads, total, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    window: int | None = None,
    chunk: int | None = None,
    terms: Terms = Terms(),  # noqa: B008 (immutable)
) -> Tensor:
    """Return the softmax of each query's logits, one after another."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    rows = []
    for q, k, v in zip(*(t[0].split(lengths, dim=1) for t in (query, key, value)), strict=True):
        for at in range(q.shape[1]):
            first = 0 if window is None else max(0, at - window + 1)
            first = first if chunk is None else at // chunk * chunk
            seen = slice(first, at + 1)
            logits = (k[:, seen] @ q[:, at, :, None])[..., 0] / math.sqrt(WIDTH)
            if terms.softcap is not None:
                logits = terms.softcap * (logits / terms.softcap).tanh()
            weights = logits.exp()
            total = weights.sum(-1) if terms.sinks is None else weights.sum(-1) + terms.sinks.exp()
            rows.append(((weights / total[:, None])[..., None] * v[:, seen]).sum(1))
    return torch.stack(rows).unsqueeze(0)


def directed(out: Tensor) -> Tensor:
    """Return a sum of which every element has another gradient."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    local=st.sampled_from([LocalMask(), LocalMask(window=3), LocalMask(chunk=4)]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
)
def test_windows_chunks_caps_and_sinks(
    lengths: list[int], local: LocalMask, softcap: float | None, has_sinks: bool
) -> None:
    inputs = packed(lengths)
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_() if has_sinks else None
    leaves = inputs if sinks is None else [*inputs, sinks]
    expected = written_out(*inputs, lengths, local.window, local.chunk, Terms(softcap, sinks))
    out, _ = varlen_attention_forward(
        SimpleNamespace(is_causal=True), *inputs, local, softcap=softcap, s_aux=sinks,
        packed_sequences=PackedSequences(lengths, "cpu"),
    )  # fmt: skip
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if softcap or has_sinks else {}  # these weights are in float32
    torch.testing.assert_close(out, expected, **tolerance)
    found = torch.autograd.grad(directed(out), leaves)
    for grad, other in zip(found, torch.autograd.grad(directed(expected), leaves), strict=True):
        torch.testing.assert_close(grad, other, **tolerance)


@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_computes_caps_and_sinks(window: int | None) -> None:
    """A GPU runs the same call compiled."""
    lengths = [5, 140, 60]
    inputs = [each.detach() for each in packed(lengths)]
    terms = Terms(0.7, torch.linspace(-1, 2, HEADS, dtype=torch.float64))
    mask = PackedSequences(lengths, "cpu").block_mask(window)
    with torch.no_grad():
        found = attention_terms._flex_by(flex_attention, *inputs, mask, terms, None)
        torch.testing.assert_close(
            found.transpose(1, 2), written_out(*inputs, lengths, window, terms=terms), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("packs", [True, False])
def test_one_sequence_without_padding(packs: bool) -> None:
    """A local layer of a model that is called without mask sees no more than its window."""
    inputs = packed([9])
    options = {"packed_sequences": PackedSequences([9], "cpu")} if packs else {}
    module = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS)
    for local, terms in ((LocalMask(window=3), Terms(0.7)), (LocalMask(chunk=4), Terms()), (None, Terms(0.7))):
        out, _ = varlen_attention_forward(module, *inputs, local, softcap=terms.softcap, **options)
        given = (None, None) if local is None else (local.window, local.chunk)
        torch.testing.assert_close(out, written_out(*inputs, [9], *given, terms), atol=1e-5, rtol=1e-5)


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
    got = torch.autograd.grad(directed(out), inputs)
    for grad, expected_grad in zip(got, torch.autograd.grad(directed(expected), inputs), strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_bounds_and_groups() -> None:
    sequences = PackedSequences([2, 2, 10, 11], "cpu")
    assert sequences.cu_seqlens.tolist() == [0, 2, 4, 14, 25] and sequences.max_length == 11
    first, second = sequences.padded_groups
    assert (first.start, first.stop, first.count, first.length, first.index) == (0, 4, 2, 2, None)
    assert second.count == 2 and second.index is not None
    assert second.index.tolist() == [*range(10), *range(11, 22)]


def test_features_that_the_kernels_lack_are_refused() -> None:
    with pytest.raises(ValueError, match="position_bias.*use_remove_padding=False"):
        varlen_attention_forward(
            SimpleNamespace(is_causal=True),
            *packed([3]),
            None,
            position_bias=torch.zeros(1, HEADS, 3, 3),
            packed_sequences=PackedSequences([3], "cpu"),
        )
    with pytest.raises(ValueError, match="'attention_mask' of SimpleNamespace"):
        mask = torch.zeros(1, 1, 3, 3)
        varlen_attention_forward(
            SimpleNamespace(is_causal=True), *packed([3]), mask, packed_sequences=PackedSequences([3], "cpu")
        )
