"""What SGLang's engine leaves behind on a machine."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import PRELOADED
from tests.special_e2e.conftest import leftovers
from tests.waiting import wait_until
from tests.workers.rollout.tiny import build_model
from verl.workers.rollout.sglang_rollout.leftovers import SocketFolder, unlink_shared_memory

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def own(temporary: Path, end: str, pipe: Any) -> None:
    """Own a folder of sockets, and counters of a start that was not finished, until the test says to go on."""
    os.setsid()
    tempfile.tempdir = str(temporary)
    folder = SocketFolder()
    (folder.path / "socket").touch()
    folder.note(f"test{os.getpid()}")
    Path(f"/dev/shm/sglang_loads_test{os.getpid()}_1.shm").touch()
    pipe.send(folder.path)
    pipe.recv()
    if end == "closed":
        folder.close()


@pytest.mark.parametrize("end", ["killed", "ended", "closed"])
def test_the_folder_goes_with_its_owner(tmp_path: Path, end: str) -> None:
    """However the owner ends, and without the next engine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(tmp_path, end, theirs))
    owner.start()
    folder, counters = ours.recv(), Path(f"/dev/shm/sglang_loads_test{owner.pid}_1.shm")
    assert (folder / "socket").exists() and counters.exists()
    owner.kill() if end == "killed" else ours.send("go on")
    owner.join()
    wait_until(lambda: not folder.exists())
    assert not counters.exists()
    assert owner.pid is not None and not leftovers(owner.pid)


def test_folders_of_owners_without_a_guard_are_removed(temporary: Path) -> None:
    """Such as those of a machine that lost its power."""
    mine = SocketFolder()
    abandoned = Path(tempfile.mkdtemp(prefix="verl-sglang-"))
    (abandoned / "lock").touch()
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


LEAVER = """
import contextlib, gc, sys
from pathlib import Path
from tests.workers.rollout.test_sglang_engine import engine_args
from verl.workers.rollout.sglang_rollout.engine import SGLangEngine
if __name__ == "__main__":
    gc.disable()  # else parts of the engine may be collected earlier
    with contextlib.suppress(RuntimeError):
        SGLangEngine(engine_args(Path(sys.argv[1]))).stop()
        print("started")
    gc.collect()
    print("collected")
"""


@pytest.mark.full
@pytest.mark.parametrize("starts", [True, False])
def test_the_owner_of_an_engine_that_is_gone_ends(tmp_path: Path, starts: bool) -> None:
    """Python collects the engine's sockets and their contexts together, and a context waits for open sockets."""
    pytest.importorskip("sglang")
    build_model().save_pretrained(tmp_path / "model")
    if not starts:
        (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "leaver.py").write_text(LEAVER)
    command = [sys.executable, str(tmp_path / "leaver.py"), str(tmp_path / "model")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["started"] * starts + ["collected"]


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
    """Its schedulers die with it, shared memory has no name, and its folder is removed."""
    pytest.importorskip("sglang")
    build_model().save_pretrained(tmp_path / "model")
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "model")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True) as owner,
    ):
        assert owner.stdout is not None
        *pids, folder, instance = owner.stdout.readline().split()
        assert len(pids) == 2
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))
    assert not [name for name in os.listdir("/dev/shm") if any(f"_{mark}_" in name for mark in (*pids, instance))]
    wait_until(lambda: not Path(folder).exists())
    assert "leaked semaphore" not in log.read_text()  # Ray would kill Python's tracker, which removes them here
