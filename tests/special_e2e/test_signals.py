"""Signals to the launching process end the whole run."""

import os
import signal
import subprocess

import psutil
import pytest

from tests.waiting import wait_until

from .conftest import REPOSITORY, leftovers

FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, last",
    [
        (signal.SIGTERM, 143, "terminated"),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=FULL),
        pytest.param(signal.SIGKILL, -9, None, marks=FULL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_the_run_in_seconds(workspace, number, code, last):
    with subprocess.Popen(
        workspace.command(f"signal-{number}", {"trainer.total_training_steps": 10_000}),
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "VERL_FILE_LOGGER_ROOT": str(workspace.folder)},
        cwd=workspace.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        wait_until(lambda: has_worker(process.pid), pause_s=0.2)
        process.send_signal(number)
        output = process.communicate()[0]
    assert process.returncode == code, output
    assert last is None or output.strip().splitlines()[-1].removesuffix("\x1b[0m") == last, output
    assert not leftovers(process.pid)


def has_worker(session: int) -> bool:
    """Whether a worker of the run is at work: its process has imported torch."""
    for process in psutil.process_iter(["name", "memory_info"]):
        large = process.info["memory_info"] is not None and process.info["memory_info"].rss > 400 << 20
        if large and str(process.info["name"]).startswith("ray::Worker") and os.getsid(process.pid) == session:
            return True
    return False
