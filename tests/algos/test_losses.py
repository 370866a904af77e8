"""Policy, value and entropy losses, KL and aggregation against slow references."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algos import aggregate
from verl.trainer.ppo import core_algos

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CONFIG = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=3.0)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


def make_batch(scale=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, new, advantages, weights = (torch.randn(5, 4, generator=generator).double() for _ in range(4))
    return {
        "old_log_prob": old - 3,
        "log_prob": old - 3 + scale * new,
        "advantages": advantages,
        "response_mask": MASK,
    }, weights.exp()


def slow_agg(matrix, mask, mode):
    rows = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(matrix, mask.tolist(), strict=True)]
    flat = [x for row in rows for x in row]
    return {
        "token-mean": sum(flat) / max(1, len(flat)),
        "seq-mean-token-sum": sum(sum(row) for row in rows) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / max(1, len(row)) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(flat) / mask.shape[1],
    }[mode]


def slow_policy_loss(name, batch, mode, weights):
    """Compute (loss, clipfrac, kl, lower clipfrac) with Python floats."""
    old, new, advantages = (batch[k].tolist() for k in ("old_log_prob", "log_prob", "advantages"))
    mask, low, high, dual = batch["response_mask"], 0.2, 0.3, 3.0
    keep, w = mask.tolist(), weights.tolist() if weights is not None else [[1.0] * 4] * 5
    loss, upper, lower, kl = ([[0.0] * 4 for _ in range(5)] for _ in range(4))
    sequence = []
    for b in range(5):
        tokens = [t for t in range(4) if keep[b][t]]
        length = max(1, len(tokens))
        mean_delta = sum(new[b][t] - old[b][t] for t in tokens) / length
        log_sum = 0.0
        for t in tokens:
            delta, a = new[b][t] - old[b][t], advantages[b][t]
            kl[b][t] = -delta
            ratio = math.exp(mean_delta if name == "gspo" else delta)
            first, second = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
            value = max(first, second)
            upper[b][t] = float(second > first)
            if name == "vanilla" and a < 0:
                lower[b][t] = float(value > -dual * a)
                value = min(value, -dual * a)
            if name == "gpg":
                value, upper[b][t], kl[b][t] = -new[b][t] * a, 0.0, 0.0
            loss[b][t] = value * w[b][t]
            if name == "geo_mean":
                clamped = min(max(delta, -low), high)
                log_sum += min(delta, clamped) if a > 0 else max(delta, clamped)
                upper[b][t], lower[b][t] = float(clamped != delta and a > 0), float(clamped != delta and a < 0)
        mean_a = sum(advantages[b][t] for t in tokens) / length
        mean_log_w = sum(math.log(w[b][t]) for t in tokens) / length
        sequence.append(-mean_a * math.exp(log_sum / length) * math.exp(mean_log_w))
    total = sum(sequence) / 5 if name == "geo_mean" else slow_agg(loss, mask, mode)
    return (total, *(slow_agg(x, mask, "token-mean") for x in (upper, kl, lower)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "gpg", "geo_mean"])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_policy_loss_equals_slow_reference(name, mode, weighted, scale):
    batch, weights = make_batch(scale)
    weights = weights if weighted else None
    got = core_algos.get_policy_loss_fn(name)(**batch, loss_agg_mode=mode, config=CONFIG, rollout_is_weights=weights)
    want = slow_policy_loss(name, batch, core_algos.effective_loss_agg_mode(name, mode), weights)
    got = torch.stack([x.double() for x in got])
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "gpg", "geo_mean"])
def test_policy_loss_gradient_and_nan_outside_the_mask(name):
    batch, weights = make_batch()
    loss_fn = core_algos.get_policy_loss_fn(name)

    def run(**replaced):
        inputs = {**batch, **replaced, "log_prob": replaced.get("log_prob", batch["log_prob"]).clone().requires_grad_()}
        loss = loss_fn(**inputs, loss_agg_mode="token-mean", config=CONFIG, rollout_is_weights=None)[0]
        loss.backward()
        return loss.detach(), inputs["log_prob"].grad

    loss, grad = run()
    outside = MASK == 0
    dirty, dirty_grad = run(
        **{k: batch[k].masked_fill(outside, torch.nan) for k in ("old_log_prob", "log_prob", "advantages")}
    )
    torch.testing.assert_close((dirty, dirty_grad), (loss, grad), atol=0, rtol=0)
    assert not grad[outside].any()
    # On-policy every loss has the gradient of the policy gradient, aggregated in its own way.
    on_policy = batch["old_log_prob"]
    _, grad = run(log_prob=on_policy)
    expected = on_policy.clone().requires_grad_()
    advantages = batch["advantages"]
    if name == "geo_mean":
        mean = (advantages * MASK).sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True).clamp(min=1)
        advantages = mean.expand_as(advantages)
    mode = core_algos.effective_loss_agg_mode(name, "token-mean")
    core_algos.agg_loss(-expected * advantages, MASK, mode).backward()
    torch.testing.assert_close(grad, expected.grad, atol=1e-9, rtol=1e-7)


def test_vanilla_by_hand():
    """Ratios e^0.5, e^-0.5 and e^2 meet advantages 1, -1 and -1: upper clip, upper clip, dual clip."""
    delta = torch.tensor([[0.5, -0.5, 2.0]])
    mask, zero = torch.ones(1, 3), torch.zeros(1, 3)
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss(
        zero, delta, torch.tensor([[1.0, -1.0, -1.0]]), mask, cliprange=0.2, clip_ratio_c=3.0
    )
    assert loss.item() == pytest.approx((-1.2 + 0.8 + 3.0) / 3)
    assert clipfrac.item() == pytest.approx(2 / 3)
    assert lower.item() == pytest.approx(1 / 3)
    assert kl.item() == pytest.approx(-2.0 / 3)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "gpg", "geo_mean"])
def test_empty_mask_gives_zero_loss(name):
    batch, _ = make_batch()
    batch["response_mask"] = torch.zeros_like(MASK)
    got = core_algos.get_policy_loss_fn(name)(**batch, loss_agg_mode="token-mean", config=CONFIG)
    assert all(x.item() == 0 for x in got)


def test_policy_loss_registry_and_refusals():
    with pytest.raises(ValueError, match="'vanilla'"):
        core_algos.get_policy_loss_fn("nope")
    batch, _ = make_batch()
    bad = SimpleNamespace(**{**vars(CONFIG), "clip_ratio_c": 1.0})
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="clip_ratio_c must be above 1"):
            core_algos.get_policy_loss_fn("vanilla")(**batch, loss_agg_mode="token-mean", config=bad)
    with pytest.raises(ValueError, match="loss_agg_mode must be one of"):
        core_algos.get_policy_loss_fn("vanilla")(**batch, loss_agg_mode="mean", config=CONFIG)
    with pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(*list(batch.values()))
    try:
        first = core_algos.register_policy_loss("mine", loss_agg_mode="token-mean")(lambda: 1)
        second = core_algos.register_policy_loss("mine")(lambda: 2)
        assert core_algos.get_policy_loss_fn("mine") is second is not first
        assert core_algos.effective_loss_agg_mode("mine", "seq-mean-token-sum") == "seq-mean-token-sum"
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["mine"]


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
