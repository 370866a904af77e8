"""What SGLang's engine leaves behind on a machine."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.workers.rollout.tiny import build_model
from verl.workers.rollout.sglang_rollout.leftovers import SocketFolder, unlink_shared_memory

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_dead_owners_are_removed(temporary: Path) -> None:
    mine = SocketFolder()
    make = "from verl.workers.rollout.sglang_rollout.leftovers import SocketFolder; print(SocketFolder().path)"
    done = subprocess.run(
        [sys.executable, "-c", make], env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True
    )
    abandoned = Path(done.stdout.strip())
    new = Path(tempfile.mkdtemp(prefix="verl-sglang-"))  # its owner has yet to lock it
    for folder in (mine.path, abandoned):
        os.utime(folder, (0, 0))
    other = SocketFolder()
    assert not abandoned.exists() and mine.path.exists() and new.exists()
    for each in (mine, other):
        each.close()
        assert not each.path.exists()


def test_shared_memory_loses_its_name() -> None:
    kept = [Path(f"/dev/shm/sgl_shm_mq_{os.getpid()}1_x"), Path("/dev/shm/sglang_loads_other_1.shm")]
    gone = [Path(f"/dev/shm/sgl_shm_mq_{os.getpid()}_x"), Path(f"/dev/shm/sglang_loads_test{os.getpid()}_1.shm")]
    try:
        for path in kept + gone:
            path.touch()
        unlink_shared_memory([os.getpid()], f"test{os.getpid()}")
        assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)
    finally:
        for path in kept + gone:
            path.unlink(missing_ok=True)


OWNER = """
import sys, time
from pathlib import Path
from tests.workers.rollout.test_sglang_engine import Running
if __name__ == "__main__":
    engine = Running(Path(sys.argv[1]), tp_size=2).engine
    print(*engine.pids, engine._sockets.path, engine._engine.port_args.instance_id, flush=True)
    time.sleep(600)
"""


@pytest.mark.full
def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """Its schedulers die with it, and shared memory has no name; its folder goes when the next engine starts."""
    pytest.importorskip("sglang")
    build_model().save_pretrained(tmp_path / "model")
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "model")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        *pids, folder, instance = owner.stdout.readline().split()
        assert len(pids) == 2
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(int(pid))]
    assert not [name for name in os.listdir("/dev/shm") if any(f"_{mark}_" in name for mark in (*pids, instance))]
    os.utime(folder, (0, 0))
    SocketFolder().close()
    assert not Path(folder).exists()
