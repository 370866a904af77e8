"""The mismatch of rollout and trainer: its metrics, and the importance weights that correct for it.

The engine that samples and the model that trains compute different log-probabilities for the same tokens. Two groups of
metrics show by how much:

- ``mismatch/*`` and the weights, by ``compute_rollout_importance_weights``, from the log-ratio
  ``old_log_prob - rollout_log_prob`` of each token, once per batch on the driver.
- ``training/rollout_*``, by ``calculate_debug_metrics``, from the absolute gap of the probabilities. They are made from
  sums (``gap_sums``), so that a worker can compute them next to the loss when the old log-probabilities never reach the
  driver (``gap_sum_metrics`` and ``finish_gap_metrics``).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregate import Extreme, Metric, Sum
from verl.algos.config import rollout_is_rules
from verl.base_config import ConfigError
from verl.errors import ContractError
from verl.protocol import DataProto
from verl.utils.numerics.quantiles import Floats, weighted_quantiles

PREFIX = "mismatch/"
MAX_LOG_WEIGHT = 20.0
PERCENTILES = (25, 50, 75, 95, 99)
QUANTILES = tuple(percentile / 100 for percentile in PERCENTILES)

logger = logging.getLogger(__name__)

_TOKEN_MASKS = ("response_mask", "attention_mask", "loss_mask")
_EPSILON = 1e-8

# Importance weights


Columns = dict[str, Tensor]
"""Statistics of the rows, each (B,) float64."""


@dataclass(frozen=True)
class WeightOptions:
    """The level of the weights, their thresholds, and the treatment of weights outside.

    Raises: ConfigError, a ValueError, for unknown names and for limits with no number between them.
    """

    level: str = "token"
    mode: str = "truncate"
    upper: float = 2.0
    given_lower: float | None = None
    veto: float | None = 1e-4

    def __post_init__(self) -> None:
        rules = rollout_is_rules(self.level, self.mode, self.upper, self.given_lower, self.veto)
        violations = [violation.under("algorithm") for violation in rules]
        if violations:
            raise ConfigError(violations)

    @cached_property
    def lower(self) -> float:
        """The lower threshold; by default the reciprocal of the upper one."""
        return 1.0 / self.upper if self.given_lower is None else self.given_lower

    @property
    def masks(self) -> bool:
        """Whether weights outside the thresholds become zero; ``clip`` is another name of ``mask``."""
        return self.mode in ("mask", "clip")


@dataclass
class Scan:
    """Sums of the rows that hold a token, and the weights and their percentiles if requested."""

    columns: Columns
    weights: Tensor | None = None
    percentiles: list[float] | None = None


def scan_log_probs(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, options: WeightOptions | None = None
) -> Scan:
    """Compare (B, T) log-probabilities; with ``options``, compute the importance weights (B, T) as well.

    All metrics are made of sums per row, so neither the order of the rows nor padding changes a number. Weights are in
    fp32, or fp64 if the inputs are, and zero outside the mask.

    Raises: ContractError, a ValueError and an AssertionError; ValueError when the shapes differ or a token inside the
    mask has no finite log-probability.
    Source: truncated importance sampling between engines, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (Yao et al. 2025); sequence level and masks, "When Speed Kills Stability" (Liu et al. 2025).
    """
    old, ratio, keep = _inside(old_log_prob, rollout_log_prob, response_mask)
    columns = _sums_of_rows(old, ratio, keep, options.veto if options else None)
    _check(columns)
    used = columns["tokens"] > 0
    if options is None:
        return Scan({name: column[used] for name, column in columns.items()})
    weights, more = _weigh(ratio, keep, columns, options)
    columns |= more
    if options.level == "token":
        ratios = ratio[keep].double().cpu().numpy()
        percentiles = [float(each) for each in np.quantile(_exp(ratios), QUANTILES)]
    else:
        percentiles = percentiles_of_rows(columns)
    return Scan({name: column[used] for name, column in columns.items()}, weights, percentiles)


def _inside(old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the old log-probabilities and the log-ratios, zero outside the mask and in fp32 or better, and the mask.

    Raises: ValueError when the shapes differ.
    """
    shapes = {tuple(tensor.shape) for tensor in (old, rollout, mask)}
    if len(shapes) != 1 or old.dim() != 2:
        raise ValueError(f"old_log_prob, rollout_log_prob and response_mask must have one shape (B, T), got {shapes}")
    keep = mask.bool()
    dtype = torch.promote_types(torch.promote_types(old.dtype, rollout.dtype), torch.float32)
    old = torch.where(keep, old.to(dtype), 0.0)
    return old, old - torch.where(keep, rollout.to(dtype), 0.0), keep


