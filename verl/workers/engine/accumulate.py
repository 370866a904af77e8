"""Sum unit counts and metrics over the micro-batches and ranks of a mini-batch, with one small collective each.

Sums are gathered in float64 and added in the order of the ranks, so the result is the same on all ranks and in every
run. An all-reduce in fp32 would add in an order that depends on the backend and the number of ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.algos.aggregate import UNITS, Extreme, Metric, Sum, count_units


@dataclass(frozen=True)
class Shares:
    """The ``size`` ranks whose rows make up a mini-batch; ``copies`` of them share each row.

    This rank takes shard ``dp_rank`` of a batch. ``dp_group`` holds the ranks with the other shards.
    """

    size: int
    copies: int
    device: torch.device
    group: ProcessGroup | None
    dp_rank: int
    dp_group: ProcessGroup | None

    @property
    def dp_size(self) -> int:
        """Number of shards into which a batch is cut."""
        return self.size // self.copies


def gather_rows(row: Tensor, shares: Shares) -> Tensor:
    """Return the float64 vectors of all ranks: (size, n)."""
    if shares.size == 1:
        return row.unsqueeze(0)
    row = row.to(shares.device)
    rows = [torch.empty_like(row) for _ in range(shares.size)]
    dist.all_gather(rows, row, group=shares.group)
    return torch.stack(rows).cpu()


def agree(mask: Tensor | None, num_micro_batches: int, shares: Shares) -> tuple[dict[str, float], int]:
    """Return the count of every unit in the global mini-batch, and the largest number of micro-batches of a rank."""
    counts = count_units(mask) if mask is not None else torch.zeros(len(UNITS), dtype=torch.float64)
    rows = gather_rows(torch.cat([counts.cpu(), torch.tensor([num_micro_batches], dtype=torch.float64)]), shares)
    total = rows[:, :-1].sum(0) / shares.copies  # ranks that share sequences counted the same rows
    units = {unit: max(float(count), 1.0) for unit, count in zip(UNITS, total, strict=True)}
    return units | {"constant": 1.0}, int(rows[:, -1].max())


class MetricSums:
    """Accumulate the metrics of the micro-batches of one mini-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, str]] = {}
        self._extremes: dict[str, tuple[Tensor, str]] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        """Add the metrics of one micro-batch."""
        for name, metric in metrics.items():
            if isinstance(metric, Sum):
                total = metric.total.detach().double()
                before = self._sums.get(name)
                self._sums[name] = (total if before is None else before[0] + total, metric.unit)
            elif isinstance(metric, Extreme):
                value = metric.value.detach().double()
                if name in self._extremes:
                    pick = torch.maximum if metric.kind == "max" else torch.minimum
                    value = pick(value, self._extremes[name][0])
                self._extremes[name] = (value, metric.kind)
            else:
                raise TypeError(f"metric {name!r} must be a Sum or an Extreme, got {type(metric).__name__}")

    def reduce(self, units: dict[str, float], shares: Shares) -> dict[str, float]:
        """Return the metrics of the global mini-batch; collective, equal on all ranks."""
        if not self._sums and not self._extremes:
            return {}
        parts = [value for value, _ in (*self._sums.values(), *self._extremes.values())]
        rows = gather_rows(torch.stack(parts).cpu(), shares)
        totals = (rows[:, : len(self._sums)].sum(0) / shares.copies).tolist()
        reduced = {
            name: total / units[unit] for (name, (_, unit)), total in zip(self._sums.items(), totals, strict=True)
        }
        for column, (name, (_, kind)) in enumerate(self._extremes.items(), start=len(self._sums)):
            values = rows[:, column]
            reduced[name] = float(values.max() if kind == "max" else values.min())
        return reduced
