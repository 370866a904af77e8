"""Report where an event loop is blocked: blocking code in a tool or a loop stops all trajectories and deadlines."""

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

BLOCKED_S = 20.0
"""Seconds without a turn of the event loop after which the log says where the loop is blocked."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@contextmanager
def blocking_is_named(limit_s: float = BLOCKED_S) -> Iterator[None]:
    """Let a thread watch the running event loop, and log the blocking line once per blockage.

    Deadlines cannot end such a call, since they need the event loop too.
    """
    loop = asyncio.get_running_loop()
    thread_id = threading.get_ident()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(limit_s / 2):
            turned = threading.Event()
            asked = time.monotonic()
            loop.call_soon_threadsafe(turned.set)
            if turned.wait(limit_s) or ended.is_set():
                continue
            logger.warning(
                "the event loop of the agent loops has been blocked for %.0f s, and with it all trajectories of this "
                "process and their deadlines: %s. An async def of a tool or loop must not block: await something, or "
                "call it by asyncio.to_thread",
                *(time.monotonic() - asked, _place_of(thread_id)),
            )
            while not turned.wait(limit_s / 2) and not ended.is_set():
                pass
            logger.warning("the event loop of the agent loops goes on after %.0f s", time.monotonic() - asked)

    watcher = threading.Thread(target=watch, name="blocked event loop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def _place_of(thread_id: int) -> str:
    """Return the line of a thread, and the innermost one outside the libraries that has led there."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "its thread has ended"
    frames = list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))  # innermost first
    own = next((each for each in frames if not each.filename.startswith(_LIBRARIES)), frames[0])
    places = dict.fromkeys(f"{each.name} ({each.filename}, line {each.lineno})" for each in (own, frames[0]))
    return " in ".join(reversed(places)) if len(places) > 1 else next(iter(places))
