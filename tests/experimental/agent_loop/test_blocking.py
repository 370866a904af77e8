"""An event loop that somebody blocks is named in the log."""

import asyncio
import re
import time

import pytest

from verl.experimental.agent_loop.blocking import blocking_is_named


async def tool_that_blocks(seconds: float) -> None:
    time.sleep(seconds)


def logged(caplog: pytest.LogCaptureFixture, limit_s: float, seconds: float) -> list[str]:
    """Return what is logged with a limit while a tool blocks the loop."""

    async def batch() -> None:
        with blocking_is_named(limit_s):
            await asyncio.sleep(0.4)
            await tool_that_blocks(seconds)
            await asyncio.sleep(0.4)

    with caplog.at_level("WARNING"):
        asyncio.run(batch())
    return [record.getMessage() for record in caplog.records]


def test_the_line_that_blocks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A busy machine may hold the loop back at other times too."""
    messages = logged(caplog, 0.3, 1.5)
    line = rf"tool_that_blocks \({re.escape(__file__)}, line 1\d\)\. .* must not block"
    (number,) = [number for number, message in enumerate(messages) if re.search(line, message)]
    assert "goes on after" in messages[number + 1]


def test_what_blocks_for_less_than_the_limit_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, 2.0, 1.2) == []