def _sums_of_rows(old: Tensor, ratio: Tensor, keep: Tensor, veto: float | None) -> Columns:
    """Return the sums of the rows that every level needs."""
    bounded = ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    catastrophic = torch.zeros_like(keep) if veto is None else keep & (ratio < math.log(veto))
    return {
        "tokens": keep.sum(-1).double(),
        "old": old.double().sum(-1),
        "log_ratio": ratio.double().sum(-1),
        "k3": (bounded.expm1() - ratio).double().sum(-1),
        "catastrophic": catastrophic.sum(-1).double(),
    }


def _weigh(ratio: Tensor, keep: Tensor, columns: Columns, options: WeightOptions) -> tuple[Tensor, Columns]:
    """Return the importance weights (B, T) and the sums of the rows for their metrics.

    The weight of a token is its own ratio, or the ratio of its whole sequence. A weight outside the thresholds becomes
    zero or, by ``truncate``, is capped at the upper one. A token below the veto threshold makes all weights of its
    sequence zero.
    """
    if options.level == "token":
        log_weight = ratio
    else:
        log_weight = columns["log_ratio"].unsqueeze(-1)
        if options.level == "geometric":
            log_weight = log_weight / columns["tokens"].clamp(min=1).unsqueeze(-1)
    bounded = log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    weight = bounded.exp()
    is_high = weight > options.upper
    is_low = weight < options.lower
    final = torch.where(is_high | is_low, 0.0, weight) if options.masks else weight.clamp(max=options.upper)
    is_used = keep & (columns["catastrophic"] == 0).unsqueeze(-1)
    weights = torch.where(is_used, final.to(ratio.dtype), 0.0)
    excess = bounded.expm1()  # keeps the digits of weights near one, which ``exp`` rounds away
    clamped = excess.clamp(options.lower - 1, options.upper - 1)
    of_tokens = {"excess": excess, "clamped": clamped, "clamped_sq": clamped.square(), "high": is_high, "low": is_low}
    sums = {name: torch.where(keep, value, 0).double().sum(-1) for name, value in of_tokens.items()}
    sums["smallest"] = torch.where(keep, log_weight, math.inf).double().amin(-1)
    sums["largest"] = torch.where(keep, log_weight, -math.inf).double().amax(-1)
    if options.level != "token":
        sums["log_weight"] = log_weight.squeeze(-1)
    return weights, sums


def percentiles_of_rows(columns: Columns) -> list[float]:
    """Return the percentiles of the weights of whole responses over the tokens of the batch."""
    weights = _exp(columns["log_weight"].cpu().numpy())
    return weighted_quantiles(weights, columns["tokens"].long().cpu().numpy(), QUANTILES)


def _exp(log_ratio: Floats) -> Floats:
    return np.exp(np.clip(log_ratio, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))


def _check(columns: Columns) -> None:
    """Reject sums without a token and sums that are not finite."""
    if not columns or not columns["tokens"].any():
        raise ContractError("response_mask keeps no token: there is nothing to compare and nothing to weigh")
    for name, tensor in (("old", "old_log_prob"), ("log_ratio", "rollout_log_prob")):
        bad = (~columns[name].isfinite()).nonzero().flatten().tolist()
        if bad:
            shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            raise ValueError(f"{tensor} holds NaN or an infinity where response_mask is 1, in rows {shown}")


def _weight_metrics(scan: Scan, options: WeightOptions) -> dict[str, float]:
    """Return statistics of the importance weights before thresholds and veto, over tokens and over sequences.

    Deviation and effective sample size are those of weights clamped to the thresholds: a few huge weights would decide
    both.
    """
    columns = scan.columns
    tokens = columns["tokens"]
    outside = columns["high"] + columns["low"]
    count = tokens.sum()

    def mean(name: str) -> Tensor:
        return columns[name].sum() / count

    def of_sequences(name: str) -> Tensor:
        return (columns[name] > 0).double().mean()

    # Clamped weights are held as their distance from one: differences of squares would lose small spreads.
    clamped = mean("clamped")
    clamped_sq = mean("clamped_sq")
    normaliser = 1 + clamped + _EPSILON
    share = of_sequences if options.level == "sequence" else mean
    found = {
        "rollout_is_mean": 1 + mean("excess"),
        "rollout_is_std": (clamped_sq - clamped.square()).clamp(min=0).sqrt(),
        "rollout_is_max": columns["largest"].max().clamp(max=MAX_LOG_WEIGHT).exp(),
        "rollout_is_min": columns["smallest"].min().clamp(max=MAX_LOG_WEIGHT).exp(),
        "rollout_is_eff_sample_size": normaliser.square() / (clamped_sq + 2 * clamped + 1),
        "rollout_is_ratio_fraction_high": share("high"),
        "rollout_is_ratio_fraction_low": share("low"),
        "rollout_is_veto_fraction": of_sequences("catastrophic"),
        "rollout_is_catastrophic_token_fraction": mean("catastrophic"),
    }
    if options.level == "token":
        found["rollout_is_min"].clamp_(min=math.exp(-MAX_LOG_WEIGHT))
    found |= _sequence_metrics(1 + columns["excess"] / tokens, options)
    if options.masks:
        found["rollout_is_masked_fraction"] = outside.sum() / count
        found["rollout_is_seq_masked_fraction"] = (outside > 0).double().mean()
    if options.mode == "clip":
        found["rollout_is_clipped_fraction"] = found["rollout_is_masked_fraction"]
    assert scan.percentiles is not None
    percentiles = {f"rollout_is_p{p}": value for p, value in zip(PERCENTILES, scan.percentiles, strict=True)}
    return {name: value.item() for name, value in found.items()} | percentiles


