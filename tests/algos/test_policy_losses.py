"""Policy losses: cases by hand, a slow reference of loss and gradient, and what must not matter."""

import math
import pickle
from types import SimpleNamespace

import pytest
import torch

from verl.algos.names import POLICY_LOSSES
from verl.algos.policy_loss import LossInputs, Whole, select_clip_cov, select_kl_cov, token_keys
from verl.trainer.ppo import core_algos
from verl.utils.numerics.seeding import sampling_seeds

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = POLICY_LOSSES
SELECTING = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
OPTIONS = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 3.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}
OPTIONS |= {"tau_pos": 1.0, "tau_neg": 1.5}
LOW, HIGH, DUAL = 0.2, 0.3, 3.0
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
ROWS, WIDTH = MASK.shape
SEQUENCES = 4
"""Rows with a token; the other one only fills the batch."""


def config(**options):
    return SimpleNamespace(
        clip_ratio=LOW,
        clip_ratio_low=None,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        policy_loss=SimpleNamespace(**OPTIONS | options),
    )


CONFIG = config()


def make_batch(scale=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, new, advantages, weights = (torch.randn(ROWS, WIDTH, generator=generator).double() for _ in range(4))
    return {
        "old_log_prob": old - 3,
        "log_prob": old - 3 + scale * new,
        "advantages": advantages,
        "response_mask": MASK,
    }, weights.exp()


def keys_of(rows=None):
    return token_keys(sampling_seeds(1, 2, ROWS, 1) if rows is None else rows, WIDTH)


def selected(name, batch):
    """What a loss that selects takes besides."""
    if name not in SELECTING:
        return {}
    inputs = LossInputs(**batch, loss_agg_mode="token-mean", config=CONFIG)
    return {"selection": SELECTING[name](inputs, keys_of(), Whole())}


def run(name, batch, mode="token-mean", weights=None, **extra):
    """Return the four outputs of a loss and the gradient of the first."""
    leaf = batch["log_prob"].clone().requires_grad_()
    loss_fn = core_algos.get_policy_loss_fn(name)
    inputs = {**batch, "log_prob": leaf, "loss_agg_mode": mode, "config": CONFIG, "rollout_is_weights": weights}
    outputs = loss_fn(**inputs, **extra)
    outputs[0].backward()
    return torch.stack([x.detach().double() for x in outputs]), leaf.grad


# The slow reference: one token at a time, by the definitions


def tokens_of(row):
    return [t for t in range(WIDTH) if MASK[row, t]]


def slow_aggregate(values, mode):
    sums = [sum(values[b, t] for t in tokens_of(b)) for b in range(ROWS)]
    lengths = [max(1, len(tokens_of(b))) for b in range(ROWS)]
    return {
        "token-mean": lambda: sum(sums) / int(MASK.sum()),
        "seq-mean-token-sum": lambda: sum(sums) / SEQUENCES,
        "seq-mean-token-mean": lambda: sum(s / n for s, n in zip(sums, lengths, strict=True)) / SEQUENCES,
        "seq-mean-token-sum-norm": lambda: sum(sums) / WIDTH / SEQUENCES,
    }[mode]()


def slow_token(name, new, old, advantage, chosen):
    """Return loss, clipped, clipped low, and the estimate of the KL of one token."""
    delta = new - old
    ratio = delta.exp()
    plain, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH)
    upper = torch.maximum(plain, bounded)
    if name == "vanilla":
        lower = advantage < 0 and upper > -DUAL * advantage
        loss = -DUAL * advantage + 0 * new if lower else upper
        return loss, bounded > plain, lower, -delta
    if name == "gpg":
        return -new * advantage, False, False, 0.0
    if name == "clip_cov":
        return (0 * new if chosen else upper), chosen, False, -delta
    if name == "kl_cov":
        return (plain + OPTIONS["ppo_kl_coef"] * delta.abs() if chosen else plain), False, False, delta.abs()
    if name == "cispo":
        weight = ratio.detach().clamp(1 - LOW, 1 + HIGH)
        return -weight * advantage * new, not 1 - LOW <= ratio <= 1 + HIGH, False, -delta
    tau = OPTIONS["tau_pos"] if advantage > 0 else OPTIONS["tau_neg"]
    return -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1)), False, False, -delta


