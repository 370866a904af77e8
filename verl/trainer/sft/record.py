"""Publish the metrics of a supervised run; rank 0 writes, and the other ranks report to it."""

import time
from collections.abc import Mapping

import torch
from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.trainer.run.output import RunOutput
from verl.trainer.run.reports import RankReport, take_digests
from verl.trainer.sft.config import TrainerOptions
from verl.utils.observe.digest import random_state_digest, tensor_digest, weights_digest
from verl.utils.observe.record import Details
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.micro_batch import tensors_of
from verl.workers.roles.accounting import memory_in_use

GROUP = "trainer"


class SupervisedOutput:
    """Publish the metrics of a run."""

    def __init__(
        self, options: TrainerOptions, tree: DictConfig, engine: BaseEngine, rank: int, resumed_step: int, total: int
    ) -> None:
        """Open the outputs of a run of ``total`` steps that continues after ``resumed_step``; 0 starts from scratch."""
        self._engine = engine
        self._rank = rank
        self._digests = options.record_digests
        self._output = RunOutput(options, tree, resumed_step or None, total, describe_step) if rank == 0 else None

    def step(self, metrics: Mapping[str, float], timing: Mapping[str, float], batch: DataProto, step: int) -> None:
        """Publish a step; collective. ``timing`` holds seconds by name, ``step`` those of the training step alone."""
        started = time.perf_counter()
        reports = self._gather(self._report(timing["step"], batch))
        seconds = time.perf_counter() - started
        if self._output is None:
            return
        throughput = metrics["train/global_tokens"] / max(timing["step"], 1e-9) / len(reports)
        times = {f"timing_s/{name}": spent for name, spent in timing.items()}
        times |= {"timing_s/train_batch": timing["step"], "timing_s/record": seconds, "perf/throughput": throughput}
        details: Details = {}
        if self._digests:
            batches: dict[str, str] = {}
            for report in reports:
                found = report["digests"].pop("batch")
                batches |= {f"{name}, rank {report['rank']}": digest for name, digest in found.items()}
            details["phases"] = {"batch": batches} | take_digests({GROUP: reports})
        details["workers"] = {GROUP: [*reports]}
        self._output.log(metrics, step, details, times, finished=True)

    def add(self, timing: Mapping[str, float], step: int) -> None:
        """Add to the record the seconds spent after a step."""
        if self._output is not None:
            self._output.record.log({f"timing_s/{name}": seconds for name, seconds in timing.items()}, step)

    def close(self) -> None:
        """Close the outputs and write the report, also if the run has failed."""
        if self._output is not None:
            self._output.close()

    def _report(self, seconds: float, batch: DataProto) -> RankReport:
        """Return this rank's part of the record of a step."""
        report: RankReport = {"rank": self._rank, "seconds": {"train_batch": seconds}, "memory": memory_in_use()}
        if self._digests:
            tensors = tensors_of(batch)
            report["digests"] = {
                "batch": {name: tensor_digest(value.cpu()) for name, value in sorted(tensors.items())},
                "weights": weights_digest(self._engine.local_parameters()),
                "random_state": random_state_digest(),
            }
        return report

    def _gather(self, report: RankReport) -> list[RankReport]:
        """Return the reports of all ranks."""
        if not torch.distributed.is_initialized():
            return [report]
        reports = [report] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, report)
        return reports


def describe_step(metrics: Mapping[str, float]) -> list[str | None]:
    """Return the losses as the display shows them; None keeps the value of an earlier step."""
    return [
        f"{name} {metrics[key]:.4f}" if key in metrics else None
        for name, key in (("train", "train/loss"), ("val", "val/loss"))
    ]
