"""Attention over a forest equals attention under the dense mask, with its gradients."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.utils.batch.test_forest import build, random_texts
from verl.models.transformers import forest_attention as module
from verl.models.transformers.attention import packed_attention
from verl.models.transformers.forest_attention import forest_attention
from verl.models.transformers.packed_sequences import PackedSequences

HEADS, GROUPS, WIDTH = 4, 2, 16


def dense(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    at = torch.arange(len(query))
    sees = (at[None] <= at[:, None]) & (at[:, None] < packed.visible_until[None])
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return out[0].transpose(0, 1)


def inputs(tokens: int, dtype: torch.dtype, groups: int, value_width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (groups, WIDTH), (groups, value_width))
    drawn = [torch.randn(tokens, *size, generator=generator).to(dtype) for size in sizes]
    # As a model gives them: heads first, and no copy.
    return [part.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for part in drawn]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "dtype, groups, value_width, tolerance",
    [
        (torch.float64, GROUPS, WIDTH, 1e-6),  # the kernel's exponentials are those of fp32
        (torch.float32, HEADS, WIDTH, 1e-5),  # rounding of sums over at most 100 tokens
        (torch.float32, GROUPS, WIDTH - 4, 1e-5),
        (torch.bfloat16, GROUPS, WIDTH, 5e-2),  # 8 bits of mantissa
    ],
)
def test_outputs_and_gradients(seed: int, dtype: torch.dtype, groups: int, value_width: int, tolerance: float) -> None:
    forest = build(random_texts(seed, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)
    assert len(packed.prefixes) > 1
    scale = 0.3 if seed % 2 else None
    given = inputs(forest.num_tokens, dtype, groups, value_width)
    grad = torch.randn(forest.num_tokens, HEADS, value_width, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for attend in (packed_attention, dense):
        out = attend(*given, packed, scale)
        out.backward(grad)
        results.append([out.detach(), *(part.grad for part in given)])
        for part in given:
            part.grad = None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_blocks_of_the_mask() -> None:
    """``flex_attention``, which a GPU uses, with the same mask; torch has no gradient of it on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    forest = build(random_texts(3, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)
    with torch.no_grad():
        query, key, value = inputs(forest.num_tokens, torch.float32, GROUPS)
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        found = flex_attention(*parts, block_mask=packed.block_mask(), enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found, forest_attention(query, key, value, packed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_those_of_the_whole_mask(seed: int) -> None:
    """Blocks of 128 tokens by their ends, against those that torch finds in the mask of all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    drawn = random.Random(seed)
    forest = build(random_texts(seed, count=12, depth=5), min_shared=2)[0]
    factors = [drawn.choice((1, 20, 64, 128)) for _ in forest.lengths]
    lengths = [length * factor for length, factor in zip(forest.lengths, factors, strict=True)]
    at = dict(zip(itertools.accumulate(forest.lengths), itertools.accumulate(lengths), strict=True))
    packed = PackedSequences(lengths, "cpu", [at[end] for end in forest.ends])
    until = packed.visible_until
    expected = create_block_mask(
        lambda batch, head, at, seen: (seen <= at) & (at < until[seen]), None, None, *[len(until)] * 2, device="cpu"
    )
    found = packed.block_mask()
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.to_dense(), expected.to_dense())
    for row, count in enumerate(expected.full_kv_num_blocks[0, 0]):
        wholes = (each.full_kv_indices[0, 0, row, :count].sort().values for each in (found, expected))
        assert torch.equal(*wholes), row


def test_without_shared_tokens_nothing_changes() -> None:
    given = inputs(9, torch.float32, GROUPS)
    apart = PackedSequences([4, 5], "cpu", [4, 9])
    assert apart.prefixes == []
    assert torch.equal(packed_attention(*given, apart), packed_attention(*given, PackedSequences([4, 5], "cpu")))


# ---- flash attention with boundaries, whose kernels need a GPU: a CPU gets a stand-in for their arithmetic


def assert_as_registered(found: tuple[Tensor, ...], operator: Any, *given: Any, **named: Any) -> None:
    """Hold results to the shapes and dtypes that torch registers for the kernel."""
    on_meta = [each.to("meta") if isinstance(each, Tensor) else each for each in given]
    for result, expected in zip(found, operator(*on_meta, **named), strict=False):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


def weights_of(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scaled products of a sequence, (H, q, k)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    products = scale * torch.einsum("qhd,khd->hqk", query, key)
    hidden = ~torch.ones(len(query), len(key)).bool().tril(len(key) - len(query))  # the last query sees the last key
    return products.masked_fill(hidden, -torch.inf) if causal else products


def check_boundaries(query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> None:
    """What the kernels ask of their arguments, and do not find out: rows outside of boundaries are not read."""
    for rows, offsets, most in zip((query, key), bounds, longest, strict=True):
        assert offsets.dtype == torch.int32 and offsets.is_contiguous()
        assert offsets[0] == 0 and offsets[-1] == len(rows)
        assert int(offsets.diff().min()) > 0 and int(offsets.diff().max()) == most
        assert rows.stride(-1) == 1 and rows.shape[-1] % 8 == 0
    assert len(bounds[0]) == len(bounds[1]) and query.shape[1] % key.shape[1] == 0


def stand_in_forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int,
    dropout: float, causal: bool, debug: bool, *, scale: float, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout == 0 and not debug and not any(rest.values())
    check_boundaries(query, key, (queries, keys), (most_queries, most_keys))
    out, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for at in range(len(queries) - 1):
        here, there = slice(*queries[at : at + 2].tolist()), slice(*keys[at : at + 2].tolist())
        products = weights_of(query[here].float(), key[there].float(), causal, scale)
        sums[:, here] = products.logsumexp(-1)
        values = value[there].float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out[here] = torch.einsum("hqk,khd->qhd", products.softmax(-1), values).to(query.dtype)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)
    return out, sums, *state


def stand_in_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, queries: Tensor, keys: Tensor,
    most_queries: int, most_keys: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
    **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of attention from its output and sums, as the kernel computes it (arXiv:2205.14135, algorithm 4)."""
    assert dropout == 0 and not any(rest.values())
    check_boundaries(query, key, (queries, keys), (most_queries, most_keys))
    assert sums.shape == (query.shape[1], len(query)) and sums.dtype == torch.float32 and sums.is_contiguous()
    assert grad.dtype == out.dtype == query.dtype and grad.shape == out.shape == query.shape
    assert state.dtype == torch.uint64
    grouped = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
    for at in range(len(queries) - 1):
        here, there = slice(*queries[at : at + 2].tolist()), slice(*keys[at : at + 2].tolist())
        q, k, v, o, g = (part.float() for part in (query[here], key[there], value[there], out[here], grad[here]))
        shares = (weights_of(q, k, causal, scale) - sums[:, here].unsqueeze(-1)).exp()
        of_shares = torch.einsum("qhd,khd->hqk", g, v.repeat_interleave(grouped, dim=1))
        of_products = scale * shares * (of_shares - torch.einsum("qhd,qhd->hq", g, o).unsqueeze(-1))
        grads[0][here] = torch.einsum("hqk,khd->qhd", of_products, k.repeat_interleave(grouped, dim=1))
        of_key, of_value = torch.einsum("hqk,qhd->khd", of_products, q), torch.einsum("hqk,qhd->khd", shares, g)
        for whole, part in zip(grads[1:], (of_key, of_value), strict=True):
            whole[there] = part.unflatten(1, (-1, grouped)).sum(2)
    return tuple(each.to(query.dtype) for each in grads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Register the stand-ins for a CPU, so that torch holds the calls to the schemas; return the names of the calls."""
    made: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def register(name: str, compute: Any) -> None:
        operator = getattr(torch.ops.aten, name)

        def run(*given: Any, **named: Any) -> tuple[Tensor, ...]:
            made.append(name)
            found: tuple[Tensor, ...] = compute(*given, **named)
            assert_as_registered(found[:2] if "forward" in name else found, operator, *given, **named)
            return found

        library.impl(name, run, "CPU")

    register("_flash_attention_forward", stand_in_forward)
    register("_flash_attention_backward", stand_in_backward)
    yield made
    library._destroy()


@pytest.mark.parametrize("kernel", [module._ByDepth, module._ByPath])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "dtype, groups, value_width, tolerance",
    [
        (torch.float32, HEADS, WIDTH, 1e-5),  # rounding of sums over at most 100 tokens
        (torch.float32, GROUPS, WIDTH - 4, 1e-5),
        (torch.bfloat16, GROUPS, WIDTH, 5e-2),  # 8 bits of mantissa
    ],
)
def test_the_calls_of_a_gpu(
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kernel: type,
    seed: int,
    dtype: torch.dtype,
    groups: int,
    value_width: int,
    tolerance: float,
) -> None:
    """One call for all nodes and one for each depth, whose results are merged; or one with the keys of paths."""
    monkeypatch.setattr(module, "_kernel_for", lambda *given: kernel())
    forest = build(random_texts(seed, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)
    given = inputs(forest.num_tokens, dtype, groups, value_width)
    grad = torch.randn(forest.num_tokens, HEADS, value_width, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for attend in (packed_attention, dense):
        out = attend(*given, packed, 0.3)
        out.backward(grad)
        results.append([out.detach(), *(part.grad for part in given)])
        for part in given:
            part.grad = None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    once = 1 if kernel is module._ByPath else 1 + len(packed.levels)
    assert calls == ["_flash_attention_forward"] * once + ["_flash_attention_backward"] * once


def test_levels() -> None:
    """Two roots, of which the first has a node with leaves below it, and a third without others."""
    packed = PackedSequences([3, 2, 1, 4, 2, 5, 1, 6], "cpu", [12, 10, 6, 10, 12, 18, 18, 24])
    first, second = packed.levels
    assert first.queries.tolist() == [*range(3, 12), 17] and first.keys.tolist() == [*range(3), *range(12, 17)]
    assert first.query_bounds.tolist() == [0, 9, 10] and first.key_bounds.tolist() == [0, 3, 8]
    assert (first.max_queries, first.max_keys) == (9, 5)
    assert (second.queries, second.keys) == (slice(5, 10), slice(3, 5))


def test_paths() -> None:
    """The trees of above: each node sees what the mask shows to its last token, and places are where copies stand."""
    packed = PackedSequences([3, 2, 1, 4, 2, 5, 1, 6], "cpu", [12, 10, 6, 10, 12, 18, 18, 24])
    paths = packed.paths
    at = torch.arange(24)
    sees = (at[None] <= at[:, None]) & (at[:, None] < packed.visible_until[None])
    last = torch.tensor(packed.lengths).cumsum(0) - 1
    assert paths.keys.tolist() == [token for node in last for token in sees[node].nonzero().flatten().tolist()]
    assert paths.key_bounds.diff().tolist() == packed.path_lengths == [3, 5, 6, 9, 5, 5, 6, 6]
    assert paths.query_bounds.diff().tolist() == packed.lengths
    assert (paths.max_queries, paths.max_keys) == (6, 9)
    assert paths.keys[paths.places].tolist() == at.repeat_interleave(paths.place_bounds.diff()).tolist()


@pytest.mark.parametrize("kernel", [module._ByDepth(), module._ByPath()])
def test_no_data_is_read(kernel: Any) -> None:
    """With tensors that have none: the calls of a GPU wait for nothing, and results are as torch registers them."""
    forest = build(random_texts(3, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)

    def moved(each: Any) -> Any:
        return each.to("meta") if isinstance(each, Tensor) else each

    paths, *levels = [
        type(each)(**{field.name: moved(getattr(each, field.name)) for field in fields(each)})
        for each in (packed.paths, *packed.levels)
    ]
    packed.__dict__.update(levels=levels, paths=paths, cu_seqlens=moved(packed.cu_seqlens))
    sizes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH))
    given = [torch.empty(forest.num_tokens, *size, device="meta", dtype=torch.bfloat16) for size in sizes]
    context = SimpleNamespace(save_for_backward=lambda *kept: setattr(context, "saved_tensors", kept))
    out = module._Merged.forward(context, *given, packed, 0.3, kernel)
    found = module._Merged.backward(context, torch.empty_like(out))
    for part, expected in zip((out, *found), given[:1] + given, strict=False):
        assert (part.shape, part.dtype, part.device) == (expected.shape, expected.dtype, expected.device)


@pytest.mark.parametrize(
    "device, dtype, width, capability, hip, kernel",
    [
        ("cpu", torch.float32, 12, None, None, "_OnCpu"),
        ("cuda", torch.bfloat16, 128, (8, 0), None, "_ByPath"),
        ("cuda", torch.float16, 256, (9, 0), None, "_ByPath"),
        ("cuda", torch.float32, 128, (9, 0), None, "NoneType"),
        ("cuda", torch.bfloat16, 128, (7, 5), None, "NoneType"),
        ("cuda", torch.bfloat16, 264, (9, 0), None, "NoneType"),
        ("cuda", torch.bfloat16, 60, (9, 0), None, "NoneType"),
        ("cuda", torch.bfloat16, 128, (9, 0), "6.4", "NoneType"),
        ("meta", torch.bfloat16, 128, None, None, "NoneType"),
    ],
)
def test_the_kernel_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    width: int,
    capability: tuple[int, int] | None,
    hip: str | None,
    kernel: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        query = torch.empty(4, HEADS, width, device=device, dtype=dtype)
        packed = PackedSequences([2, 1, 1], device, [4, 3, 4])
        assert type(module._kernel_for(query, query, packed)).__name__ == kernel


@pytest.mark.parametrize(
    "prompt, samples, groups, kernel",
    [
        (256, 8, 8, "_ByPath"),
        (4096, 8, 2, "_ByPath"),
        (4096, 8, 16, "_ByDepth"),  # 6.3 copies of 16 heads
        (4096, 32, 1, "_ByDepth"),  # 11.7 copies
    ],
)
def test_long_prompts_are_not_copied_too_often(
    monkeypatch: pytest.MonkeyPatch, prompt: int, samples: int, groups: int, kernel: str
) -> None:
    """Samples have 256 tokens."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    tokens = prompt + samples * 256
    packed = PackedSequences([prompt, *[256] * samples], "cuda", [tokens, *range(prompt + 256, tokens + 1, 256)])
    with FakeTensorMode():
        query, key = (torch.empty(tokens, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, groups))
        assert type(module._kernel_for(query, key, packed)).__name__ == kernel