def slow_gspo(new, old, advantages):
    losses, clipped = {}, {}
    for b in range(ROWS):
        mean = sum(new[b, t] - old[b, t] for t in tokens_of(b)) / max(1, len(tokens_of(b)))
        for t in tokens_of(b):
            ratio = (new[b, t] - new[b, t].detach() + mean.detach()).exp()
            plain = -advantages[b, t] * ratio
            bounded = -advantages[b, t] * ratio.clamp(1 - LOW, 1 + HIGH)
            losses[b, t], clipped[b, t] = torch.maximum(plain, bounded), bool(bounded > plain)
    return losses, clipped


def slow_geo_mean(new, old, advantages, weights):
    losses, clipped, lower = [], {}, {}
    for b in range(ROWS):
        size, log_ratio = max(1, len(tokens_of(b))), 0.0
        for t in tokens_of(b):
            delta, a = new[b, t] - old[b, t], advantages[b, t]
            bounded = delta.clamp(-LOW, HIGH)
            log_ratio = log_ratio + (torch.minimum(delta, bounded) if a > 0 else torch.maximum(delta, bounded))
            clipped[b, t], lower[b, t] = bool(bounded != delta and a > 0), bool(bounded != delta and a < 0)
        mean = sum(advantages[b, t] for t in tokens_of(b)) / size
        weight = math.exp(sum(math.log(weights[b, t]) for t in tokens_of(b)) / size)
        losses.append(-mean * torch.as_tensor(log_ratio / size).exp() * weight)
    return sum(losses) / SEQUENCES, clipped, lower


def slow_policy_loss(name, batch, mode, weights, selection=None):
    leaf = batch["log_prob"].clone().requires_grad_()
    old, advantages = batch["old_log_prob"], batch["advantages"]
    weights = torch.ones_like(old) if weights is None else weights
    places = [(b, t) for b in range(ROWS) for t in tokens_of(b)]
    kl = {at: old[at] - leaf[at] for at in places}
    lower = dict.fromkeys(places, 0.0)
    if name == "geo_mean":
        total, clipped, lower = slow_geo_mean(leaf, old, advantages, weights)
    else:
        if name == "gspo":
            losses, clipped = slow_gspo(leaf, old, advantages)
            mode = "seq-mean-token-mean"
        else:
            found = {
                at: slow_token(name, leaf[at], old[at], advantages[at], selection is not None and bool(selection[at]))
                for at in places
            }
            losses, clipped, lower, kl = ({at: row[i] for at, row in found.items()} for i in range(4))
        total = slow_aggregate({at: losses[at] * weights[at] for at in places}, mode)
    total.backward()
    statistics = [
        slow_aggregate(
            {at: value.item() if isinstance(value, torch.Tensor) else value for at, value in x.items()}, "token-mean"
        )
        for x in (clipped, kl, lower)
    ]
    return torch.tensor([total.item(), *statistics], dtype=torch.float64), leaf.grad


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_policy_loss_equals_slow_reference(name, mode, weighted, scale):
    batch, weights = make_batch(scale)
    weights, extra = weights if weighted else None, selected(name, batch)
    want = slow_policy_loss(name, batch, mode, weights, *extra.values())
    torch.testing.assert_close(run(name, batch, mode, weights, **extra), want, atol=1e-12, rtol=1e-9)
    single = {key: value.float() if key != "response_mask" else value for key, value in batch.items()}
    weights = weights.float() if weighted else None
    outputs, gradient = run(name, single, mode, weights, **extra)
    torch.testing.assert_close((outputs, gradient.double()), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_single(name):
    batch, _ = make_batch()
    half = {key: value.bfloat16() if key != "response_mask" else value for key, value in batch.items()}
    extra = selected(name, batch)
    outputs, gradient = run(name, half, **extra)
    want, _ = run(
        name, {key: value.float() if key != "response_mask" else value for key, value in half.items()}, **extra
    )
    assert torch.equal(outputs, want) and gradient.dtype is torch.bfloat16


@pytest.mark.parametrize("name", LOSSES)
def test_nan_outside_the_mask_reaches_nothing(name):
    batch, weights = make_batch()
    extra, outside = selected(name, batch), MASK == 0
    clean = run(name, batch, weights=weights, **extra)
    dirty = {k: v.masked_fill(outside, torch.nan) if k != "response_mask" else v for k, v in batch.items()}
    assert all(map(torch.equal, selected(name, dirty).values(), extra.values()))
    torch.testing.assert_close(
        run(name, dirty, weights=weights.masked_fill(outside, torch.nan), **extra), clean, atol=0, rtol=0
    )
    assert not clean[1][outside].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_that_is_far_off_and_no_policy_at_all(name):
    """Ratios that no number holds are bounded; a rank without a row has a loss of zero."""
    batch, _ = make_batch()
    for shift in (-1000.0, 1000.0):
        far = batch | {"log_prob": batch["log_prob"].float() + shift, "old_log_prob": batch["old_log_prob"].float()}
        outputs, gradient = run(name, far, **selected(name, far))
        assert outputs.isfinite().all() and gradient.isfinite().all()
    none = {key: value[:0] for key, value in batch.items()}
    outputs, gradient = run(name, none, **{key: value[:0] for key, value in selected(name, batch).items()})
    assert outputs.tolist() == [0, 0, 0, 0] and gradient.shape == (0, WIDTH)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_zero(name, mask_dtype):
    batch, weights = make_batch()
    batch["response_mask"] = torch.zeros_like(MASK, dtype=mask_dtype)
    for mode in MODES:
        outputs, gradient = run(name, batch, mode, weights)
        assert not outputs.any() and not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_ratio_is_one(name):
    """No clip acts, and the gradient is the policy gradient, aggregated in the loss's own way."""
    batch, _ = make_batch()
    batch["log_prob"] = batch["old_log_prob"].clone()
    extra = {"selection": torch.zeros_like(MASK, dtype=torch.bool)} if name in SELECTING else {}
    outputs, gradient = run(name, batch, **extra)
    assert not outputs[1:].any()
    advantages = batch["advantages"]
    if name == "geo_mean":
        mean = (advantages * MASK).sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True).clamp(min=1)
        advantages = mean.expand_as(advantages)
    leaf = batch["log_prob"].clone().requires_grad_()
    core_algos.agg_loss(-leaf * advantages, MASK, core_algos.effective_loss_agg_mode(name, "token-mean")).backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-12, rtol=1e-9)


