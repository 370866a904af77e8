"""Show the progress of a run: a table or a bar on a terminal, one line per step elsewhere.

The trainer is a Ray actor, and Ray prints the output of an actor late and with a prefix. So its lines for the user go
through the key-value store of the cluster, which keeps them complete and in order on every node, to the launching
process, which shows them.
"""

import importlib.util
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

from verl.trainer.run.clock import CLOCK
from verl.utils import envs
from verl.utils.observe.activity import report_activity_to
from verl.utils.observe.console import let_no_stream_fail, place_of, send_console_to, write_line
from verl.utils.process.lifetime import die_with_parent

if TYPE_CHECKING:
    import ray

    from verl.trainer.run.watch import Watch
    from verl.utils.report.live import LiveTable

T = TypeVar("T")
DescribeStep = Callable[[Mapping[str, float]], Sequence[str | None]]
"""Returns the parts of a step's text, always the same number; None keeps the part of an earlier step."""

MODES = ("table", "bar", "lines", "off")
_NAMESPACE = b"verl_terminal"
_POLL_S = 0.2
_BAR_FORMAT = "{desc} {percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} | {remaining} left{postfix}"


def check_progress() -> None:
    """Check the variable that names a display.

    Raises: ValueError naming it.
    """
    mode = envs.read("VERL_PROGRESS") or "auto"
    if mode not in (*MODES, "auto"):
        raise ValueError(f"environment variable VERL_PROGRESS={mode!r} must be one of {(*MODES, 'auto')}")


class LocalDisplay:
    """The terminal of this process. Lines that it cannot show, such as in a log on a full disk, are left out.

    ``VERL_PROGRESS``, or if that is not set ``mode``, is ``table``, ``bar``, ``lines``, ``off`` or ``auto``: the first
    of these that standard error can show. The table shows the record in ``folder``.
    """

    def __init__(self, mode: str = "auto", folder: str | Path | None = None) -> None:
        check_progress()
        self.mode = envs.read("VERL_PROGRESS") or mode
        let_no_stream_fail()
        has_table = folder is not None and importlib.util.find_spec("rich") is not None
        if self.mode == "auto":
            self.mode = ("table" if has_table else "bar") if sys.stderr.isatty() else "lines"
        elif self.mode == "table" and not has_table:
            self.mode = "lines"
        self._folder = folder
        self._started = time.monotonic()
        self._bar: tqdm[None] | None = None
        self._table: LiveTable | None = None
        self._has_told = False

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let a failed drawing lose its lines and not end the run."""
        try:
            yield
        except OSError as error:
            self._tell_once("stderr", error)

    def _tell_once(self, stream: str, error: OSError) -> None:
        if not self._has_told:
            self._has_told = True
            write_line(f"WARNING: some lines cannot be written to {place_of(stream)}: {error}", "stderr")

    def write(self, text: str) -> None:
        """Show a line, above the bar if one is shown."""
        with self._drawing():
            if self._table is not None:
                self._table.write(text)
                return
            with self._bar.external_write_mode(file=sys.stdout) if self._bar is not None else nullcontext():
                error = write_line(text)
            if error is not None:
                self._tell_once("stdout", error)

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show that ``step`` of ``total`` took ``seconds``; with ``step == start`` training begins."""
        if self.mode == "bar":
            with self._drawing():
                self._move_bar(step, total, start, text)
        elif self.mode == "table":
            with self._drawing():
                self._draw_table(total)
        elif step == start:
            self._started = time.monotonic()
        elif self.mode == "lines":
            left = (time.monotonic() - self._started) / (step - start) * (total - step)
            self.write(f"step {step}/{total} | {text} | {seconds:.2f} s | {timedelta(seconds=round(left))} left")

    def _move_bar(self, step: int, total: int, start: int, text: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, initial=start, desc="training", dynamic_ncols=True, bar_format=_BAR_FORMAT)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def _draw_table(self, total: int) -> None:
        if self._table is None:
            from verl.utils.report.live import LiveTable

            assert self._folder is not None
            self._table = LiveTable(self._folder, total)
        self._table.update()

    def close(self) -> None:
        """Leave the bar or the table on the terminal; later lines follow below it."""
        with self._drawing():
            if self._bar is not None:
                self._bar.close()
            if self._table is not None:
                self._table.close()
        self._bar = None
        self._table = None


