"""The tensor mathematics of PRIME: token rewards, losses of the reward model, advantages, and the prompt filter.

Source: PRIME (arXiv:2502.01456); the implicit process reward: arXiv:2412.01981.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algos.advantage import rows_to_use
from verl.errors import WrongInput
from verl.utils.groupwise import as_torch_index, group_sum
from verl.utils.torch_functional import masked_whiten

# ---- the reward of tokens


def token_rewards(log_ratio: Tensor, mask: Tensor, beta: float, granularity: str) -> Tensor:
    """Return the token rewards (B, R), given the log-ratio (B, R) of reward model and reference.

    With the granularity ``whole`` the sum over a response is the reward of its last token.

    Source: section 2.3, equation 3.
    """
    rewards = torch.where(mask.bool(), beta * log_ratio, 0.0)
    return at_last(rewards.sum(-1), mask) if granularity == "whole" else rewards


def largest_rest(rewards: Tensor) -> Tensor:
    """Return the largest magnitude of any undiscounted return, given the (B, R) token rewards."""
    return reverse_cumsum(rewards).abs().max()


def reverse_cumsum(values: Tensor) -> Tensor:
    """Return for each of the (B, R) values the sum of it and all later values of its row."""
    return values.flip(-1).cumsum(-1).flip(-1)


def at_last(values: Tensor, mask: Tensor) -> Tensor:
    """Spread (B,) values to (B, R), each at the last token of its row; a row without tokens is zero."""
    return values.unsqueeze(-1) * last_tokens(mask)


def last_tokens(mask: Tensor) -> Tensor:
    """Return a mask (B, R) of the last token of each row; a row without tokens has no mark."""
    columns = torch.arange(1, mask.shape[-1] + 1, device=mask.device) * mask.bool()
    return mask.bool() & (columns == columns.amax(-1, keepdim=True))


# ---- the losses of the reward model, for each response


def compute_ce_loss(log_ratio: Tensor, outcome: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the cross-entropy (B,) between the outcomes, in [0, 1], and the reward model's probabilities.

    Source: section 2.3, equation 4.
    """
    return F.binary_cross_entropy_with_logits(beta * summed(log_ratio, mask), outcome, reduction="none")


def compute_dpo_loss(log_ratio: Tensor, mask: Tensor, beta: float, rivals: "Rivals") -> Tensor:
    """Return the DPO loss (B,) of each response against the mean reward of its rivals.

    Plain form: ``-log sigmoid(side * (beta * log_ratio.sum() - mean_of_rivals)) * weight``.
    """
    margin = rivals.side * (beta * summed(log_ratio, mask) - rivals.reward)
    return -F.logsigmoid(margin) * rivals.weight


def summed(values: Tensor, mask: Tensor) -> Tensor:
    """Sum (B, R) values over the unmasked tokens of each row: (B,)."""
    return torch.where(mask.bool(), values, 0.0).sum(-1)


@dataclass
class Rivals:
    """For each response, what a pair loss compares it with: tensors (B,).

    The rivals of a right response are the responses to its prompt with a lower outcome; the rivals of a wrong response
    are those with a higher outcome.

    Attributes:
        reward: mean reward of the rivals; 0 if there are none.
        side: 1 for a right response, -1 for a wrong one.
        weight: weight of the response in the loss.
    """

    reward: Tensor
    side: Tensor
    weight: Tensor


def find_rivals(reward: Tensor, outcome: Tensor, index: np.ndarray, loss_type: str) -> Rivals:
    """Find the rivals of each response among the responses to its prompt, given rewards and outcomes (B,).

    With ``bon_acc`` and ``bon_rm`` the weight of a response is its density under best-of-n sampling by outcome or by
    reward: ``n * F ** (n - 1)``, where F is the share of the prompt's responses that are not better.

    Args: ``index`` holds the prompt of each response, (B,).
    """
    same = same_prompt(index)
    right = outcome > 0
    better = outcome.unsqueeze(0) > outcome.unsqueeze(1)  # [i, j]: j is better than i
    rival = same & torch.where(right.unsqueeze(1), better.T, better)
    count = rival.sum(-1)
    mean = (rival * reward.double()).sum(-1) / count.clamp(min=1)
    weight = torch.ones_like(reward, dtype=torch.float64)
    if loss_type != "dpo":
        ranked = outcome if loss_type == "bon_acc" else reward
        not_better = same & (ranked.unsqueeze(0) <= ranked.unsqueeze(1))
        size = same.sum(-1)
        weight = size * (not_better.sum(-1) / size.double()) ** (size - 1)
    return Rivals(mean.to(reward.dtype), right.to(reward.dtype) * 2 - 1, weight.to(reward.dtype))


def same_prompt(index: np.ndarray) -> Tensor:
    """Return which pairs of responses have the same prompt, (B, B), given the prompt of each, (B,)."""
    group = as_torch_index(index)
    return group.unsqueeze(0) == group.unsqueeze(1)