# By hand


def by_hand(name, delta, advantages, old=0.0, mode="token-mean", **extra):
    delta, advantages = torch.tensor([delta], dtype=torch.float64), torch.tensor([advantages], dtype=torch.float64)
    old = torch.full_like(delta, old)
    batch = {"old_log_prob": old, "log_prob": old + delta, "advantages": advantages}
    outputs, gradient = run(name, batch | {"response_mask": torch.ones_like(delta)}, mode, **extra)
    return outputs.tolist(), gradient[0].tolist()


def test_vanilla_by_hand():
    """Ratios e^0.5, e^-0.5, e^2 and 1 meet advantages 1, -1, -1 and 2: upper clip, upper clip, dual clip, none."""
    outputs, gradient = by_hand("vanilla", [0.5, -0.5, 2.0, 0.0], [1.0, -1.0, -1.0, 2.0])
    assert outputs == pytest.approx([(-1.3 + 0.8 + 3.0 - 2.0) / 4, 2 / 4, -2.0 / 4, 1 / 4])
    assert gradient == pytest.approx([0.0, 0.0, 0.0, -2.0 / 4])
    plain = core_algos.compute_policy_loss(
        torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), cliprange=0.2
    )
    assert plain[0].item() == pytest.approx(-1.2)


def test_gspo_by_hand():
    """The geometric means are e^0.2, which passes, and e^-0.5, which is clipped to 0.8."""
    outputs, gradient = by_hand("gspo", [0.3, 0.1], [1.0, 3.0])
    assert outputs[0] == pytest.approx(-math.exp(0.2) * 2.0) and outputs[1] == 0
    assert gradient == pytest.approx([-math.exp(0.2) / 2, -math.exp(0.2) * 3 / 2])
    outputs, gradient = by_hand("gspo", [-0.9, -0.1], [-1.0, -1.0])
    assert outputs[:2] == pytest.approx([0.8, 1.0]) and gradient == [0.0, 0.0]