class RemoteDisplay:
    """A display in the trainer's process that sends everything to the ``Terminal`` of a name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._lock = threading.Lock()  # any thread may warn, and the terminal expects consecutive numbers

    def _send(self, method: str, **content: str | float) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        with self._lock:
            key = f"{self._name}:{self._count}".encode()
            _internal_kv_put(key, json.dumps([method, content]).encode(), namespace=_NAMESPACE)
            self._count += 1

    def write(self, text: str) -> None:
        """Show a line."""
        self._send("write", text=text)

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show that ``step`` of ``total`` took ``seconds``, in a run that began after ``start``."""
        self._send("progress", step=step, total=total, start=start, text=text, seconds=seconds)

    def close(self) -> None:
        """End the progress display; lines may still follow."""
        self._send("close")

    def is_end_requested(self) -> bool:
        """Whether the launching process has asked the trainer to save and end."""
        from ray.experimental.internal_kv import _internal_kv_get

        return _internal_kv_get(_request_of(self._name), namespace=_NAMESPACE) is not None


def _request_of(name: str) -> bytes:
    """Return the key of the request to end."""
    return f"{name}:end".encode()


class Terminal:
    """Shows the trainer's display in the launching process."""

    def __init__(self, display: LocalDisplay) -> None:
        self.name = secrets.token_hex(8)
        self._display = display
        self._count = 0
        self._has_asked = False

    def watch(self, result: "ray.ObjectRef[T]", watch: "Watch") -> T:
        """Show the trainer's display until its result arrives, and return the result; ask it to end after SIGTERM.

        Raises: InterruptedError when the watch is over, because nobody waits for the result any more.
        """
        import ray

        while not watch.is_over.is_set():
            done, _ = ray.wait([result], timeout=_POLL_S)
            self.show(watch.question)
            if watch.grace.has_begun and not self._has_asked:
                self._ask_to_end(watch)
            if done:
                return ray.get(result)
        raise InterruptedError("the run is over")

    def _ask_to_end(self, watch: "Watch") -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        self._has_asked = True
        with watch.question():
            _internal_kv_put(_request_of(self.name), b"", namespace=_NAMESPACE)
        self._display.write("SIGTERM: the run saves its last full step and ends; another SIGTERM ends it at once")

    def show(self, question: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Show the messages that have arrived; every call that the GCS answers is a ``question``."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

        while True:
            key = f"{self.name}:{self._count}".encode()
            with question():
                message = _internal_kv_get(key, namespace=_NAMESPACE)
            if message is None:
                return
            _internal_kv_del(key, namespace=_NAMESPACE)
            self._count += 1
            method, content = json.loads(message)
            getattr(self._display, method)(**content)


class _Warnings(logging.Handler):
    """Show the library's warnings. Errors end the run, whose last message shows them."""

    def __init__(self, display: RemoteDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self._display.write(f"{record.levelname}: {record.getMessage()}")


_display: LocalDisplay | RemoteDisplay | None = None


def attach_to_launch(actor: T, name: str, moments: list[tuple[str, float]], activity: Path) -> None:
    """Connect the process of ``actor``, which Ray passes, with the launching process, and let it end with its raylet.

    The lines and the progress go to the ``Terminal`` of that name; the start-up clock continues from ``moments``;
    phases and signs of life go to the file ``activity``.
    """
    global _display
    die_with_parent()
    report_activity_to(activity)
    CLOCK.moments = [*moments, *CLOCK.moments]
    _display = RemoteDisplay(name)
    send_console_to(_display.write)
    logging.getLogger("verl").addHandler(_Warnings(_display))


def is_end_requested() -> bool:
    """Whether the launching process asks this trainer to save its last full step and to end."""
    return isinstance(_display, RemoteDisplay) and _display.is_end_requested()


class Progress:
    """Show the steps of a run, each with the text that ``describe`` makes of its metrics."""

    def __init__(self, total_steps: int, start_step: int, describe: DescribeStep) -> None:
        """Expect steps ``start_step + 1`` to ``total_steps``."""
        self._display = _display or LocalDisplay()
        self._describe = describe
        self._parts: list[str | None] = []
        self.total = total_steps
        self.start = start_step
        self._display.progress(start_step, total_steps, start_step, "", 0.0)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Store the parts of the progress text that these metrics contain."""
        parts = self._describe(metrics)
        before = self._parts or [None] * len(parts)
        self._parts = [old if new is None else new for old, new in zip(before, parts, strict=True)]

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        self.note(metrics)
        text = " | ".join(part for part in self._parts if part is not None)
        seconds = float(metrics.get("timing_s/step", 0.0))
        self._display.progress(step, self.total, self.start, text, seconds)

    def close(self) -> None:
        """End the display."""
        self._display.close()
