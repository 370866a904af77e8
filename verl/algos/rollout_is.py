"""How far the engine that samples is from the model that trains, and the importance weights that correct for it.

The log-ratio of a token is ``old_log_prob - rollout_log_prob``. The batch is read once, in blocks of whole rows that
fit into a cache; a block leaves sums per row, and all metrics come from these. So nothing of the size of the batch is
made but the weights, and neither the order of the rows nor padding reaches a number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.algos.config import rollout_is_rules
from verl.algos.quantiles import StreamedQuantiles, weighted_quantiles
from verl.base_config import ConfigError

MAX_LOG_WEIGHT = 20.0
PERCENTILES = (25, 50, 75, 95, 99)
QUANTILES = tuple(percentile / 100 for percentile in PERCENTILES)

_BLOCK = 1 << 17  # elements
_SAMPLE = 1 << 15
_EPSILON = 1e-8

Columns = dict[str, Tensor]
"""Statistics of the rows, each (B,) float64."""


class EmptyMaskError(ValueError, AssertionError):
    """The response mask keeps no token at all."""


@dataclass(frozen=True)
class WeightOptions:
    """What is computed over, what happens outside the thresholds, and the thresholds themselves.

    Raises: ConfigError, a ValueError, for unknown names and limits that leave nothing between them.
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
        """The lower threshold; where none was given, the reciprocal of the upper one."""
        return 1.0 / self.upper if self.given_lower is None else self.given_lower

    @property
    def masks(self) -> bool:
        """Whether weights outside the thresholds become zero; ``clip`` is another name of ``mask``."""
        return self.mode in ("mask", "clip")


@dataclass
class Scan:
    """What one pass over a batch has found: sums of the rows that hold a token, and, where asked for, the weights."""

    columns: Columns
    weights: Tensor | None = None
    percentiles: list[float] | None = None


def scan_log_probs(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, options: WeightOptions | None = None
) -> Scan:
    """Read (B, T) log-probabilities once; with ``options``, make the importance weights (B, T) as well.

    Weights are in fp32, or fp64 where the inputs are, and zero outside the mask.

    Raises: EmptyMaskError, a ValueError and an AssertionError; ValueError when the shapes differ or a token inside the
    mask has no finite log-probability.
    Source: truncated importance sampling between engines, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (Yao et al. 2025); sequence level and masks, "When Speed Kills Stability" (Liu et al. 2025).
    """
    shapes = {tuple(tensor.shape) for tensor in (old_log_prob, rollout_log_prob, response_mask)}
    if len(shapes) != 1 or old_log_prob.dim() != 2:
        raise ValueError(f"old_log_prob, rollout_log_prob and response_mask must have one shape (B, T), got {shapes}")
    batch = _Batch(old_log_prob, rollout_log_prob, response_mask)
    weights = torch.empty(old_log_prob.shape, dtype=batch.dtype, device=old_log_prob.device) if options else None
    by_token = options is not None and options.level == "token"
    quantiles = StreamedQuantiles(QUANTILES, batch.sample()) if by_token else None
    parts = []
    for block in batch:
        part = block.columns(options.veto if options else None)
        if options and weights is not None and quantiles:
            part |= block.weigh(options, part["catastrophic"] > 0, weights[block.rows])
            quantiles.add(block.ratio_or_inf.cpu().numpy())
        parts.append(part)
    columns = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]} if parts else {}
    _check(columns)
    percentiles = None
    if quantiles:
        count = int(columns["tokens"].sum())
        percentiles = quantiles.result(count, _exp) or batch.all_quantiles(count)
    elif options and weights is not None:
        factors, more = _weigh_rows(columns, options)
        weights.copy_(response_mask).mul_(factors.to(batch.dtype).unsqueeze(-1))
        columns |= more
        percentiles = weighted_quantiles(
            _exp(columns["log_weight"].cpu().numpy()), columns["tokens"].long().cpu().numpy(), QUANTILES
        )
    used = columns["tokens"] > 0
    return Scan({name: column[used] for name, column in columns.items()}, weights, percentiles)


def _exp(log_ratio: NDArray[Any]) -> NDArray[Any]:
    return np.exp(np.clip(log_ratio, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))


