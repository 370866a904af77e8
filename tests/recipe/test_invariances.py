"""Losses, advantages and metrics of the recipes: the same rows twice change nothing.

Nor do rows without a token, and tokens that the policy did not sample.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from recipe.entropy.entropy_ray_trainer import covariance_metrics
from recipe.prime import prime_core_algos as prime
from recipe.spin import core_algos as spin
from recipe.sppo.dp_actor import sppo_policy_loss
from recipe.sppo.sppo_ray_trainer import compute_advantage
from verl.protocol import DataProto

ROWS, WIDTH = 6, 4
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0]])
INDEX = np.array(["a", "a", "a", "b", "b", "b"], dtype=object)
Rows = dict[str, Tensor]
Figures = dict[str, Tensor]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BATCH = {
    "mask": MASK,
    "old": -draw(ROWS, WIDTH, seed=0).abs(),
    "new": -draw(ROWS, WIDTH, seed=1).abs(),
    "rewards": draw(ROWS, WIDTH, seed=2),
    "outcome": torch.tensor([1.0, 0, 1, 0, 0, 1], dtype=torch.float64),
}


def sppo(rows: Rows, index: np.ndarray) -> Figures:
    data = DataProto.from_dict({"response_mask": rows["mask"], "token_level_rewards": rows["rewards"]})
    advantages = compute_advantage(data, 2.0).batch["advantages"]
    new = rows["new"].clone().requires_grad_()
    loss, _, kl, _ = sppo_policy_loss(
        rows["old"], new, advantages, rows["mask"], "token-mean", SimpleNamespace(sppo_eta=0.7)
    )
    return {"loss": loss, "kl": kl, "of rows": advantages, "shared": torch.autograd.grad(loss, new)[0]}


def prime_advantages(rows: Rows, index: np.ndarray) -> Figures:
    mask, last = rows["mask"], prime.last_tokens(rows["mask"])
    streams = [(rows["rewards"], mask), (5.0 * prime.at_last(rows["outcome"], mask), last)]
    advantages, returns = prime.compute_rloo_advantage_return(streams, mask, index)
    return {"whitened": advantages, "of rows": returns}


def prime_losses(rows: Rows, index: np.ndarray) -> Figures:
    """Sums over responses of a micro-batch, divided by their number as an engine does."""
    ratio, mask, outcome = rows["new"] - rows["old"], rows["mask"], rows["outcome"]
    reward = prime.summed(ratio, mask)
    count = mask.any(-1).sum()
    rivals = prime.find_rivals(reward, outcome, index, "bon_rm")
    return {
        "ce": prime.compute_ce_loss(ratio, outcome, mask, 0.5).sum() / count,
        "dpo": prime.compute_dpo_loss(ratio, mask, 0.5, rivals).sum() / count,
        "acc": torch.tensor(prime.compute_dpo_accuracy(reward, outcome, index)),
        "abs": torch.tensor(prime.compute_dpo_abs_accuracy(reward, outcome)),
        "norm": prime.largest_rest(rows["rewards"] * mask),
    }


def spin_losses(rows: Rows, index: np.ndarray) -> Figures:
    pairs = spin.pairs_of(
        spin.summed(rows["new"] - rows["old"], rows["mask"]),
        spin.compute_onlineDPO_pref(rows["rewards"], rows["mask"]),
        0.1,
        0.05,
        "sigmoid",
    )
    count = rows["mask"].any(-1).sum()
    return {"loss": pairs.loss.sum() / count, "logits": pairs.logits.sum() / count, "of rows": pairs.gradient}


def covariances(rows: Rows, index: np.ndarray) -> Figures:
    found = covariance_metrics(rows["old"], rows["rewards"], rows["mask"], (0.1, 1.0))
    return {name: torch.tensor(value) for name, value in found.items()}


FIGURES = [sppo, prime_advantages, prime_losses, spin_losses, covariances]


@pytest.mark.parametrize("figures", FIGURES)
def test_the_same_rows_twice(figures: Callable[[Rows, np.ndarray], Figures]) -> None:
    once = figures(BATCH, INDEX)
    again = figures(
        {name: torch.cat([each, each]) for name, each in BATCH.items()}, np.concatenate([INDEX, INDEX + " again"])
    )
    count = int(MASK.sum())
    factor = {"shared": 0.5, "whitened": math.sqrt((2 * count - 1) / (2 * count - 2))}  # an unbiased deviation
    for name, value in once.items():
        value = value * factor.get(name, 1.0)
        torch.testing.assert_close(again[name], torch.cat([value, value]) if value.dim() else value)


@pytest.mark.parametrize("figures", [sppo, prime_advantages])
def test_rows_without_a_token(figures: Callable[[Rows, np.ndarray], Figures]) -> None:
    """As those of a trajectory that failed: whatever they hold, and though they have the uid of a prompt."""
    filled = {name: torch.cat([each, torch.full_like(each[:2], 3)]) for name, each in BATCH.items()}
    filled["mask"][ROWS:] = 0
    once, more = figures(BATCH, INDEX), figures(filled, np.concatenate([INDEX, INDEX[[0, -1]]]))
    for name, value in once.items():
        torch.testing.assert_close(more[name], torch.cat([value, value[:2] * 0]) if value.dim() else value)
    alone = figures({name: each[ROWS:] for name, each in filled.items()}, INDEX[[0, -1]]) if figures is sppo else {}
    assert all(not value.any() for value in alone.values())


@pytest.mark.parametrize("figures", FIGURES)
@pytest.mark.parametrize("after", range(WIDTH + 1))
def test_tokens_that_the_policy_did_not_sample(figures: Callable[[Rows, np.ndarray], Figures], after: int) -> None:
    """A tool's answer of three tokens, with numbers that a model computes for them as for others."""
    width = WIDTH + 3
    own = [at for at in range(width) if not after <= at < after + 3]
    inserted = {"outcome": BATCH["outcome"], "mask": torch.zeros(ROWS, width, dtype=torch.int64)}
    inserted |= {name: torch.full((ROWS, width), 7.0, dtype=torch.float64) for name in ("old", "new", "rewards")}
    for name in ("mask", "old", "new", "rewards"):
        inserted[name][:, own] = BATCH[name]
    once, found = figures(BATCH, INDEX), figures(inserted, INDEX)
    sampled, there = MASK.bool(), inserted["mask"].bool()
    for name, value in once.items():
        if value.dim() == 2:
            torch.testing.assert_close(found[name][there], value[sampled])
        else:
            torch.testing.assert_close(found[name], value)