def _sequence_metrics(means: Tensor, options: WeightOptions) -> Columns:
    """Return the statistics of the mean weights (N,) of the sequences."""
    return {
        "rollout_is_seq_mean": means.mean(),
        "rollout_is_seq_std": means.std(correction=min(1, len(means) - 1)),
        "rollout_is_seq_max": means.max(),
        "rollout_is_seq_min": means.min(),
        "rollout_is_seq_max_deviation": (means - 1).abs().max(),
        "rollout_is_seq_fraction_high": (means > options.upper).double().mean(),
        "rollout_is_seq_fraction_low": (means < options.lower).double().mean(),
    }


def _log_prob_metrics(columns: Columns, with_rollout: bool = True) -> dict[str, float]:
    """Return perplexities, KL and differences of rollout and trainer; without a rollout, the trainer's perplexities."""
    tokens = columns["tokens"]
    training = columns["old"] / tokens
    found = {"mismatch_training_ppl": (-training).exp().mean(), "mismatch_training_log_ppl": -training.mean()}
    if with_rollout:
        difference = -columns["log_ratio"] / tokens
        rollout = training + difference
        found |= {
            "mismatch_rollout_ppl": (-rollout).exp().mean(),
            "mismatch_rollout_log_ppl": -rollout.mean(),
            "mismatch_kl": -columns["log_ratio"].sum() / tokens.sum(),
            "mismatch_k3_kl": columns["k3"].sum() / tokens.sum(),
            "mismatch_log_ppl_diff": difference.mean(),
            "mismatch_log_ppl_abs_diff": difference.abs().mean(),
            "mismatch_log_ppl_diff_max": difference.max(),
            "mismatch_log_ppl_diff_min": difference.min(),
            "mismatch_ppl_ratio": difference.exp().mean(),
        }
    return {name: value.item() for name, value in found.items()}


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = 1e-4,
) -> tuple[DataProto | None, dict[str, float]]:
    """Weigh each token by how much likelier it is in training than in the rollout, within thresholds.

    Args: log-probabilities and mask are (B, T). ``token`` weighs each token by its own ratio, ``sequence`` by the
        product over its sequence, ``geometric`` by the product's geometric mean. ``truncate`` caps at the upper
        threshold; ``mask``, also spelled ``clip``, sets weights outside both thresholds to zero. The lower threshold
        defaults to the reciprocal of the upper one. A sequence with a token whose ratio is below the veto threshold
        gets zero.
    Returns: a batch with ``rollout_is_weights`` (B, T), and metrics under ``mismatch/``; (None, {}) without threshold.
    Raises: ValueError for an unknown level or mode, thresholds with no number between them, shapes that differ, and NaN
        inside the mask; for an empty mask one that is also an AssertionError.
    """
    if rollout_is_threshold is None:
        return None, {}
    options = WeightOptions(
        rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is_threshold_lower, rollout_is_veto_threshold
    )
    scan = scan_log_probs(old_log_prob, rollout_log_prob, response_mask, options)
    metrics = _weight_metrics(scan, options) | _log_prob_metrics(scan.columns)
    assert scan.weights is not None
    weights = DataProto.from_dict(tensors={"rollout_is_weights": scan.weights})
    return weights, {PREFIX + name: value for name, value in metrics.items()}


def compute_is_metrics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float = 2.0,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = 1e-4,
) -> dict[str, float]:
    """Return the statistics of the importance weights, without prefix; arguments as above.

    Raises: ValueError as above.
    """
    options = WeightOptions(
        rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is_threshold_lower, rollout_is_veto_threshold
    )
    return _weight_metrics(scan_log_probs(old_log_prob, rollout_log_prob, response_mask, options), options)