def test_gpg_and_geo_mean_by_hand():
    outputs, gradient = by_hand("gpg", [0.5, 1.0], [1.0, -2.0], old=-2.0)
    assert outputs[0] == pytest.approx((1.5 - 2.0) / 2) and gradient == pytest.approx([-0.5, 1.0])
    # log-ratios 0.1 and 0.7, the second clipped to 0.3; the advantages mean 2
    outputs, gradient = by_hand("geo_mean", [0.1, 0.7], [1.0, 3.0])
    assert outputs == pytest.approx([-2 * math.exp(0.2), 0.5, -0.4, 0.0])
    assert gradient == pytest.approx([-2 * math.exp(0.2) / 2, 0.0])


def test_cispo_and_sapo_by_hand():
    outputs, gradient = by_hand("cispo", [0.5, -1.0], [1.0, -1.0], old=-2.0)
    assert outputs[:2] == pytest.approx([(1.3 * 1.5 - 0.8 * 3.0) / 2, 1.0])
    assert gradient == pytest.approx([-1.3 / 2, 0.8 / 2])  # a clipped token keeps its gradient
    outputs, gradient = by_hand("sapo", [0.0, math.log(2)], [1.0, -1.0])
    gate = 1 / (1 + math.exp(-1.5))
    assert outputs[0] == pytest.approx((-4 * 0.5 + 4 / 1.5 * gate) / 2)
    assert gradient == pytest.approx([-1 / 2, 4 * gate * (1 - gate) * 2 / 2])


def covariances(name):
    """Four tokens whose advantages (mean 0) and log-probabilities (mean -2) have covariances 6, 1, 0 and 3."""
    log_prob = torch.tensor([[1.0, -3.0, -2.0, -4.0]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, -1.0, 0.5, -1.5]], dtype=torch.float64)
    old, mask = log_prob.clone(), torch.ones(1, 4)
    return (old, log_prob, advantages, mask), {"loss_agg_mode": "seq-mean-token-sum", "config": CONFIG}


def test_clip_cov_by_hand():
    """With bounds 0.5 and 5 and half of the four tokens, the second and the fourth leave the loss."""
    tensors, _ = covariances("clip_cov")
    own = config(clip_cov_ratio=0.5, clip_cov_lb=0.5, clip_cov_ub=5.0)
    leaf = tensors[1].clone().requires_grad_()
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss_clip_cov(
        tensors[0], leaf, *tensors[2:], loss_agg_mode="seq-mean-token-sum", config=own
    )
    loss.backward()
    assert (loss.item(), clipfrac.item(), kl.item(), lower.item()) == (-2.5, 0.5, 0, 0)
    assert leaf.grad.tolist() == [[-2.0, 0.0, -0.5, 0.0]]


def test_kl_cov_by_hand():
    """Half of the four tokens: those of covariance 6 and 3 pay 0.7 for their log-ratio of -1."""
    (old, log_prob, advantages, mask), _ = covariances("kl_cov")
    leaf = log_prob.clone().requires_grad_()
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss_kl_cov(
        old + 1, leaf, advantages, mask, loss_agg_mode="seq-mean-token-sum", config=config(kl_cov_ratio=0.5)
    )
    loss.backward()
    e = math.exp(-1)
    assert (loss.item(), clipfrac.item(), kl.item(), lower.item()) == pytest.approx((0.7 * 2, 0, 1, 0))
    assert leaf.grad[0].tolist() == pytest.approx([-2 * e - 0.7, e, -0.5 * e, 1.5 * e - 0.7])


# Selection


def slow_selection(name, batch, keys, options):
    places = [(b, t) for b in range(ROWS) for t in tokens_of(b)]
    lp, a, old = (batch[k] for k in ("log_prob", "advantages", "old_log_prob"))
    mean = [sum(float(x[at]) for at in places) / len(places) for x in (lp, a)]
    cov = {at: (float(lp[at]) - mean[0]) * (float(a[at]) - mean[1]) for at in places}
    if name == "kl_cov":
        count = max(1, int(options["kl_cov_ratio"] * len(places)))
        return set(sorted(places, key=lambda at: (-cov[at], int(keys[at])))[:count])
    ratio = {at: math.exp(float(lp[at] - old[at])) for at in places}
    clipped = {at for at in places if (ratio[at] > 1 + HIGH if a[at] > 0 else ratio[at] < 1 - LOW)}
    candidates = [
        at for at in places if options["clip_cov_lb"] < cov[at] < options["clip_cov_ub"] and at not in clipped
    ]
    count = max(1, int(options["clip_cov_ratio"] * len(places)))
    return set(sorted(candidates, key=lambda at: int(keys[at]))[:count])