# ---- how well the reward model tells right from wrong


def compute_dpo_accuracy(reward: Tensor, outcome: Tensor, index: np.ndarray) -> float:
    """Return the share of pairs that the (B,) rewards rank in the order of their outcomes.

    Pairs are responses to one prompt with different outcomes. The share is averaged over the prompts that have such
    pairs; it is 0.5 if no prompt has.
    """
    group = as_torch_index(index)
    pairs = same_prompt(index) & (outcome.unsqueeze(0) > outcome.unsqueeze(1))
    ordered = pairs & (reward.unsqueeze(0) > reward.unsqueeze(1))
    num_groups = int(group.max()) + 1
    total = group_sum(pairs.sum(-1), group, num_groups)
    has_pairs = total > 0
    if not has_pairs.any():
        return 0.5
    return float((group_sum(ordered.sum(-1), group, num_groups)[has_pairs] / total[has_pairs]).mean())


def compute_dpo_abs_accuracy(reward: Tensor, outcome: Tensor) -> float:
    """Return the share of responses whose reward (B,) has the right sign: above 0 if and only if the outcome is."""
    return float(((reward > 0) == (outcome > 0)).double().mean())


# ---- advantages


def compute_rloo_advantage_return(
    streams: list[tuple[Tensor, Tensor]], response_mask: Tensor, index: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (B, R) of several streams of token rewards, each with its own RLOO baseline.

    A stream is a pair of weighted rewards and the mask of the tokens that have one, both (B, R). The return of a token
    is the sum of rewards minus baselines over this and all later tokens. Rows that every estimator leaves out
    (``verl.algos.advantage.rows_to_use``) get zeros.

    Source: section 3.2, equation 5.
    """
    used = rows_to_use(response_mask, index).unsqueeze(-1)
    kept = response_mask * used
    parts = [masked_rloo(rewards, mask * used, index) for rewards, mask in streams]
    returns = reverse_cumsum(sum(parts, torch.zeros(kept.shape)) * kept)
    return masked_whiten(returns, kept) * kept, returns


def masked_rloo(rewards: Tensor, mask: Tensor, index: np.ndarray) -> Tensor:
    """Subtract a leave-one-out baseline from (B, R) rewards.

    Plain form, under the mask: ``n / (n - 1) * rewards - means.sum() / (n - 1)``, where ``means`` holds the masked mean
    of each of the prompt's n samples. A prompt with one sample has no baseline, and a row without tokens is not a
    sample.
    """
    mask = mask.bool()
    means = summed(rewards, mask) / mask.sum(-1).clamp(min=1)
    group = as_torch_index(index)
    sizes = group_sum(mask.any(-1), group, int(group.max()) + 1)
    others = (sizes - 1).clamp(min=1)
    baseline = group_sum(means, group, len(sizes)) * (sizes > 1) / others
    scale = torch.where(sizes > 1, sizes / others, 1.0)
    rest = scale[group].unsqueeze(-1) * rewards - baseline[group].unsqueeze(-1)
    return torch.where(mask, rest, 0.0).float()


# ---- the filter of prompts


@dataclass
class PromptFilter:
    """Prefers prompts with a mean accuracy between the bounds and no response of full length.

    None switches a criterion off.
    """

    least_accuracy: float | None = None
    most_accuracy: float | None = None
    full_length: int | None = None

    def preferred(self, outcomes: Tensor, lengths: Tensor) -> Tensor:
        """Return which prompts are preferred, (P,), by the outcomes and lengths (P, n) of their responses."""
        accuracy = outcomes.double().mean(-1)
        keep = torch.ones(len(outcomes), dtype=torch.bool)
        if self.least_accuracy is not None:
            keep &= accuracy >= self.least_accuracy
        if self.most_accuracy is not None:
            keep &= accuracy <= self.most_accuracy
        if self.full_length is not None:
            keep &= lengths.amax(-1) < self.full_length
        return keep


def preferred_first(preferred: Tensor, count: int) -> Tensor:
    """Return the indices (count,) of the first prompts, preferred ones before others, each in the order of the data."""
    return torch.argsort(preferred.int(), descending=True, stable=True)[:count]


def checked_outcome(outcome: Tensor, loss_type: str) -> Tensor:
    """Return the outcomes (B,) if the loss can be computed from them.

    Raises: WrongInput for outcomes outside of [0, 1] with the cross-entropy loss.
    """
    if loss_type == "ce" and ((outcome < 0) | (outcome > 1)).any():
        wrong = float(outcome[(outcome < 0) | (outcome > 1)][0])
        raise WrongInput(
            f"reward_model.model.loss_type=ce learns from outcomes in [0, 1], but the reward function returned "
            f"{wrong:g}: return a score between 0 and 1, or a dict with the entry acc; or write loss_type=dpo"
        )
    return outcome
