"""Draw tokens by seed and position, so that a draw depends on nothing else of its batch."""

import torch
from torch import Tensor

_GOLDEN_64, _GOLDEN_32 = 0x9E3779B97F4A7C15 - 2**64, 0x9E3779B9 - 2**32  # as signed integers
_LARGEST_UNIFORM = 1 - 2.0**-24


def draw_by_seed(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row with probabilities in proportion to its weights.

    Plain form: ``argmax(weights / exponential)``, where the exponential variable of row and column is a hash of the
    row's seed and position and of the column. This is exponential racing: of several exponential variables, each is the
    smallest one with a probability in proportion to its rate.

    Args: ``weights`` (N, V) are not negative; ``seeds`` and ``positions`` (N,) are integers.
    Returns: columns (N,), int64.
    """
    keys = _mix_64(seeds.to(torch.int64) + positions.to(torch.int64) * _GOLDEN_64)[:, None]  # (N, 1)
    columns = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device) * _GOLDEN_32
    hashed = _mix_32(columns + keys.to(torch.int32))
    hashed = _mix_32(hashed.bitwise_xor_((keys >> 32).to(torch.int32)))
    # 31 bits, of which a float keeps those that tell small numbers apart: they decide between unlikely tokens
    uniform = hashed.bitwise_and_(2**31 - 1).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_UNIFORM)
    exponential = uniform.neg_().log1p_().neg_()
    return (weights / exponential).argmax(dim=-1)


def keep_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities (N, V) without the tokens that the limits (N,) of a row exclude; they are not normalised.

    ``top_k`` keeps the k most likely tokens, ``top_p`` the fewest that reach this sum, and ``min_p`` those with at
    least this share of the largest probability. A row without limits stays as it is.
    """
    limited = ((top_k < probabilities.shape[1]) | (top_p < 1) | (min_p > 0)).nonzero()[:, 0]
    if not len(limited):
        return probabilities
    likely, columns = probabilities[limited].sort(dim=-1, descending=True, stable=True)
    before = likely.cumsum(dim=-1) - likely
    rank = torch.arange(likely.shape[1], device=likely.device)
    excluded = rank >= top_k[limited, None]
    excluded |= (before > top_p[limited, None]) & (top_p[limited, None] < 1)
    excluded |= likely < likely[:, :1] * min_p[limited, None]
    kept = probabilities.clone()
    kept[limited] = torch.zeros_like(likely).scatter_(1, columns, likely.masked_fill_(excluded, 0.0))
    return kept


def log_probs_within(log_probs: Tensor, kept: Tensor, rows: Tensor) -> Tensor:
    """Renormalise log-probabilities (N, V) of the given ``rows`` over the tokens whose ``kept`` (N, V) is not 0."""
    part = log_probs[rows].masked_fill(kept[rows] == 0, -torch.inf)
    return log_probs.index_copy(0, rows, part - part.logsumexp(dim=-1, keepdim=True))


def _mix_64(x: Tensor) -> Tensor:
    """Return a hash of each int64 (the finaliser of SplitMix64)."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _mix_32(x: Tensor) -> Tensor:
    """Return a hash of each int32 (the finaliser of MurmurHash3), in the memory of ``x``."""
    x = x.bitwise_xor_(_shifted(x, 16)).mul_(0x85EBCA6B - 2**32)
    x = x.bitwise_xor_(_shifted(x, 13)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right, with zeros for the sign."""
    return (x >> bits).bitwise_and_((1 << (torch.iinfo(x.dtype).bits - bits)) - 1)