def compute_mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Return KL and perplexities of rollout and trainer, without prefix; without a rollout, only the trainer's.

    Raises: ValueError as above.
    """
    other = old_log_prob if rollout_log_prob is None else rollout_log_prob
    columns = scan_log_probs(old_log_prob, other, response_mask).columns
    return _log_prob_metrics(columns, with_rollout=rollout_log_prob is not None)


# Gap of the probabilities

GAP_MAXIMA = frozenset({"log_gap_max", "gap_max"})
"""The entries of ``gap_sums`` that combine by maximum."""

_CONSTANT = 1e-12
"""Variance relative to the mean square below which numbers count as equal; rounding in fp64 stays below it."""
_SUMS = "training/rollout_sums/"


def gap_sums_of_rows(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums over the tokens of each row (b, R) that ``gap_metrics`` needs, (b,) float64."""
    keep = mask.bool()
    ours = torch.where(keep, log_probs.double(), 0.0)
    theirs = torch.where(keep, rollout_log_probs.double(), 0.0)
    log_gap = (ours - theirs).abs()  # zero outside the mask, and so is the gap
    x = torch.where(keep, ours.exp(), 0.0)
    y = torch.where(keep, theirs.exp(), 0.0)
    gap = (x - y).abs()
    sums = {"log_gap": log_gap, "gap": gap, "gap_sq": gap**2, "x": x, "y": y, "xx": x**2, "yy": y**2, "xy": x * y}
    return {
        "count": keep.sum(-1).double(),
        "log_gap_max": log_gap.amax(-1),
        "gap_max": gap.amax(-1),
        **{name: value.sum(-1) for name, value in sums.items()},
    }


def gap_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums of all (b, R) tokens inside the mask, float64 scalars."""
    rows = gap_sums_of_rows(log_probs, rollout_log_probs, mask)
    nothing = mask.new_zeros(1, dtype=torch.float64)
    return {name: torch.cat([each, nothing]).max() if name in GAP_MAXIMA else each.sum() for name, each in rows.items()}


def gap_metrics_of_rows(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of a batch from the ``gap_sums`` of its rows, (B,) each."""
    return gap_metrics(
        {name: (each.max() if name in GAP_MAXIMA else each.sum()).item() for name, each in columns.items()}
    )


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a whole batch from its sums.

    Without a token the only metric is ``valid`` = 0. The correlation is left out if all tokens of one side are equally
    likely.
    """
    count = sums["count"]
    if not count:
        return {"training/rollout_probs_diff_valid": 0}
    mean = {name: value / count for name, value in sums.items()}
    unbiased = count / max(count - 1, 1)
    metrics: dict[str, float] = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": sums["gap_max"],
        "training/rollout_probs_diff_mean": mean["gap"],
        "training/rollout_probs_diff_std": math.sqrt(max(mean["gap_sq"] - mean["gap"] ** 2, 0.0) * unbiased),
        "training/rollout_log_prob_diff_max": sums["log_gap_max"],
        "training/rollout_log_prob_diff_mean": mean["log_gap"],
    }
    spread_x = mean["xx"] - mean["x"] ** 2
    spread_y = mean["yy"] - mean["y"] ** 2
    if spread_x > _CONSTANT * mean["xx"] and spread_y > _CONSTANT * mean["yy"]:
        correlation = (mean["xy"] - mean["x"] * mean["y"]) / math.sqrt(spread_x * spread_y)
        metrics["training/rollout_actor_probs_pearson_corr"] = min(max(correlation, -1.0), 1.0)
    return metrics


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """Compare ``rollout_log_probs`` with ``old_log_probs`` over the sampled tokens.

    The first of ``response_mask``, ``attention_mask`` and ``loss_mask`` says which tokens these are; without one they
    are all.

    Returns: the difference of the probabilities (``valid, max, mean, std``), their correlation if it is defined, and
        the largest and mean absolute difference of the log-probabilities.
    """
    batch = data.batch
    assert batch is not None
    name = next((name for name in _TOKEN_MASKS if name in batch.keys()), None)
    if name is None:
        logger.warning("the batch holds none of %s: comparing all tokens", ", ".join(_TOKEN_MASKS))
    mask = torch.ones_like(batch["old_log_probs"]) if name is None else batch[name]
    columns = (batch["old_log_probs"], batch["rollout_log_probs"], mask[:, -batch["responses"].shape[-1] :])
    return gap_metrics({name: value.item() for name, value in gap_sums(*columns).items()})


def gap_sum_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return ``gap_sums`` of a micro-batch (b, R) as metrics, which an engine adds up over the mini-batch."""
    return {
        _SUMS + name: Extreme(value, "max") if name in GAP_MAXIMA else Sum(value, "constant")
        for name, value in gap_sums(log_probs, rollout_log_probs, mask).items()
    }


def finish_gap_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Compute the final metrics from the sums of ``gap_sum_metrics``; other metrics pass through."""
    sums = {name.removeprefix(_SUMS): value for name, value in metrics.items() if name.startswith(_SUMS)}
    rest = {name: value for name, value in metrics.items() if not name.startswith(_SUMS)}
    return rest | gap_metrics(sums) if sums else rest
