"""A worker dies in the middle of a phase while its peer waits in a collective."""

import time

import pytest

from .test_train import TWO_WORKERS, assert_names_the_death

POINTS = {"generate": "generate", "weight_sync": "generate"}
"""Where the worker dies, and the phase of the driver at that time."""


@pytest.mark.parametrize("point", POINTS)
def test_a_death_ends_the_run_at_once(workspace, tmp_path, point):
    fault = {"VERL_FAULT": f"kill:{point}:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = workspace.train(f"die-in-{point}", TWO_WORKERS, env=fault, fails=True)
    died_at, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith(point)
    assert time.time() - float(died_at) < 60
    assert_names_the_death(run.output, 1, POINTS[point], 2)


def test_a_hang_ends_the_run_after_the_timeout_of_the_group(workspace, tmp_path):
    """SIGSTOP: nothing has died, so only the peer's deadline in a collective can tell."""
    fault = {"VERL_FAULT": "hang:update_actor:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    timeout_s = 15
    overrides = TWO_WORKERS | {"actor_rollout_ref.nccl_timeout": timeout_s}
    run = workspace.train("hang-in-update", overrides, env=fault, fails=True)
    stopped_at, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith("update_actor")
    assert time.time() - float(stopped_at) < timeout_s + 60
    message = run.output[run.output.rindex("\nError: ") :]
    assert "WorkerTimeoutError: worker rank 1" in message and "update_actor, step 2" in message, message
    assert "rank 0 gave up waiting in a collective" in message, message
