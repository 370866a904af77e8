"""Value and entropy losses, KL and aggregation against slow references; policy losses are in the file beside."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algos import aggregate
from verl.trainer.ppo import core_algos

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


def slow_agg(matrix, mask, mode):
    rows = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(matrix, mask.tolist(), strict=True)]
    flat = [x for row in rows for x in row]
    rows = [row for row in rows if row]  # a row without a token only fills the batch
    return {
        "token-mean": sum(flat) / max(1, len(flat)),
        "seq-mean-token-sum": sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / max(1, len(row)) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(sum(row) for row in rows) / len(rows) / mask.shape[1],
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_aggregation(mode, mask_dtype):
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    dirty = matrix.masked_fill(MASK == 0, torch.nan)
    mask = MASK.to(mask_dtype)
    want = slow_agg(matrix.tolist(), MASK, mode)
    assert core_algos.agg_loss(dirty, mask, mode).item() == pytest.approx(want, abs=1e-12)
    # Split into micro-batches, summed, and divided once by the units of the whole: nothing changes.
    rows = [slice(0, 2), slice(2, 3), slice(3, 5)]
    parts = [aggregate.agg_sum(dirty[r], mask[r], mode) for r in rows]
    count = aggregate.count_units(mask)[aggregate.UNITS.index(parts[0].unit)]
    assert (sum(p.total for p in parts) / count).item() == pytest.approx(want, abs=1e-12)


def test_rows_that_fill_a_batch_are_in_no_denominator():
    """Sequences of 2 and 4, 4 and 6: sums 6 and 10, means 3 and 5; the third row has no token."""
    matrix = torch.tensor([[2.0, 4.0], [4.0, 6.0], [99.0, 99.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    found = {mode: core_algos.agg_loss(matrix, mask, mode).item() for mode in MODES}
    assert found == {
        "token-mean": 4.0,
        "seq-mean-token-sum": 8.0,
        "seq-mean-token-mean": 4.0,
        "seq-mean-token-sum-norm": 4.0,
    }
    assert aggregate.count_units(mask).tolist() == [4, 2, 1]
    loss, clipped = core_algos.compute_value_loss(matrix, matrix + 2, matrix, mask, 0.5, "seq-mean-token-mean")
    assert (loss.item(), clipped.item()) == (2.0, 0.0)  # half the square of 2


def test_value_loss():
    generator = torch.Generator().manual_seed(2)
    vpreds, returns, values = (torch.randn(5, 4, generator=generator).double() for _ in range(3))
    errors, clipped = [], []
    for b in range(5):
        errors.append([]), clipped.append([])
        for t in range(4):
            v, ret, old = vpreds[b, t].item(), returns[b, t].item(), values[b, t].item()
            bounded = min(max(v, old - 0.5), old + 0.5)
            errors[-1].append(0.5 * max((v - ret) ** 2, (bounded - ret) ** 2))
            clipped[-1].append(float((bounded - ret) ** 2 > (v - ret) ** 2))
    vpreds.requires_grad_()
    outside = MASK == 0
    for mode in MODES:
        dirty = vpreds.detach().masked_fill(outside, torch.nan).requires_grad_()
        loss, clipfrac = core_algos.compute_value_loss(
            dirty, returns.masked_fill(outside, torch.nan), values, MASK, 0.5, mode
        )
        assert loss.item() == pytest.approx(slow_agg(errors, MASK, mode), abs=1e-12)
        assert clipfrac.item() == pytest.approx(slow_agg(clipped, MASK, "token-mean"), abs=1e-6)
        loss.backward()
        assert dirty.grad.isfinite().all() and not dirty.grad[outside].any()


def test_value_loss_by_hand():
    """Predictions 2 and 0.2 for returns 1 and 1, old values 0 and 0: the first is clipped to 0.5, which is nearer."""
    values = torch.tensor([[2.0, 0.2]], requires_grad=True)
    loss, clipfrac = core_algos.compute_value_loss(values, torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.0 + 0.64) / 2) and clipfrac.item() == 0
    assert values.grad[0].tolist() == pytest.approx([1.0 / 2, -0.8 / 2])
    values = torch.tensor([[1.0, 0.2]], requires_grad=True)  # right, but further from the old value than is allowed
    loss, clipfrac = core_algos.compute_value_loss(values, torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.25 + 0.64) / 2) and clipfrac.item() == pytest.approx(0.5)
    assert values.grad[0].tolist() == pytest.approx([0.0, -0.8 / 2])


@pytest.mark.parametrize("mode", MODES)
def test_value_and_entropy_gradients_equal_autograd_of_the_definitions(mode):
    generator = torch.Generator().manual_seed(3)
    vpreds, returns, values = (torch.randn(5, 4, generator=generator).double() for _ in range(3))
    logits = torch.randn(5, 4, 7, generator=generator).double()

    def slow(leaf, token):
        matrix = [[token(leaf, b, t) for t in range(4)] for b in range(5)]
        return torch.as_tensor(slow_agg(matrix, MASK, mode))

    def error(leaf, b, t):
        bounded = torch.minimum(torch.maximum(leaf[b, t], values[b, t] - 0.5), values[b, t] + 0.5)
        return 0.5 * torch.maximum((leaf[b, t] - returns[b, t]) ** 2, (bounded - returns[b, t]) ** 2)

    def entropy(leaf, b, t):
        p = torch.softmax(leaf[b, t], dim=-1)
        return -(p * p.log()).sum()

    for start, fast, token in (
        (vpreds, lambda x: core_algos.compute_value_loss(x, returns, values, MASK, 0.5, mode)[0], error),
        (logits, lambda x: core_algos.compute_entropy_loss(x, MASK, mode), entropy),
    ):
        results = []
        for function in (fast, lambda x, token=token: slow(x, token)):
            leaf = start.clone().requires_grad_()
            value = function(leaf)
            value.backward()
            results.append((value.detach(), leaf.grad))
        torch.testing.assert_close(*results, atol=1e-10, rtol=1e-8)


def test_an_empty_mask_gives_zero():
    empty, numbers = torch.zeros(5, 4), torch.full((5, 4), torch.nan, requires_grad=True)
    for mode in MODES:
        loss, clipfrac = core_algos.compute_value_loss(numbers, numbers.detach(), numbers.detach(), empty, 0.5, mode)
        loss.backward()
        assert loss.item() == clipfrac.item() == 0 and not numbers.grad.any()
        assert core_algos.compute_entropy_loss(torch.zeros(5, 4, 3), empty, mode).item() == 0
        assert core_algos.agg_loss(numbers.detach(), empty, mode).item() == 0


def test_entropy_loss_of_uniform_logits():
    logits = torch.zeros(5, 4, 8)
    assert core_algos.compute_entropy_loss(logits, MASK).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_estimators(name):
    logprob, ref = torch.tensor([[-1.0, -2.0, -30.0]]), torch.tensor([[-1.5, -1.0, -2.0]])
    d = [0.5, -1.0, -28.0]
    table = {
        "kl": d,
        "abs": [abs(x) for x in d],
        "k2": [x * x / 2 for x in d],
        "k3": [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1 - 1, 10.0],
    }
    want = table[{"k1": "kl", "mse": "k2", "low_var_kl": "k3"}.get(name, name)]
    torch.testing.assert_close(core_algos.kl_penalty(logprob, ref, name), torch.tensor([want]))
    torch.testing.assert_close(core_algos.kl_penalty_forward(logprob, ref, name), torch.tensor([want]))
    leaf = logprob.clone().requires_grad_()
    straight_through = core_algos.kl_penalty(leaf, ref, name + "+")
    torch.testing.assert_close(straight_through.detach(), torch.tensor([want]))
    straight_through.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([d]))


@pytest.mark.parametrize("name", ["full", "full+", "k4", "++"])
def test_unknown_kl_is_refused(name):
    for kind in (ValueError, NotImplementedError):
        with pytest.raises(kind, match="low_var_kl"):
            core_algos.kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)
        with pytest.raises(kind):
            core_algos.check_kl_penalty(name)


def test_kl_controllers():
    adaptive = core_algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=100))
    adaptive.update(current_kl=0.55, n_steps=10)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    adaptive.update(current_kl=50.0, n_steps=10)  # the error is clipped to 0.2
    assert adaptive.value == pytest.approx(0.101 * 1.02)
    again = core_algos.AdaptiveKLController(0.1, 0.5, 100)
    again.load_state_dict(adaptive.state_dict())
    assert again.value == adaptive.value
    fixed = core_algos.get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.3))
    fixed.update(9.0, 9)
    assert fixed.value == 0.3
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=r"kl_ctrl\.horizon must be positive"):
            core_algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=0))
    with pytest.raises(NotImplementedError, match="'fixed' or 'adaptive'"):
        core_algos.get_kl_controller(SimpleNamespace(type="x"))
    rewards = core_algos.compute_rewards(torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2), 0.5)
    assert rewards.tolist() == [[0.5, 0.0]]