def select(name, batch, keys, **options):
    inputs = LossInputs(**batch, loss_agg_mode="token-mean", config=config(**options))
    chosen = SELECTING[name](inputs, keys, Whole())
    assert chosen.dtype is torch.bool and not (chosen & (batch["response_mask"] == 0)).any()
    return chosen


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("ratio", [1e-4, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_selection_equals_slow_reference(name, ratio, seed):
    batch, _ = make_batch(seed=seed)
    options = OPTIONS | {"clip_cov_ratio": ratio, "kl_cov_ratio": ratio, "clip_cov_lb": 0.0}
    want = slow_selection(name, batch, keys_of(), options)
    assert {tuple(at) for at in select(name, batch, keys_of(), **options).nonzero().tolist()} == want
    assert want


@pytest.mark.parametrize("name", SELECTING)
def test_selection_moves_with_its_rows_and_ignores_padding(name):
    batch, _ = make_batch()
    options = {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.15}
    whole, order = select(name, batch, keys_of(), **options), torch.tensor([3, 0, 4, 1, 2])
    moved = select(name, {key: value[order] for key, value in batch.items()}, keys_of()[order], **options)
    assert torch.equal(moved, whole[order])
    wide = {key: torch.nn.functional.pad(value, (0, 3)) for key, value in batch.items()}
    keys = token_keys(sampling_seeds(1, 2, ROWS, 1), WIDTH + 3)
    assert torch.equal(select(name, wide, keys, **options)[:, :WIDTH], whole)


def test_equal_covariances_are_told_apart_by_their_keys():
    """Where all advantages are the same, every covariance is zero: exactly the asked number is chosen all the same."""
    batch, _ = make_batch()
    batch |= {"log_prob": batch["log_prob"].float(), "advantages": torch.full((ROWS, WIDTH), 0.1)}
    chosen = select("kl_cov", batch, keys_of(), kl_cov_ratio=0.5)
    places = [(b, t) for b in range(ROWS) for t in tokens_of(b)]
    want = sorted(places, key=lambda at: int(keys_of()[at]))[: len(places) // 2]
    assert {tuple(at) for at in chosen.nonzero().tolist()} == set(want)


def test_keys_look_random_and_depend_on_seed_place_and_draw():
    seeds = sampling_seeds(1, 2, 500, 1)
    keys = token_keys(seeds, 40)
    assert (keys >= 0).all() and keys.unique().numel() == keys.numel()
    assert torch.equal(token_keys(seeds[3:5], 10), keys[3:5, :10])
    assert not (token_keys(seeds, 40, draw=1) == keys).any()
    uniform = keys.double() / 2**63
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.corrcoef(torch.stack([uniform[:, :-1].flatten(), uniform[:, 1:].flatten()]))[0, 1].abs() < 0.03
    assert torch.corrcoef(torch.stack([uniform[:-1].flatten(), uniform[1:].flatten()]))[0, 1].abs() < 0.03


def test_called_directly_clip_cov_draws_anew_from_torchs_generator():
    """With all tokens but one candidates and one chosen, the place of the zero differs between calls."""
    batch, _ = make_batch(scale=0.0)
    wide = config(clip_cov_ratio=1e-9, clip_cov_lb=-100.0, clip_cov_ub=100.0)

    def place(seed):
        torch.manual_seed(seed)
        leaf = batch["log_prob"].clone().requires_grad_()
        core_algos.compute_policy_loss_clip_cov(**{**batch, "log_prob": leaf}, config=wide)[0].backward()
        (found,) = ((leaf.grad == 0) & MASK.bool()).nonzero().tolist()
        return tuple(found)

    places = [place(seed) for seed in range(12)]
    assert places[0] == place(0) and len(set(places)) > 4


@pytest.mark.parametrize(
    ("name", "nulls", "values"),
    [
        ("clip_cov", ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), (2e-4, 1.0, 5.0)),
        ("kl_cov", ("kl_cov_ratio", "ppo_kl_coef"), (2e-4, 1.0)),
    ],
)
def test_what_null_stands_for(name, nulls, values):
    batch, _ = make_batch(scale=2.0)
    loss_fn, results = core_algos.get_policy_loss_fn(name), []
    for options in (dict.fromkeys(nulls), dict(zip(nulls, values, strict=True))):
        torch.manual_seed(0)
        results.append(loss_fn(**batch, loss_agg_mode="token-mean", config=config(**options)))
    assert results[0] == results[1]


# Registry


def test_registry_and_refusals():
    registered = core_algos.POLICY_LOSS_REGISTRY.items()  # a recipe that another test imports may have added its own
    assert {name for name, loss in registered if loss.__module__.startswith("verl.")} == set(LOSSES)
    assert {name for name in LOSSES if core_algos.get_token_selector(name)} == set(SELECTING)
    with pytest.raises(ValueError, match="'vanilla'"):
        core_algos.get_policy_loss_fn("nope")
    batch, _ = make_batch()
    bad = SimpleNamespace(**{**vars(CONFIG), "clip_ratio_c": 1.0})
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="clip_ratio_c must be above 1"):
            core_algos.get_policy_loss_fn("vanilla")(**batch, loss_agg_mode="token-mean", config=bad)
    with pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(*list(batch.values()))
    for name in LOSSES:
        loss_fn = core_algos.get_policy_loss_fn(name)
        if name not in ("gspo", "geo_mean"):
            with pytest.raises(ValueError, match="loss_agg_mode must be one of"):
                loss_fn(**batch, loss_agg_mode="mean", config=CONFIG)
        if name != "gpg":
            with pytest.raises(ValueError, match="pass config"):
                loss_fn(**batch, loss_agg_mode="token-mean", config=None)


def test_a_formula_over_tokens_of_a_user_gets_the_established_signature():
    """Its inputs are zero outside the mask, and what it returns is weighed, masked and aggregated for it."""

    @core_algos.register_token_loss("squares", needs_config=False)
    def squares(inputs, config):
        assert inputs.log_prob[MASK == 0].eq(0).all() and inputs.rollout_is_weights[MASK == 0].eq(0).all()
        return core_algos.TokenLoss(inputs.log_prob**2, is_clipped=inputs.log_prob > -3)

    try:
        batch, weights = make_batch()
        batch["log_prob"] = batch["log_prob"].masked_fill(MASK == 0, torch.nan)
        outputs, gradient = run("squares", batch, "seq-mean-token-sum", weights.masked_fill(MASK == 0, torch.nan))
        inside = torch.where(MASK == 0, 0.0, batch["log_prob"])
        assert outputs[0].item() == pytest.approx((inside**2 * weights).sum().item() / SEQUENCES)
        assert outputs[1].item() == pytest.approx((batch["log_prob"] > -3).sum().item() / MASK.sum().item())
        torch.testing.assert_close(gradient, 2 * inside * weights / SEQUENCES)
        assert squares.__name__ == "squares"
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["squares"]


def test_losses_can_be_sent_to_workers_by_name():
    for name in LOSSES:
        loss_fn = core_algos.get_policy_loss_fn(name)
        assert pickle.loads(pickle.dumps(loss_fn)) is loss_fn is getattr(core_algos, f"compute_policy_loss_{name}")


def test_the_last_loss_entered_under_a_name_wins():
    try:
        first = core_algos.register_policy_loss("mine", "token-mean", select_kl_cov)(lambda: 1)
        assert core_algos.effective_loss_agg_mode("mine", "seq-mean-token-sum") == "token-mean"
        assert core_algos.get_token_selector("mine") is select_kl_cov
        core_algos.POLICY_LOSS_REGISTRY["mine"] = lambda: 3  # by hand
        assert core_algos.get_token_selector("mine") is None
        second = core_algos.register_policy_loss("mine")(lambda: 2)
        assert core_algos.get_policy_loss_fn("mine") is second is not first
        assert core_algos.effective_loss_agg_mode("mine", "seq-mean-token-sum") == "seq-mean-token-sum"
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["mine"]
