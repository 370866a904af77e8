import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from verl.utils import faults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill:update_actor", faults.Fault("kill", "update_actor")),
        ("hang:weight_sync:rank=1", faults.Fault("hang", "weight_sync", rank=1)),
        ("raise:generate:rank=0:step=2", faults.Fault("raise", "generate", rank=0, step=2)),
        ("skip:weight_sync:step=3", faults.Fault("skip", "weight_sync", step=3)),
        ("term:trainer_update_actor:on=gcs", faults.Fault("term", "trainer_update_actor", on="gcs")),
        ("kill:generate:on=scheduler:step=3", faults.Fault("kill", "generate", step=3, on="scheduler")),
    ],
)
def test_parse_fault(text, expected):
    assert faults.parse_fault(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("kill", "explode:update_actor", "kill:x:rank", "kill:x:rank=one", "kill:x:node=1"),
        *("kill:x:on=me", "slow:x:on=gcs", "skip:generate", "skip:weight_sync:rank=1"),
    ],
)
def test_parse_fault_names_what_is_wrong(text):
    with pytest.raises(ValueError, match="VERL_FAULT"):
        faults.parse_fault(text)


def test_a_fault_fires_once_where_it_is_meant(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FAULT", "raise:generate:rank=1:step=2")
    monkeypatch.setenv("VERL_FAULT_FILE", str(tmp_path / "fault"))
    faults.fault_point("update_actor", rank=1, step=2)
    faults.fault_point("generate", rank=0, step=2)
    faults.fault_point("generate", rank=1, step=1)
    assert not (tmp_path / "fault").exists()
    with pytest.raises(faults.InjectedFault, match="generate, rank 1, step 2"):
        faults.fault_point("generate", rank=1, step=2)
    assert "generate rank=1 step=2" in (tmp_path / "fault").read_text()
    faults.fault_point("generate", rank=1, step=2)


def test_a_point_is_skipped_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_FAULT", "skip:weight_sync:step=2")
    monkeypatch.setenv("VERL_FAULT_FILE", str(tmp_path / "fault"))
    assert not faults.is_skipped("weight_sync", rank=0, step=1)
    faults.fault_point("weight_sync", rank=0, step=2)  # inside: neither fires nor uses it up
    assert faults.is_skipped("weight_sync", rank=0, step=2)
    assert "weight_sync rank=0 step=2" in (tmp_path / "fault").read_text()
    assert not faults.is_skipped("weight_sync", rank=0, step=2)


def test_kill_ends_the_process_and_leaves_the_proof(tmp_path):
    code = "from verl.utils.faults import fault_point; fault_point('save_checkpoint', rank=0); print('alive')"
    env = os.environ | {"VERL_FAULT": "kill:save_checkpoint", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert "alive" not in done.stdout
    assert "save_checkpoint" in (tmp_path / "fault").read_text()


OWNER = """
import subprocess, sys
env = {} if sys.argv[1:] == ["overwritten"] else None  # by the title
scheduler = subprocess.Popen(["sglang::scheduler_TP0", "3600"], executable="sleep", env=env)
print("started", flush=True)
sys.exit(scheduler.wait() % 256)
"""


@pytest.mark.parametrize(
    "target, code, environment",
    [
        ("scheduler", 256 - signal.SIGKILL, "kept"),
        ("scheduler", 256 - signal.SIGKILL, "overwritten"),
        ("owner", -signal.SIGKILL, "kept"),
    ],
)
def test_a_process_of_an_engine_is_hit_and_the_caller_goes_on(monkeypatch, target, code, environment):
    """The one of this run, whatever others there are with that title."""
    with ExitStack() as stack:
        owners = []
        raylets = [f"{os.getpid()}{number}" for number in (1, 2)]
        for raylet in raylets:
            command = ["ray::HybridSGLangServer", "-c", OWNER, environment]
            env = os.environ | {"RAY_RAYLET_PID": raylet}
            process = subprocess.Popen(
                command, executable=sys.executable, env=env, stdout=subprocess.PIPE, start_new_session=True
            )
            owners.append(stack.enter_context(process))
            stack.callback(_end_session, process.pid)
            assert process.stdout.readline() == b"started\n"
        monkeypatch.setenv("RAY_RAYLET_PID", raylets[1])
        monkeypatch.setenv("VERL_FAULT", f"kill:generate:on={target}")
        faults.fault_point("generate", rank=0)
        assert owners[1].wait() == code
        assert owners[0].poll() is None


def _end_session(leader):
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def test_a_slow_worker_is_slow_each_time(monkeypatch):
    monkeypatch.setenv("VERL_FAULT", "slow:generate:rank=1")
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    for rank in (0, 1, 1):
        faults.fault_point("generate", rank=rank, step=2)
    assert slept == [faults.SLOW_S, faults.SLOW_S]
