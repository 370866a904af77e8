"""What every loss, estimator and importance weight gives for the same rows, in float64.

`python -m tests.algos.golden_cases` writes it to `golden.npz`, which `test_golden.py` compares with. The file stems
from the implementation that worked in place on blocks of rows, with derivatives by hand. Write it anew only for a
change of the mathematics, and say so in the changelog.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe.prime import prime_core_algos as prime
from recipe.spin import core_algos as spin
from recipe.sppo import dp_actor as sppo
from verl.algos import advantage, aggregate, kl, mismatch, policy_loss, value_loss
from verl.algos.names import IS_LEVELS, IS_MODES, KL_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSSES
from verl.protocol import DataProto

FILE = Path(__file__).with_name("golden.npz")
ROWS, WIDTH = 8, 12
LENGTHS = np.array([12, 7, 0, 1, 5, 12, 9, 3])
UIDS = np.array(["a", "a", "a", "b", "b", "b", "b", "c"], dtype=object)
CLIPS: dict[str, dict[str, Any]] = {
    "usual": {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
    "nothing passes": {"clip_ratio": 0.2, "clip_ratio_low": 0.0, "clip_ratio_high": 0.0, "clip_ratio_c": 1.001},
    "beyond zero": {"clip_ratio": 0.5, "clip_ratio_low": 1.5, "clip_ratio_high": None, "clip_ratio_c": 10.0},
}
SELECTION = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 3.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}
THROUGH_A_BOUND = ("vanilla", "clip_cov", "sapo")
"""Losses whose derivative was written by hand and ignored that the log-ratio is bounded; it is zero there now."""


class Rows:
    """Rows of random numbers, with holes in the mask, an empty row, and NaN outside the mask."""

    def __init__(self, seed: int, rows: int = ROWS, width: int = WIDTH) -> None:
        self.random = np.random.RandomState(seed)  # the stream of this generator never changes
        lengths = LENGTHS if rows == ROWS else self.random.randint(0, width + 1, rows)
        self.mask = torch.from_numpy(np.arange(width) < lengths[:, None]).long()
        self.mask[1::2, 2:4] = 0  # the answer of a tool
        self.uids = UIDS if rows == ROWS else np.repeat(np.arange(rows // 4), 4).astype(str).astype(object)

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers, (B, T) by default."""
        return torch.from_numpy(self.random.standard_normal(shape or tuple(self.mask.shape)))

    def dirty(self, values: Tensor, other: float = torch.inf) -> Tensor:
        """Put NaN and another number outside the mask."""
        outside = torch.where(torch.arange(values.shape[-1]) % 2 == 0, torch.nan, other)
        return torch.where(self.mask.bool(), values, outside)


def config_of(clip: str = "usual") -> Any:
    """Return a configuration of the actor."""
    options = SimpleNamespace(**SELECTION, tau_pos=1.0, tau_neg=1.05)
    return SimpleNamespace(**CLIPS[clip], policy_loss=options, sppo_eta=1.7)


