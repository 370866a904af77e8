"""What makes a run of the quick start fail in each way that its report flags; loaded by its workers where it is named.

A policy loss that keeps what it should let go, one that is once no number, and rewards that ask for the wrong thing.
"""

import torch

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

KEPT: list[torch.Tensor] = []
CALLS: list[int] = []
BAD_CALL = 5


@register_policy_loss("leaky")
def leaky(*args, **kwargs):
    """Keep 32 MiB of every micro-batch."""
    KEPT.append(torch.ones(8 << 20))
    return get_policy_loss_fn("vanilla")(*args, **kwargs)


@register_policy_loss("not_finite")
def not_finite(*args, **kwargs):
    """Return no number for the fifth micro-batch."""
    CALLS.append(1)
    loss, *rest = get_policy_loss_fn("vanilla")(*args, **kwargs)
    return (loss * float("nan") if len(CALLS) == BAD_CALL else loss, *rest)


def as_long_as_possible(data_source, solution_str, ground_truth, extra_info=None):
    """Return how long a response is, whatever it says."""
    return min(len(solution_str), 128) / 128


def sevens(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of sevens, half of it for most prompts: a policy that only says 7 cannot get more."""
    share = solution_str.count("7") / max(1, len(solution_str))
    return share * (1.0 if int(str(ground_truth).replace(",", "")) % 4 == 0 else 0.5)


def fails_for_some(data_source, solution_str, ground_truth, extra_info=None):
    """Raise for every seventh prompt."""
    if extra_info["index"] % 7 == 3:
        raise KeyError("the answer key has no such row")
    return float(solution_str.strip().endswith("#### " + str(ground_truth)))
