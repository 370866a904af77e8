"""Log-probabilities and entropies: against plain log_softmax, by gradcheck, and by what they allocate."""

import pytest
import torch
from torch.nn.functional import log_softmax

from verl.utils import torch_functional as VF
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.numerics.log_probs import log_probs_and_entropy


def plain(logits, labels, temperature=1.0):
    """Compute both in float64 by autograd through log_softmax."""
    scale = temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    log_p = log_softmax(logits.double() / scale, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, 37, generator=generator)
    return logits, torch.randint(0, 37, (3, 5), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
@pytest.mark.parametrize("chunk_size", [None, 4, 1])
def test_value_and_gradient_equal_plain_log_softmax(rows, dtype, inplace, temperature, chunk_size):
    logits, labels = rows
    if temperature == "rows":
        temperature = torch.linspace(0.5, 2.0, 15).view(3, 5)
    base = logits.to(dtype)
    weights = torch.linspace(-1, 1, 15).view(3, 5).double()

    reference = base.clone().requires_grad_()
    want_log_probs, want_entropy = plain(reference, labels, temperature)
    (weights * want_log_probs + weights.flip(0) * want_entropy).sum().backward()

    leaf = base.clone().requires_grad_()
    got_log_probs, got_entropy = log_probs_and_entropy(
        leaf * 1, labels, temperature, entropy="grad", chunk_size=chunk_size, inplace_backward=inplace
    )
    assert got_log_probs.dtype == got_entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (weights * got_log_probs + weights.flip(0) * got_entropy).sum().backward()
    tolerance = {"atol": 1e-12, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 3e-6, "rtol": 3e-6}
    torch.testing.assert_close(got_log_probs.double(), want_log_probs.detach(), **tolerance)
    torch.testing.assert_close(got_entropy.double(), want_entropy.detach(), **tolerance)
    grad_tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(leaf.grad, reference.grad, **grad_tolerance)


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
def test_gradcheck(entropy):
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([0, 5, 2, 2])

    def fn(x):
        out = log_probs_and_entropy(x, labels, 1.3, entropy=entropy, chunk_size=3)
        return out if entropy == "grad" else out[0]

    assert torch.autograd.gradcheck(fn, (logits,))
    assert log_probs_and_entropy(logits, labels, entropy="value")[1].requires_grad is False


def test_backward_writes_the_gradient_over_the_logits():
    """The gradient is the storage of the logits; a second reader of them is told, a leaf is left alone."""
    labels = torch.tensor([1, 2])
    leaf = torch.randn(2, 4, requires_grad=True, generator=torch.Generator().manual_seed(2))
    logits = leaf * 2
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    log_probs_and_entropy(logits, labels)[0].sum().backward()
    assert seen == [logits.data_ptr()]

    before = leaf.detach().clone()
    log_probs_and_entropy(leaf, labels)[0].sum().backward()
    torch.testing.assert_close(leaf.detach(), before, atol=0, rtol=0)

    shared = (leaf * 2).exp()  # exp keeps its output for its own backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs_and_entropy(shared, labels)[0].sum().backward()
    log_probs_and_entropy((leaf * 2).exp(), labels, inplace_backward=False)[0].sum().backward()


def test_allocates_no_second_copy_of_the_logits():
    """Above the logits themselves, the peak of forward and backward is a few chunks."""
    from torch.profiler import ProfilerActivity, profile

    rows, vocab, chunk = 4096, 512, 64
    leaf = torch.randn(rows, vocab, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    logits = leaf * 1
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        log_probs, entropy = log_probs_and_entropy(logits, labels, 0.9, entropy="grad", chunk_size=chunk)
        torch.autograd.grad((log_probs + entropy).sum(), logits)
    current = peak = 0
    for event in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    assert 0 < peak < 0.3 * rows * vocab * 4, f"{peak} bytes at the peak"


def test_masked_vocabulary_and_extreme_logits():
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [1e4, -1e4, 0.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0, 0]), entropy="grad")
    p = torch.tensor([0.0, 1.0]).softmax(0)
    torch.testing.assert_close(log_probs, torch.stack([p[0].log(), torch.tensor(0.0)]))
    torch.testing.assert_close(entropy, torch.stack([-(p * p.log()).sum(), torch.tensor(0.0)]))
    (log_probs + entropy).sum().backward()
    assert logits.grad.isfinite().all()


def test_refusals(rows):
    logits, labels = rows
    with pytest.raises(ValueError, match="temperature must be positive"):
        log_probs_and_entropy(logits, labels, 0.0)
    with pytest.raises(ValueError, match="must have the shape"):
        log_probs_and_entropy(logits, labels[:, :4])
    with pytest.raises(ValueError, match="'none', 'value' or 'grad'"):
        log_probs_and_entropy(logits, labels, entropy="yes")


def test_established_names_agree(rows):
    logits, labels = rows
    want, entropy = (x.float() for x in plain(logits, labels))
    for fn in (VF.logprobs_from_logits, VF.logprobs_from_logits_naive, VF.logprobs_from_logits_v2,
               VF.logprobs_from_logits_flash_attn, VF.logprobs_from_logits_torch_npu):  # fmt: skip
        torch.testing.assert_close(fn(logits, labels), want, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(VF.entropy_from_logits(logits), entropy, atol=3e-6, rtol=1e-5)
    grads = []
    for checkpointing in (False, True):
        leaf = logits.clone().requires_grad_()
        chunked = VF.entropy_from_logits_with_chunking(leaf, chunk_size=4, checkpointing=checkpointing)
        torch.testing.assert_close(chunked.detach(), entropy, atol=3e-6, rtol=1e-5)
        chunked.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=0, rtol=0)


def test_packed_forms_equal_the_padded_one():
    generator = torch.Generator().manual_seed(3)
    ids, logits = torch.randint(0, 9, (2, 6), generator=generator), torch.randn(2, 6, 9, generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    want = log_softmax(logits[:, 2:5], -1).gather(-1, ids[:, 3:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(VF.log_probs_from_logits_response(ids, logits, 3), want)
    got = VF.log_probs_from_logits_response_rmpad(ids, mask, logits[mask.bool()], 3)
    valid = mask[:, 3:].bool()
    torch.testing.assert_close(got[valid], want[valid])


@pytest.mark.parametrize("chunk_size", [1, 4, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_linear(chunk_size, temperature):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    coefficients = torch.randn(2, 2, 5, dtype=torch.float64, generator=generator)
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            out = FusedLinearForPPO(chunk_size)(h, w, labels, temperature)
        else:
            out = plain(h @ w.t(), labels, temperature)
        (coefficients[0] * out[0] + coefficients[1] * out[1]).sum().backward()
        results.append((*(x.detach() for x in out), h.grad, w.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=1e-9)
    frozen = weight.clone()
    h = hidden.clone().requires_grad_()
    FusedLinearForPPO(chunk_size)(h, frozen, labels, temperature)[0].sum().backward()
    assert h.grad is not None and frozen.grad is None


def test_fused_linear_refuses() -> None:
    h, w = torch.randn(64, 4), torch.randn(100, 4)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        FusedLinearForPPO(0)
    with pytest.raises(ValueError, match="must have the shape"):
        FusedLinearForPPO()(h, w, torch.zeros(63, dtype=torch.long))
