"""A scorer and rows that wait in the third step of a run until a test lets them go."""

import os
import time
from pathlib import Path

from tests.special_e2e import rewards
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset

GO, WAITS = "go", "waits"
"""Names of the file that lets them go, and of the one that says that they wait, in the folder of the run."""


def wait_in_third_step() -> None:
    """Wait while two steps stand in the record of ``HELD_RUN``, unless the test lets the run go."""
    folder = Path(os.environ["HELD_RUN"])
    record = folder / "metrics.jsonl"
    while not (folder / GO).exists() and record.exists() and record.read_bytes().count(b"\n") >= 2:
        (folder / WAITS).touch()
        time.sleep(0.02)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of ``rewards.compute_score``."""
    wait_in_third_step()
    return rewards.compute_score(data_source, solution_str, ground_truth)


def two_letters(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of ``rewards.two_letters``."""
    wait_in_third_step()
    return rewards.two_letters(data_source, solution_str, ground_truth, extra_info)


class HeldRows(MultiTurnSFTDataset):
    """Conversations."""

    def __getitem__(self, item):
        wait_in_third_step()
        return super().__getitem__(item)
