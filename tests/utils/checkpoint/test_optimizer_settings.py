"""A resume with other settings of groups and schedules of the user's own goes on as a run that had them all along."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


def in_two_parts(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.25, total_iters=4), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, [4])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "linear": lambda optimizer: LinearLR(optimizer, 0.25, total_iters=6),
    "in two parts": in_two_parts,
}


class Run:
    """A model whose bias has a tenth of the rate, and no decay."""

    def __init__(self, kind: str, keeps: bool = False, **settings: Any) -> None:
        self.model = nn.Linear(2, 2)
        groups = [
            {"params": [self.model.weight]},
            {"params": [self.model.bias], "lr": settings["lr"] / 10, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(groups, **settings)
        self.schedule = SCHEDULES[kind](self.optimizer)
        self.manager = FSDPCheckpointManager(self.model, self.optimizer, self.schedule, keeps_settings=keeps)

    def step(self) -> list[tuple[float, ...]]:
        """Return rate, decay and momentum of each group in a step."""
        used = [(group["lr"], group["weight_decay"], group["momentum"]) for group in self.optimizer.param_groups]
        self.optimizer.step()
        self.schedule.step()
        return used


OLD: dict[str, Any] = {"lr": 0.4, "weight_decay": 0.1, "momentum": 0.9}
NEW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.5}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_groups_of_the_user_keep_their_multiples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, keeps: bool
) -> None:
    run = Run(kind, **OLD)
    for _ in range(3):
        run.step()
    run.manager.save_checkpoint(str(tmp_path), global_step=3)
    resumed, whole = Run(kind, keeps, **NEW), Run(kind, **(OLD if keeps else NEW))
    resumed.manager.load_checkpoint(str(tmp_path))
    for _ in range(3):
        whole.step()
    for _ in range(4):
        for found, expected in zip(resumed.step(), whole.step(), strict=True):
            assert found == pytest.approx(expected, rel=1e-12)
    for told in ("lr=0.1, and was 0.4", "lr=0.01, and was 0.04", "weight_decay=0.2, and was 0.1", "momentum=0.5, and"):
        assert f"optim.{told}" in caplog.text
