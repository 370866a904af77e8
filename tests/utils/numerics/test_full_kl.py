"""The exact KL of two distributions over the vocabulary."""

import math

import pytest
import torch

from verl.utils.numerics.log_probs import full_kl


def plain(logits, reference, temperature):
    log_p, log_q = (torch.log_softmax(x / temperature, dim=-1) for x in (logits, reference))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient(temperature, chunk_size):
    generator = torch.Generator().manual_seed(0)
    logits, reference = (3 * torch.randn(7, 11, generator=generator).double() for _ in range(2))
    weights = torch.randn(7, generator=generator).double()
    gradients = []
    for function in (
        lambda x: full_kl(x, reference, temperature, chunk_size),
        lambda x: plain(x, reference, temperature),
    ):
        leaf = logits.clone().requires_grad_()
        value = function(leaf)
        (value * weights).sum().backward()
        gradients.append((value.detach(), leaf.grad))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)


def test_by_hand_and_without_rows():
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert full_kl(p.log(), q.log()).item() == pytest.approx(want)
    assert full_kl(p.log(), p.log() + 5).item() == pytest.approx(0, abs=1e-7)
    leaf = torch.empty(0, 4, requires_grad=True)
    full_kl(leaf, torch.empty(0, 4)).sum().backward()
    assert leaf.grad.shape == (0, 4)


def test_a_token_that_cannot_be_sampled_counts_for_nothing():
    """Where both give it no probability, as a masked vocabulary does, and where only the policy does."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    for reference in (torch.tensor([[1.0, 0.0, -torch.inf]]), torch.tensor([[1.0, 0.0, 0.0]])):
        kl = full_kl(logits, reference)
        (grad,) = torch.autograd.grad(kl.sum(), logits)
        assert kl.isfinite().all() and grad.isfinite().all() and grad[0, 2] == 0


def test_half_precision_is_summed_in_single():
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(5, 50, generator=generator).bfloat16() for _ in range(2))
    torch.testing.assert_close(full_kl(logits, reference), plain(logits.float(), reference.float(), 1.0))


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="one vocabulary"):
        full_kl(torch.zeros(2, 5), torch.zeros(2, 6))
