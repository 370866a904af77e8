"""An event loop that somebody blocks is named in the log."""

import asyncio
import re
import time

import pytest

from verl.experimental.agent_loop.blocking import blocking_is_named


async def tool_that_blocks(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_the_line_that_blocks_is_logged(caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    async def batch() -> None:
        with blocking_is_named(0.3):
            await asyncio.sleep(0.4)
            await tool_that_blocks(seconds)
            await asyncio.sleep(0.4)

    with caplog.at_level("WARNING"):
        asyncio.run(batch())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (2 if seconds else 0)
    if seconds:
        assert re.search(rf"tool_that_blocks \({re.escape(__file__)}, line 1\d\)\. .* must not block", messages[0])
        assert "goes on after" in messages[1]
