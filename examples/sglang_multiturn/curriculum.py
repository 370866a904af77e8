"""A curriculum for GSM8K: problems with few calculation steps come first."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from verl.experimental.dataset.sampler import AbstractSampler

CALCULATION = "<<"
"""GSM8K writes each calculation of a solution as ``<<48/2=24>>``."""


class EasiestFirst(AbstractSampler):
    """Yields rows in the order of the number of calculations in ``extra_info.answer``; ties are in random order.

    The order depends only on the data and ``data.seed``, so a resumed run continues at the same row.
    """

    def __init__(self, data_source: Any, data_config: Mapping[str, Any]) -> None:
        steps = [info["answer"].count(CALCULATION) for info in data_source.dataframe["extra_info"]]
        order = list(range(len(steps)))
        random.Random(data_config.get("seed") or 0).shuffle(order)
        self.order = sorted(order, key=steps.__getitem__)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)
