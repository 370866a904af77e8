"""Details of a step in the record of a run: digests by phase, reports of the workers, lengths and samples."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import ray
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.samples import sample_rows
from verl.trainer.ppo.shaping import compute_response_mask
from verl.trainer.ppo.state import Metrics
from verl.trainer.run.reports import take_digests
from verl.utils.observe.digest import column_digest, tensor_digest
from verl.utils.observe.record import Details
from verl.utils.observe.tracking import plain

Report = dict[str, Any]
"""The report of a worker on a step: rank, seconds by call, memory, and digests if asked for."""
LENGTH_BINS = 24
_OF_SCORE = ("rm_scores", "token_level_scores")
"""Columns that the phase ``score`` begins, although a later phase may add them."""
_COPY_OF = {"multi_modal_data": "multi_modal_inputs", "raw_prompt_ids": "input_ids"}
"""Columns of the data set, and the column of the batch that holds the same content."""


@dataclass
class StepRecord:
    """Gathers the details of one step after the other.

    Attributes:
        digests: whether to digest batches, weights and random states.
        num_samples: how many sample responses to keep of a step.
        tokenizer: decodes the samples; may be None if there are none.
        veto_threshold: ratio of trainer to rollout below which a token vetoes its response; None if nothing does.
        seconds: time spent on the record of the current step.
    """

    digests: bool
    num_samples: int
    tokenizer: PreTrainedTokenizerBase | None = None
    veto_threshold: float | None = None
    seconds: float = field(init=False, default=0.0)
    _phases: dict[str, dict[str, str]] = field(init=False, default_factory=dict)
    _seen: dict[str, Tensor] = field(init=False, default_factory=dict)
    _asked: dict[str, tuple[RayWorkerGroup, list[ray.ObjectRef[Report]]]] = field(init=False, default_factory=dict)

    def phase(self, name: str, batch: DataProto, row_order: Sequence[int] | None = None) -> None:
        """Digest the columns that a phase has added or replaced; a second run of a phase gets its own number.

        ``row_order`` puts the rows back in the order of the data, so that digests do not depend on the ranks. Columns
        of the data set belong to the first phase, ``prepare``.
        """
        if not self.digests or batch.batch is None:
            return
        started = time.perf_counter()
        new = {
            key: value
            for key, value in sorted(batch.batch.items())
            if isinstance(value, Tensor) and self._seen.get(key) is not value
        }
        self._seen.update(new)
        rows = None if row_order is None or list(row_order) == sorted(row_order) else torch.as_tensor(row_order)
        found = {key: tensor_digest(value if rows is None else value[rows]) for key, value in new.items()}
        if name == "prepare":
            columns = batch.non_tensor_batch
            chosen = [key for key in sorted(columns) if _COPY_OF.get(key) not in {*columns, *new}]
            found |= {key: column_digest(columns[key]) for key in chosen}
        times = sum(known.partition("#")[0] == name for known in self._phases)
        label = f"{name}#{times + 1}" if times else name
        self._phases[label] = {}
        scored = next((known for known in reversed(self._phases) if known.partition("#")[0] == "score"), label)
        for key, digest in found.items():
            self._phases[scored if key in _OF_SCORE else label][key] = digest
        self.seconds += time.perf_counter() - started

    def ask_workers(self, groups: Mapping[str, RayWorkerGroup]) -> None:
        """Let the workers report while the driver goes on; ``finish`` takes their reports."""
        started = time.perf_counter()
        self._asked = {
            name: (group, group.report_step(self.digests))
            for name, group in groups.items()
            if hasattr(group, "report_step")  # a fork's worker class need not have it
        }
        self.seconds += time.perf_counter() - started

    def finish(self, batch: DataProto, metrics: Metrics) -> Details:
        """Return the details of the step that ends, ready for JSON, and begin the next step.

        The time that the record took goes to the metric ``timing_s/record``.
        """
        started = time.perf_counter()
        details: dict[str, Any] = {"response_length": length_histogram(batch)}
        if self.num_samples:  # while the workers report
            assert self.tokenizer is not None
            details["samples"] = sample_rows(batch, self.tokenizer, self.num_samples, self.veto_threshold)
        workers = {name: group.wait(reports, "report_step") for name, (group, reports) in self._asked.items()}
        if self.digests:
            details["phases"] = self._phases | take_digests(workers)
        driver = {"rank": 0, "seconds": {}, "memory": {"host_gb": psutil.Process().memory_info().rss / 1024**3}}
        details["workers"] = workers | {"driver": [driver]}
        self._phases = {}
        self._seen = {}
        self._asked = {}
        kept: Details = plain(details)
        metrics["timing_s/record"] = self.seconds + time.perf_counter() - started
        self.seconds = 0.0
        return kept


def length_histogram(batch: DataProto) -> dict[str, Any]:
    """Return the counts of response lengths in equal bins from 0 to ``limit`` tokens."""
    attended = compute_response_mask(batch)
    limit = attended.shape[-1]
    lengths = attended.sum(-1).numpy()
    counts, _ = np.histogram(lengths, bins=min(LENGTH_BINS, limit), range=(0, limit))
    return {"limit": limit, "counts": counts.tolist()}
