"""How far the rollout's log-probabilities are from the trainer's."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto


def calculate_debug_metrics(data: "DataProto") -> dict[str, Any]:
    """Compare ``rollout_log_probs`` with ``old_log_probs`` over the sampled tokens.

    Returns: the difference of the probabilities (``valid, max, mean, std``) and their correlation, where it is
        defined; the largest and mean absolute difference of the log-probabilities. With no token at all only
        ``valid`` = 0.
    """
    batch = data.batch
    assert batch is not None
    rollout, old = batch["rollout_log_probs"], batch["old_log_probs"]
    mask = batch["response_mask"] if "response_mask" in batch.keys() else batch["attention_mask"]
    keep = mask[:, -batch["responses"].shape[-1] :].bool()
    rollout, old = rollout[keep].double(), old[keep].double()
    if not len(old):
        return {"training/rollout_probs_diff_valid": 0}
    gap = (rollout.exp() - old.exp()).abs()
    log_gap = (rollout - old).abs()
    metrics: dict[str, Any] = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": gap.max().item(),
        "training/rollout_probs_diff_mean": gap.mean().item(),
        "training/rollout_probs_diff_std": gap.std(correction=min(1, len(gap) - 1)).item(),
        "training/rollout_log_prob_diff_max": log_gap.max().item(),
        "training/rollout_log_prob_diff_mean": log_gap.mean().item(),
    }
    correlation = pearson(rollout.exp(), old.exp())
    if correlation is not None:
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Return the correlation of two (N,) tensors, None where one of them is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = x.norm() * y.norm()
    return torch.dot(x, y).div(norm).clamp(-1, 1).item() if norm > 0 else None
