"""Policy filtration: learn more often from responses whose reward can be trusted."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto

_MIN_WEIGHT = 1e-8


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float) -> Tensor:
    """Return how likely each of (B,) scores is to be drawn, up to a factor.

    Raises: ValueError for an unknown method.
    """
    best = scores == scores.max()
    if reweight_method == "pow":
        weights = scores.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = (best | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(best, 0.4, 0.1)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method must be pow, max_min or max_random, got {reweight_method!r}"
        )
    return weights.clamp(min=_MIN_WEIGHT)


def compute_pf_ppo_reweight_data(
    data: "DataProto",
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    generator: torch.Generator | None = None,
) -> "DataProto":
    """Draw as many rows as the batch has, with replacement, by the weight of their ``token_level_scores``.

    Lists of that length in ``meta_info`` are drawn alike.

    Source: PF-PPO (arXiv:2409.06957), section 3.

    Raises: ValueError for an unknown method.
    """
    assert data.batch is not None
    weights = pf_ppo_weights(data.batch["token_level_scores"].sum(-1), reweight_method, weight_pow)
    rows = torch.multinomial(weights, len(weights), replacement=True, generator=generator)
    drawn = data.select_idxs(rows)
    drawn.meta_info = {
        key: [value[i] for i in rows.tolist()] if isinstance(value, list) and len(value) == len(rows) else value
        for key, value in data.meta_info.items()
    }
    return drawn
