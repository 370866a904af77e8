"""What a supervised run leaves behind: its record, what the trackers were sent, and the report."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.observe.console import get_console
from verl.utils.observe.digest import random_state_digest, tensor_digest, weights_digest
from verl.utils.observe.record import RunRecord
from verl.utils.observe.tracking import Tracking
from verl.utils.report.page import write_report

logger = logging.getLogger(__name__)

GROUP = "trainer"
_GIB = 1024**3


class SupervisedOutput:
    """Publish the metrics of a run; rank 0 writes, and the other ranks report to it."""

    def __init__(self, config: Any, engine: Any, rank: int, resumed_step: int) -> None:
        """Open the outputs of a run that continues after ``resumed_step``, 0 where it starts from scratch."""
        trainer = config.trainer
        self._engine, self._rank, self._digests = engine, rank, trainer.record_digests
        self._folder, self._makes_report = trainer.default_local_dir, trainer.report
        self._process = psutil.Process()
        self.record: RunRecord | None = None
        self.tracking: Tracking | None = None
        if rank == 0:
            resolved: Any = OmegaConf.to_container(config, resolve=True)
            self.record = RunRecord(self._folder, resumed_step or None)
            self.tracking = Tracking(trainer.project_name, trainer.experiment_name, list(trainer.logger), resolved)

    def step(self, metrics: Mapping[str, float], timing: Mapping[str, float], batch: DataProto, step: int) -> None:
        """Publish a step; collective. ``timing`` holds seconds by name, ``step`` those of the training step itself."""
        started = time.perf_counter()
        reports = self._gather(self._report(timing["step"], batch))
        seconds = time.perf_counter() - started
        if self.record is None or self.tracking is None:
            return
        self.tracking.log(metrics, step)
        throughput = metrics["train/global_tokens"] / max(timing["step"], 1e-9) / len(reports)
        own = {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        own |= {"timing_s/train_batch": timing["step"], "timing_s/record": seconds, "perf/throughput": throughput}
        details: dict[str, Any] = {"workers": {GROUP: reports}}
        found = [(report["rank"], report.pop("digests", None)) for report in reports]
        if self._digests:
            details["phases"] = _phases(found)
        self.record.log({**metrics, **own}, step, details)

    def add(self, timing: Mapping[str, float], step: int) -> None:
        """Add the seconds of what came after a step."""
        if self.record is not None:
            self.record.log({f"timing_s/{name}": seconds for name, seconds in timing.items()}, step)

    def close(self) -> None:
        """Close the trackers and write the report, also of a run that was broken off."""
        if self.record is None or self.tracking is None:
            return
        self.tracking.finish()
        if not self.record.steps or not self._makes_report:
            return
        try:
            get_console().info("report: %s", write_report(self._folder))
        except ImportError as error:
            logger.warning("no report: %s; pip install matplotlib", error)
        except Exception:  # where the run has failed, its error is the one to show
            logger.warning("the report could not be made", exc_info=True)

    def _report(self, seconds: float, batch: DataProto) -> dict[str, Any]:
        """Return what this rank has to say of the step."""
        memory = {"host_gb": self._process.memory_info().rss / _GIB}
        if get_device_name() != "cpu":
            memory["device_gb"] = get_torch_device().memory_allocated() / _GIB
        report: dict[str, Any] = {"rank": self._rank, "seconds": {"train_batch": seconds}, "memory": memory}
        if self._digests:
            report["digests"] = {
                "batch": {name: tensor_digest(value.cpu()) for name, value in sorted(batch.batch.items())},
                "weights": weights_digest(self._engine.local_parameters()),
                "random state": random_state_digest(),
            }
        return report

    def _gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks."""
        if not torch.distributed.is_initialized():
            return [report]
        reports: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, report)
        return reports


def _phases(found: list[tuple[int, Any]]) -> dict[str, dict[str, str]]:
    """Return the digests of all ranks by phase, in the order in which a step runs."""
    phases: dict[str, dict[str, str]] = {"batch": {}, "weights": {}, "random state": {}}
    for rank, digests in found:
        phases["batch"] |= {f"{name}, rank {rank}": digest for name, digest in digests["batch"].items()}
        for phase in ("weights", "random state"):
            phases[phase][f"{GROUP}, rank {rank}"] = digests[phase]
    return phases
