"""The entropy in chunks, against the plain form in float64, by gradcheck, and by what it allocates."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from verl.utils.numerics import entropy as module
from verl.utils.numerics import host_memory
from verl.utils.numerics.entropy import entropy, plain_entropy
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

WEIGHTS = torch.linspace(-1, 1, 15).view(3, 5).double()


def _both(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the entropy and the gradient of a weighted sum, and those of the plain form in float64."""
    exact = logits.detach().double().requires_grad_()
    want = plain_entropy(exact)
    leaf = logits.detach().clone().requires_grad_()
    got = entropy(leaf, **options)
    (wanted_grad,) = torch.autograd.grad((want * WEIGHTS).sum(), exact)
    (grad,) = torch.autograd.grad((got.double() * WEIGHTS).sum(), leaf)
    assert got.dtype == torch.promote_types(logits.dtype, torch.float32) and grad.dtype == logits.dtype
    return got.detach().double(), grad.double(), want.detach(), wanted_grad


@pytest.mark.parametrize("chunk_size", [None, 4, 1])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_equals_the_plain_form(chunk_size: int | None, shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, 37, generator=generator, dtype=torch.float64) + shift
    # Rounding a result to fp32 or bfloat16 costs half a unit of its last place; the rest is the sum over 37 terms.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        got, grad, want, wanted_grad = _both(logits.to(dtype), chunk_size=chunk_size)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        of_grad = max(tolerance, torch.finfo(dtype).eps)
        torch.testing.assert_close(grad, wanted_grad, atol=2 * of_grad, rtol=2 * of_grad)


def test_gradients_of_first_and_second_order() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entropy(x, 3), (logits,))
    assert torch.autograd.gradgradcheck(lambda x: entropy(x, 3), (logits,))


def test_masked_and_extreme_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [1e4, -1e4, 0.0], [5.0, -torch.inf, -torch.inf]])
    leaf = logits.clone().requires_grad_()
    result = entropy(leaf)
    p = torch.tensor([0.0, 1.0]).softmax(0)
    want = torch.tensor([-(p * p.log()).sum(), 0.0, 0.0])
    torch.testing.assert_close(result.detach(), want)
    result.sum().backward()
    exact = logits.clone().requires_grad_()
    plain_entropy(exact[:, :2]).sum().backward()  # without the masked column
    assert leaf.grad is not None and exact.grad is not None
    torch.testing.assert_close(leaf.grad[0], exact.grad[0])
    # The exact gradient is 0. The largest logit's exponent is 0 up to the rounding of 1e4 / ln 2, at most 5e-4, and the
    # gradient is a difference of two terms of that size, each rounded to 2^-24 of it.
    assert leaf.grad[1:].abs().max() < 2 * 2**-24 * 5e-4
    for broken in (torch.nan, torch.inf):
        assert entropy(torch.tensor([[0.0, broken]])).isnan().all() and plain_entropy(torch.tensor([[broken]])).isnan()


def test_a_second_backward_pass_and_rows_masked_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK_ELEMENTS", 9)  # a chunk is a row
    leaf = torch.randn(15, 9, generator=torch.Generator().manual_seed(3)).view(3, 5, 9)
    leaf[1, 2, 4:] = -torch.inf
    leaf[2, 0, :3] = torch.finfo(torch.float32).min
    exact = leaf.double().requires_grad_()
    want = plain_entropy(exact)
    (want * WEIGHTS).nansum().backward()
    leaf.requires_grad_()
    result = entropy(leaf)
    torch.testing.assert_close(result.double(), want, atol=1e-6, rtol=1e-6)
    first, second = (torch.autograd.grad((result * WEIGHTS).sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    finite = exact.grad.isfinite()  # the plain form gives NaN where a logit is minus infinity
    torch.testing.assert_close(first.double()[finite], exact.grad[finite], atol=1e-6, rtol=1e-6)
    assert not first.isnan().any() and first[1, 2, 4:].abs().max() == 0


def test_shapes_and_established_names() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 4, 11, generator=generator)
    for view in (logits, logits[0, 0, 0], logits[:0], logits.transpose(0, 2), logits[:, 1:, ::2]):
        want = plain_entropy(view)
        for got in (entropy_from_logits(view), entropy_from_logits_with_chunking(view, 2, checkpointing=True)):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy_from_logits(torch.tensor([[1, 2]])), plain_entropy(torch.tensor([[1, 2]])))


def test_the_gradient_is_the_only_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LARGE_BYTES", 1 << 62)  # the profiler follows torch's memory, not numpy's
    monkeypatch.setattr(module, "_CPU_CHUNK_ELEMENTS", 64 * 512)
    leaf = torch.randn(4096, 512, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        entropy(leaf).sum().backward()
    current = peak = 0
    for event in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    assert leaf.nbytes < peak < 1.2 * leaf.nbytes, f"{peak} bytes at the peak"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_memory_of_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for large in (8, 1 << 62):
        monkeypatch.setattr(host_memory, "LARGE_BYTES", large)
        tensor = host_memory.empty((3, 5), dtype)
        assert tensor.shape == (3, 5) and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.fill_(1).sum() == 15
        other = host_memory.empty_like(torch.zeros(5, 3, dtype=dtype).T)
        assert other.shape == (3, 5) and other.is_contiguous() and other.dtype == dtype
        assert host_memory.empty((0, 3), dtype).shape == (0, 3)
