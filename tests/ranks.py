"""Run a function on several ranks, each a process, and report the rank that fails."""

import faulthandler
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch.multiprocessing as mp

from verl.utils.device.gloo import use_one_thread
from verl.utils.distributed import leave_process

LINES = 60
"""Lines of a stack that a report shows."""

PRELOADED = [
    "tests.collect_nothing",
    "torch.distributed.fsdp", "tensordict", "transformers.modeling_utils", "ray", "megatron.core",
    "verl.workers.engine.megatron", "tests.workers.engine.megatron_cases",
]  # fmt: skip
"""Modules that most ranks need and that take seconds to import. A server imports them once per test process; ranks are
its forks.
"""

JOIN_TIMEOUT_S = 800.0
"""Less than a test may take, so that ranks that hang are told from each other, however busy the machine is."""

_record: TextIO | None = None
"""Record of this process, if it is a rank."""


class RankError(Exception):
    """A rank failed, died or hung; the message says which one, in which case and where."""


class Ranks:
    """Processes that run one function, each with its rank; ``join`` waits for them.

    With ``fresh`` they import everything themselves. A test needs that if a module reads the environment on import.
    """

    def __init__(self, fn: Callable[..., None], args: tuple[Any, ...], nprocs: int, fresh: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks")
        mp.set_forkserver_preload(PRELOADED)  # read when the server starts, thus once
        self._context = mp.start_processes(
            _run_and_leave,
            args=(fn, args, self._folder, dict(os.environ)),
            nprocs=nprocs,
            join=False,
            start_method="spawn" if fresh else "forkserver",
        )

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until all ranks have succeeded.

        Raises: RankError naming the rank that failed first, what it ran and where; or those that still run.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=5):
                alive = [rank for rank, process in enumerate(self._context.processes) if process.is_alive()]
                if alive and time.monotonic() >= deadline:
                    raise RankError(f"ranks {alive} did not end within {timeout_s:g} s\n{self._stacks(alive)}")
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            name = getattr(error, "signal_name", None)
            how = f"died by {name}" if name else "failed"
            raise RankError(f"rank {error.error_index} {how} {self._told(error.error_index)}") from None
        finally:
            for process in self._context.processes:
                process.kill()
                process.join()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stacks(self, ranks: list[int]) -> str:
        """Return where the ranks are now."""
        for rank in ranks:
            if (Path(self._folder) / f"{rank}.txt").exists():  # it listens
                os.kill(self._context.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank} {self._told(rank)}" for rank in ranks)

    def _told(self, rank: int) -> str:
        """Return what a rank ran last and where it was."""
        file = Path(self._folder) / f"{rank}.txt"
        text = file.read_text() if file.exists() else ""
        *_, last = f"\n{text}".split("\n-- ")
        doing, _, stack = last.partition("\n")
        lines = stack.splitlines()
        if not doing:
            return "in its start: its standard error says more"
        return "\n".join([f"in {doing}:", *lines[:LINES], *(["..."] if len(lines) > LINES else [])])


def spawn_ranks(
    fn: Callable[..., None],
    args: tuple[Any, ...] = (),
    nprocs: int = 2,
    timeout_s: float = JOIN_TIMEOUT_S,
    fresh: bool = False,
) -> None:
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks to the end; see ``Ranks.join`` for what it raises."""
    Ranks(fn, args, nprocs, fresh).join(timeout_s)


def note(what: str) -> None:
    """Say what runs now, for the message of a rank that fails in it; do nothing where no rank runs."""
    if _record is not None:
        _record.write(f"\n-- {what}\n")


def _run_and_leave(
    rank: int, fn: Callable[..., None], args: tuple[Any, ...], folder: str, environment: dict[str, str]
) -> None:
    """Run a rank; what it raises, whatever its kind, and the stacks that a signal leaves go to its record."""
    global _record
    gc.freeze()  # else each full collection goes through all imports, and copies their memory
    gc.enable()
    os.environ.clear()  # a fork has the environment that the server started with
    os.environ.update(environment)
    file = Path(folder) / f"{rank}.new"
    _record = open(file, "w", buffering=1)  # open as long as the process lives
    faulthandler.enable(_record)
    faulthandler.register(signal.SIGUSR1, _record)
    file.rename(file.with_suffix(".txt"))
    note(fn.__name__)
    use_one_thread()
    try:
        fn(rank, *args)
    except BaseException as outcome:  # pytest.fail and SystemExit are no Exceptions
        trace = outcome.__traceback__.tb_next if outcome.__traceback__ else None
        _record.write("".join(traceback.format_exception(type(outcome), outcome, trace)))
        leave_process(1)
    leave_process(0)
