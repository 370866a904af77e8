"""Saves and removals that are killed, in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVE = """
from verl.utils.checkpoint.removal import SaveMark

mark = SaveMark(folder)
(folder / "actor").mkdir(exist_ok=True)
(folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"half")
hang()
"""
REMOVAL = """
import shutil
from verl.utils.checkpoint.removal import remove_checkpoint

shutil.rmtree = lambda path, **options: hang()
remove_checkpoint(folder)
"""
TRACKER = """
from verl.utils.checkpoint.files import write_file

write_file(folder, "latest_checkpointed_iteration.txt", lambda file: hang())
"""
FOLDER = """
from verl.utils.checkpoint.files import temporary_folder

with temporary_folder(folder, "merged") as unfinished:
    (unfinished / "model.safetensors").touch()
    hang()
"""
_HEAD = """
import sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def hang():
    print("hangs", flush=True)
    time.sleep(3600)
"""


@contextmanager
def hanging(code: str, folder: Path) -> Iterator[None]:
    """Run what hangs half way in ``folder``; it is killed at the end."""
    command = [sys.executable, "-c", _HEAD + code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"hangs\n"
            yield
        finally:
            os.kill(process.pid, signal.SIGKILL)


def kill_in(code: str, folder: Path) -> None:
    """Kill what works in ``folder`` half way."""
    with hanging(code, folder):
        pass