def _check(columns: Columns) -> None:
    """Hold the sums to what can be used: some token, and nothing but numbers."""
    if not columns or not columns["tokens"].any():
        raise EmptyMaskError("response_mask keeps no token: there is nothing to compare and nothing to weigh")
    for name, tensor in (("old", "old_log_prob"), ("log_ratio", "rollout_log_prob")):
        bad = (~columns[name].isfinite()).nonzero().flatten().tolist()
        if bad:
            shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            raise ValueError(f"{tensor} holds NaN or an infinity where response_mask is 1, in rows {shown}")


class _Batch:
    """The inputs, read in blocks of whole rows; the blocks share their buffers, so each is used before the next."""

    def __init__(self, old: Tensor, rollout: Tensor, mask: Tensor) -> None:
        self.old, self.rollout, self.mask = old, rollout, mask
        self.dtype = torch.promote_types(torch.promote_types(old.dtype, rollout.dtype), torch.float32)
        self.bits_dtype = torch.int64 if self.dtype == torch.float64 else torch.int32

    def __iter__(self) -> Iterator["_Block"]:
        num_rows, width = self.mask.shape
        step = min(num_rows, max(1, _BLOCK // max(width, 1)))
        buffers = [torch.empty(step, width, dtype=self.dtype, device=self.mask.device) for _ in range(6)]
        for start in range(0, num_rows if width else 0, max(step, 1)):
            rows = slice(start, min(start + step, num_rows))
            yield _Block(self, rows, [buffer[: rows.stop - start] for buffer in buffers])

    def sample(self) -> NDArray[Any]:
        """Return log-ratios (m,) of tokens, evenly over rows and columns; none of a batch small enough to keep."""
        num_rows, width = self.mask.shape
        if num_rows * width <= 2 * _SAMPLE:
            return self._empty()
        step = num_rows * width // _SAMPLE
        while math.gcd(step, width) > 1:  # otherwise it would stay in some of the columns
            step += 1
        flat = torch.arange(0, num_rows * width, step, device=self.mask.device)
        place = (flat // width, flat % width)
        ratio = self.old[place].to(self.dtype) - self.rollout[place].to(self.dtype)
        return ratio[self.mask[place].bool()].cpu().numpy()

    def all_quantiles(self, count: int) -> list[float]:
        """Return the percentiles by keeping all log-ratios: for the few batches that need it."""
        quantiles = StreamedQuantiles(QUANTILES, self._empty())
        for block in self:
            quantiles.add(block.ratio_or_inf.cpu().numpy())
        found = quantiles.result(count, _exp)
        assert found is not None, "a quantile lies among the elements that it is one of"
        return found

    def _empty(self) -> NDArray[Any]:
        return torch.empty(0, dtype=self.dtype).numpy()


class _Block:
    """Some rows of a batch, (b, T). What lies outside the mask, NaN included, is cleared by bits."""

    def __init__(self, batch: _Batch, rows: slice, buffers: list[Tensor]) -> None:
        self.rows, self.dtype = rows, batch.dtype
        bits, self.old, self.ratio, self.excess, self._spare, self._other = buffers
        inside = batch.mask[rows].bool()
        self.tokens = self._spare.copy_(inside).sum(-1)
        self.bits = bits.view(batch.bits_dtype).copy_(inside).neg_()  # all ones inside the mask
        self._keep(batch.old[rows].to(batch.dtype), out=self.old)
        self._keep(batch.rollout[rows].to(batch.dtype), out=self.ratio)
        torch.sub(self.old, self.ratio, out=self.ratio)

    def _keep(self, values: Tensor, out: Tensor) -> Tensor:
        """Write the values to ``out``, zeros outside the mask."""
        torch.bitwise_and(values.view(self.bits.dtype), self.bits, out=out.view(self.bits.dtype))
        return out

    def _or(self, outside: float, out: Tensor) -> Tensor:
        """Write the log-ratios to ``out``, and a number in place of the zeros outside the mask."""
        number = torch.tensor(outside, dtype=self.dtype, device=out.device).view(self.bits.dtype)
        pattern = out.view(self.bits.dtype)
        torch.bitwise_not(self.bits, out=pattern).bitwise_and_(number).bitwise_or_(self.ratio.view(pattern.dtype))
        return out

    @property
    def ratio_or_inf(self) -> Tensor:
        """The log-ratios, infinite outside the mask."""
        return self._or(math.inf, self._spare)

    def columns(self, veto: float | None) -> Columns:
        """Return what every level needs of the rows, and leave the weight less one, exact near one, in ``excess``."""
        torch.clamp(self.ratio, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT, out=self.excess).expm1_()
        columns = {
            "tokens": self.tokens,
            "old": self.old.sum(-1),
            "log_ratio": self.ratio.sum(-1),
            "k3": torch.sub(self.excess, self.ratio, out=self._spare).sum(-1),
            "catastrophic": torch.zeros_like(self.tokens),
        }
        if veto is not None:  # its logarithm is below zero: no padding
            columns["catastrophic"] = torch.lt(self.ratio, math.log(veto), out=self._spare).sum(-1)
        return columns

    def weigh(self, options: WeightOptions, vetoed: Tensor, out: Tensor) -> Columns:
        """Write the weights of the tokens to ``out`` (b, T); returns what the metrics need of the rows."""
        columns = {"excess": self.excess.sum(-1)}
        clamped = self.excess.clamp_(options.lower - 1, options.upper - 1)
        if not options.lower <= 1 <= options.upper:  # otherwise a ratio of one, as outside the mask, stays
            self._keep(clamped, out=clamped)
        columns |= {"clamped": clamped.sum(-1), "clamped_sq": torch.mul(clamped, clamped, out=self._spare).sum(-1)}
        columns["smallest"] = self.ratio_or_inf.amin(-1)
        columns["largest"] = self._or(-math.inf, self._spare).amax(-1)
        torch.exp(self.ratio, out=out).clamp_(math.exp(-MAX_LOG_WEIGHT), math.exp(MAX_LOG_WEIGHT))
        self._keep(out, out=out)
        high = torch.gt(out, options.upper, out=self._spare)
        low = self._keep(torch.lt(out, options.lower, out=self._other), out=self._other)
        columns |= {"high": high.sum(-1), "low": low.sum(-1)}
        if options.masks:
            out.addcmul_(out, high.add_(low), value=-1)
        else:
            out.clamp_(max=options.upper)
        if vetoed.any():
            out[vetoed] = 0
        return columns


def _weigh_rows(columns: Columns, options: WeightOptions) -> tuple[Tensor, Columns]:
    """Return the final weight (B,) of each sequence, and of its tokens what the metrics need."""
    tokens, log_weight = columns["tokens"], columns["log_ratio"]
    if options.level == "geometric":
        log_weight = log_weight / tokens.clamp(min=1)
    excess = log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).expm1()
    weight = log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    clamped = excess.clamp(options.lower - 1, options.upper - 1)
    high, low = weight > options.upper, weight < options.lower
    final = torch.where(high | low, 0.0, weight) if options.masks else weight.clamp(max=options.upper)
    return torch.where(columns["catastrophic"] > 0, 0.0, final), {
        "log_weight": log_weight,
        "smallest": log_weight,
        "largest": log_weight,
        "excess": excess * tokens,
        "clamped": clamped * tokens,
        "clamped_sq": clamped.square() * tokens,
        "high": high * tokens,
        "low": low * tokens,
    }


def weight_metrics(scan: Scan, options: WeightOptions) -> dict[str, float]:
    """Return the statistics of the importance weights, before thresholds and veto, over tokens and over sequences."""
    columns = scan.columns
    tokens, outside = columns["tokens"], columns["high"] + columns["low"]
    count = tokens.sum()

    def mean(name: str) -> Tensor:
        return columns[name].sum() / count

    def of_sequences(name: str) -> Tensor:
        return (columns[name] > 0).double().mean()

    # Clamped weights as their distance from one: differences of squares would lose small spreads.
    clamped, clamped_sq = mean("clamped"), mean("clamped_sq")
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


def mismatch_metrics(columns: Columns, with_rollout: bool = True) -> dict[str, float]:
    """Return perplexities, KL and their differences between the two; those of training alone on request."""
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
