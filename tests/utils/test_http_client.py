"""Requests that do not block the event loop, and limits of asynchronous work."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.http_service import service
from verl.utils.concurrency import ConcurrencyLimit, RateLimit
from verl.utils.http_client import NoReply, NoReplyInTime, post_json, url_problem


def test_a_reply_comes_back_whatever_its_status() -> None:
    with service(lambda request: (418, request)) as served:
        reply = asyncio.run(post_json(f"{served.url}/a", {"x": "é"}, 5.0, {"Authorization": "Bearer t"}))
    assert (reply.status, reply.text) == (418, '{"x": "\\u00e9"}')
    assert served.paths == ["/a"] and served.headers[0]["Authorization"] == "Bearer t"


def test_a_slow_service_and_a_missing_one() -> None:
    go_on = threading.Event()
    with service(lambda request: (200, go_on.wait())) as served:
        with pytest.raises(NoReplyInTime, match="within 0.2 s"):
            asyncio.run(post_json(served.url, {}, 0.2))
        go_on.set()
    with pytest.raises(NoReply) as caught:
        asyncio.run(post_json(served.url, {}, 5.0))
    assert not isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("url", [None, 3, "", "localhost:80", "ftp://x", "http://"])
def test_addresses_that_cannot_be_asked(url: Any) -> None:
    assert url_problem(url) is not None
    assert url_problem("http://127.0.0.1:80/a") is None


class Busy:
    """Counts how many run at once."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def work(self, limit: ConcurrencyLimit) -> None:
        async with limit.slot():
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(0.005)
            finally:
                self.now -= 1


@pytest.mark.parametrize("shared", [None, 2])
def test_no_more_at_once_than_allowed(shared: int | None) -> None:
    limit = ConcurrencyLimit(3, shared, f"test {os.getpid()}")
    for _ in range(2):  # an event loop each
        busy = Busy()

        async def run(busy: Busy = busy) -> None:
            tasks = [asyncio.create_task(busy.work(limit)) for _ in range(12)]
            await asyncio.sleep(0.001)
            tasks[1].cancel()  # one that runs or waits gives its place back
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(each, asyncio.CancelledError) for each in results) == 1
            await asyncio.gather(*(busy.work(limit) for _ in range(12)))

        asyncio.run(run())
        assert busy.most == (shared or 3)


def test_processes_share_a_limit_and_a_dead_one_gives_its_place_back() -> None:
    name = f"shared {os.getpid()}"
    holder = (
        "import sys, time; from verl.utils.sandbox.permits import FilePermits\n"
        f"FilePermits({name!r}, 1).__enter__(); print('held', flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    busy = Busy()

    async def run() -> None:
        task = asyncio.create_task(busy.work(ConcurrencyLimit(3, 1, name)))
        await asyncio.sleep(0.1)
        assert busy.most == 0
        process.kill()
        process.wait()
        await task

    asyncio.run(run())
    assert busy.most == 1


def test_starts_are_spread_over_time() -> None:
    async def run() -> float:
        rate = RateLimit(100.0)
        start = time.monotonic()
        await asyncio.gather(*(rate.wait() for _ in range(11)))
        return time.monotonic() - start

    assert asyncio.run(run()) >= 0.099  # ten distances of 10 ms
