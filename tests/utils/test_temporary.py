"""Temporary folders of processes that were killed go with the next start; nothing else does."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl.utils.temporary import RUN, SANDBOX, TemporaryFolder, remove_folders_of_the_dead

_OWNER = """
import sys, time
from verl.utils.temporary import TemporaryFolder

folder = TemporaryFolder(sys.argv[1])
(folder.path / "socket").touch()
print(folder.path, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner(kind: str, place: Path, *wrapper: str) -> Iterator[Path]:
    """Yield the folder of a process, which is killed at the end."""
    env = os.environ | {"TMPDIR": str(place)}
    command = [*wrapper, sys.executable, "-c", _OWNER, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["run", "fork", "sandbox", "sglang", "vllm"])
def test_a_folder_goes_when_its_process_has_died(place: Path, kind: str) -> None:
    with owner(kind, place) as folder:
        remove_folders_of_the_dead()
        assert (folder / "socket").exists()
    remove_folders_of_the_dead()
    assert list(place.iterdir()) == []


def test_the_folder_of_a_process_in_another_container_stays(place: Path) -> None:
    """Its process id means another process here, or none."""
    own_namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.getuid() or subprocess.run([*own_namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no namespaces")
    with owner(RUN, place, *own_namespace) as folder:
        remove_folders_of_the_dead()
        assert (folder / "socket").exists()


def test_what_is_not_ours_stays(place: Path) -> None:
    """A folder without a lock, of another name, or behind a link."""
    for name in ("verl-run-new", "verl-data"):
        (place / name).mkdir()
    for folder in (place / "verl-data", place / "mine"):
        folder.mkdir(exist_ok=True)
        (folder / "lock").touch()
    (place / "verl-run-link").symlink_to(place / "mine")
    before = sorted(place.rglob("*"))
    remove_folders_of_the_dead()
    assert sorted(place.rglob("*")) == before


def test_shared_memory_goes_with_its_folder(place: Path) -> None:
    start = f"verl_test_{os.getpid()}_"
    memory, other = Path(f"/dev/shm/{start}1"), Path(f"/dev/shm/verl_test_{os.getpid()}x")
    try:
        for path in (memory, other):
            path.touch()
        dead = TemporaryFolder(RUN)
        dead.note_shared_memory(start)
        os.close(dead._handles.pop())  # as the system does when a process is killed
        remove_folders_of_the_dead()
        assert not memory.exists() and other.exists() and not dead.path.exists()
    finally:
        for path in (memory, other):
            path.unlink(missing_ok=True)


def test_a_tree_of_any_depth_goes(place: Path) -> None:
    """Such as an untrusted program makes."""
    dead = TemporaryFolder(SANDBOX)
    os.close(dead._handles.pop())
    here = os.open(dead.path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_folders_of_the_dead()
    assert not dead.path.exists()