def gradient(outputs: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative of a sum."""
    return torch.autograd.grad(outputs.sum(), leaf)[0]


def losses_of(rows: Rows, scale: float, clip: str, weighted: bool, mode: str) -> Iterator[tuple[str, Tensor]]:
    """Yield outputs and gradient of every policy loss."""
    old = rows.normal() - 3
    current = old + scale * rows.normal()
    advantages = rows.normal()
    advantages[:, ::5] = 0
    weights = rows.dirty(rows.normal().exp()) if weighted else None
    keys = policy_loss.token_keys(torch.arange(len(old)), old.shape[1])
    dirty = [rows.dirty(each) for each in (old, current, advantages)]
    for name in (*POLICY_LOSSES, "sppo"):
        extra: dict[str, Tensor] = {}
        if selector := policy_loss.get_token_selector(name):
            inputs = policy_loss.LossInputs(*dirty, rows.mask, mode, config_of(clip))
            extra["selection"] = selector(inputs, keys, policy_loss.Whole())
            yield f"{name}/selection", extra["selection"].nonzero()
        leaf = dirty[1].clone().requires_grad_()
        loss_fn: Any = policy_loss.get_policy_loss_fn(name)
        found = loss_fn(dirty[0], leaf, dirty[2], rows.mask, mode, config_of(clip), weights, **extra)
        yield f"{name}/outputs", torch.stack([each.detach() for each in found])
        if scale < 10 or name not in THROUGH_A_BOUND:
            yield f"{name}/gradient", gradient(found[0], leaf)


def policy_losses() -> Iterator[tuple[str, Tensor]]:
    """Yield the policy losses under usual and odd settings, far off, weighted, and in every mode."""
    settings = [(0.3, "usual", weighted, mode) for weighted in (False, True) for mode in LOSS_AGG_MODES]
    settings += [(1.0, clip, True, "token-mean") for clip in CLIPS] + [(30.0, "usual", False, "seq-mean-token-sum")]
    for number, (scale, clip, weighted, mode) in enumerate(settings):
        for name, value in losses_of(Rows(number), scale, clip, weighted, mode):
            yield f"policy/{number}/{name}", value
    large = Rows(99, 64, 256)
    probe = large.normal(256)
    for name, value in losses_of(large, 0.2, "usual", True, "token-mean"):
        yield f"policy/large/{name}", value @ probe if name.endswith("gradient") else value
    rows = Rows(98)
    shares = torch.tensor([0.25, 0.75, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    columns = [rows.dirty(rows.normal()) for _ in range(3)]
    for name, mode in product(POLICY_LOSSES, LOSS_AGG_MODES):
        extra = torch.zeros_like(rows.mask, dtype=torch.bool) if policy_loss.get_token_selector(name) else None
        inputs = policy_loss.LossInputs(*columns, rows.mask, mode, config_of(), None, extra)
        sums = policy_loss.policy_loss_sums(name, inputs, 50, shares)
        found = torch.stack([sums.loss.total, sums.clipped, sums.kl, sums.clipped_low])
        yield f"policy/shares/{name}/{mode}", found
    plain = policy_loss.compute_policy_loss(*columns, rows.mask, 0.2, None, 0.3, 2.0, "token-mean")
    yield "policy/plain", torch.stack(plain)


def other_losses() -> Iterator[tuple[str, Tensor]]:
    """Yield value loss, aggregation, estimators of the KL and the losses of recipes."""
    rows = Rows(1)
    columns = [rows.dirty(rows.normal()) for _ in range(3)]
    leaf = columns[0].clone().requires_grad_()
    shares = torch.tensor([0.25, 0.75, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    for mode in LOSS_AGG_MODES:
        for clip in (0.0, 0.5):
            found = value_loss.compute_value_loss(leaf, columns[1], columns[2], rows.mask, clip, mode)
            yield f"value/{mode}/{clip}", torch.stack([found[0].detach(), found[1].detach()])
            yield f"value/{mode}/{clip}/gradient", gradient(found[0], leaf)
        for length, part in product((None, 50), (None, shares)):
            name = f"aggregate/{mode}/{length}/{'rows' if part is None else 'shares'}"
            yield name, aggregate.agg_loss(columns[0], rows.mask, mode, length, part)
    for name in [f"{each}{plus}" for each in KL_ESTIMATORS for plus in ("", "+")]:
        leaf = (3 * rows.normal()).requires_grad_()
        found = kl.kl_penalty(leaf, torch.zeros_like(leaf), name)
        yield f"kl/{name}", found.detach()
        yield f"kl/{name}/gradient", gradient(found, leaf)
    yield "kl/rewards", kl.compute_rewards(*(rows.normal() for _ in range(3)), 0.3)
    yield from losses_of_recipes(rows)


def losses_of_recipes(rows: Rows) -> Iterator[tuple[str, Tensor]]:
    """Yield losses, rewards and advantages of PRIME, SPIN and SPPO."""
    leaf = rows.normal().requires_grad_()
    outcome = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0], dtype=torch.float64)
    for granularity in ("token", "whole"):
        yield f"prime/rewards/{granularity}", prime.token_rewards(leaf.detach(), rows.mask, 0.3, granularity)
    cross_entropy = prime.compute_ce_loss(leaf, outcome, rows.mask, 0.3)
    yield "prime/ce", torch.cat([cross_entropy.detach().unsqueeze(-1), gradient(cross_entropy, leaf)], -1)
    for kind in ("dpo", "bon_acc", "bon_rm"):
        rivals = prime.find_rivals(rows.normal(ROWS), outcome, rows.uids, kind)
        loss = prime.compute_dpo_loss(leaf, rows.mask, 0.3, rivals)
        yield f"prime/{kind}", torch.cat([loss.detach().unsqueeze(-1), gradient(loss, leaf)], -1)
    streams = [(rows.normal(), rows.mask), (rows.normal(), prime.last_tokens(rows.mask))]
    yield "prime/rloo", torch.stack(prime.compute_rloo_advantage_return(streams, rows.mask, rows.uids))
    for kind, smoothing in product(("sigmoid", "ipo"), (0.0, 0.1)):
        logits = rows.normal(ROWS).requires_grad_()
        loss = spin.compute_online_dpo_loss(logits, 0.2, smoothing, kind)
        yield f"spin/{kind}/{smoothing}", torch.stack([loss.detach(), gradient(loss, logits)])
        pairs = spin.pairs_of(logits.detach(), outcome > 0, 0.2, smoothing, kind)
        yield f"spin/pairs/{kind}/{smoothing}", torch.stack([pairs.loss, pairs.gradient, pairs.logits])
    old, rewards = rows.normal(), rows.normal(ROWS)
    loss, ratio = sppo.compute_sppo_loss(old, leaf, rewards, rows.mask, 0.7)
    yield "sppo", torch.cat([loss.detach().unsqueeze(0), ratio.detach(), gradient(loss, leaf).flatten()])


def estimators() -> Iterator[tuple[str, Tensor]]:
    """Yield advantages and returns of every estimator, with dirty padding."""
    for number, (gamma, lam) in enumerate([(1.0, 1.0), (0.9, 0.8), (0.0, 0.5)]):
        rows = Rows(40 + number)
        inputs = {
            "token_level_rewards": rows.dirty(rows.normal(), 0.5),  # a caller may reward a token that was not sampled
            "values": rows.dirty(rows.normal()),
            "reward_baselines": rows.normal(ROWS),
            "response_mask": rows.mask,
            "index": rows.uids,
        }
        config = SimpleNamespace(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=number != 1)
        for name in sorted(each.value for each in advantage.AdvantageEstimator):
            if name == "grpo_passk":
                inputs["index"] = np.array(["a"] * 3 + ["b"] * 5, dtype=object)
            found = advantage.estimate_advantages(name, **inputs, config=config)
            yield f"advantages/{number}/{name}", torch.stack(found)
            inputs["index"] = rows.uids
    large = Rows(43, 64, 256)
    columns = [large.dirty(large.normal()) for _ in range(2)]
    probe = large.normal(256)
    for gamma, lam in [(1.0, 0.95), (0.99, 0.5)]:
        advantages, returns = advantage.compute_gae_advantage_return(*columns, large.mask, gamma, lam)
        yield f"advantages/large/{gamma}", torch.stack([advantages @ probe, returns @ probe])
    for method in ("pow", "max_min", "max_random"):
        yield f"pf_ppo/{method}", advantage.pf_ppo_weights(large.normal(20), method, 1.5)


def weights_of_the_rollout() -> Iterator[tuple[str, Tensor]]:
    """Yield importance weights, with the metrics of the mismatch in the order of their names."""
    for rows, noise in ((Rows(50), 0.0), (Rows(51), 0.5), (Rows(52), 8.0), (Rows(53, 64, 256), 0.4)):
        old = -rows.normal().abs()
        columns = (rows.dirty(old), rows.dirty(old + noise * rows.normal()), rows.mask)
        size = f"{len(old)}/{noise}"
        for level, mode in product(IS_LEVELS, IS_MODES):
            for upper, lower, veto in ((2.0, None, 1e-4), (1.2, 1.1, None)):
                options = (level, mode, upper, lower, veto)
                weights, metrics = mismatch.compute_rollout_importance_weights(*columns, *options)
                name = f"weights/{size}/{level}/{mode}/{upper}"
                yield f"{name}/metrics", ordered(metrics)
                assert weights is not None and weights.batch is not None
                found = weights.batch["rollout_is_weights"]
                yield name, found if len(old) == ROWS else found.sum(-1)
        yield f"mismatch/{size}", ordered(mismatch.compute_mismatch_metrics(*columns))
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data = DataProto.from_dict({**dict(zip(names, columns, strict=True)), "responses": rows.mask})
        yield f"gap/{size}", ordered(mismatch.calculate_debug_metrics(data))


def ordered(metrics: Mapping[str, float]) -> Tensor:
    """Return metrics in the order of their names."""
    return torch.tensor([float(metrics[name]) for name in sorted(metrics)], dtype=torch.float64)


GROUPS = {
    "policy": policy_losses,
    "other": other_losses,
    "estimators": estimators,
    "weights": weights_of_the_rollout,
}


def compute(group: str) -> dict[str, np.ndarray]:
    """Return all results of a group of functions, by name."""
    return {name: value.detach().numpy() for name, value in GROUPS[group]()}


if __name__ == "__main__":
    np.savez_compressed(FILE, **{name: value for group in GROUPS for name, value in compute(group).items()})
