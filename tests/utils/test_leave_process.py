"""How a process that was in a gloo group ends: as ever for those who look at it, without finalising the interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, threading, time, weakref
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
from verl.utils.distributed import run_and_leave

class Finalised:
    def __del__(self):
        sys.stderr.write("finalised")

def command():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
    atexit.register(sys.stdout.write, "handler ")
    threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write("thread "))).start()
    pool.submit(int)
    sys.stdout.write("command ")
    {end}

kept, pool = Finalised(), ThreadPoolExecutor(1)
run_and_leave(command)
"""


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such key')", 1, "no such key\n"),
    ],
)
def test_code_output_threads_and_handlers_are_kept(tmp_path: Path, end: str, code: int, message: str) -> None:
    words = [sys.executable, "-c", SCRIPT.replace("{end}", end), str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "command thread handler ", message)
