"""Code that the model writes, run in the sandbox of this machine and in a service."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.http_service import service
from tests.waiting import wait_until
from verl.base_config import WrongInput
from verl.tools.base_tool import BaseTool
from verl.tools.calls import CallResult, ToolOutcome, execute_call
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.sandbox import isolation_problem

LOCAL: dict[str, Any] = {"type": "native", "allow_unisolated": isolation_problem() is not None, "num_workers": 2}


def call(tool: BaseTool, parameters: dict[str, Any], timeout_s: float | None = None) -> CallResult:
    async def run() -> CallResult:
        instance_id, _ = await tool.create()
        result = await execute_call(tool, instance_id, parameters, timeout_s)
        await tool.release(instance_id)
        return result

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "text", "status", "outcome"),
    [
        ("import sys\nprint(6 * 7)\nprint('no', file=sys.stderr)", "42\nno", "ok", "ok"),
        ("x = 1", "The program printed nothing.", "ok", "ok"),
        ("print(1)\n1 / 0", "ZeroDivisionError", "runtime error", "ok"),
        ("print(", "SyntaxError", "compile error", "ok"),
        ("print(1, flush=True)\nwhile True: pass", "1\n\nThe program was stopped after 1 s.", "timeout", "timeout"),
    ],
)
def test_programs_on_this_machine(code: str, text: str, status: str, outcome: str) -> None:
    result = call(SandboxFusionTool({**LOCAL, "default_timeout": 1}), {"code": code, "timeout": 60})
    assert text in (result.response.text or "")
    assert (result.metrics["status"], result.outcome, result.reward) == (status, outcome, 0.0)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "code must be a text"),
        ({"code": " "}, "code must be a text"),
        ({"code": "1", "language": "cpp"}, "must be in python, not cpp"),
        ({"code": "1", "timeout": 0}, "seconds above 0"),
    ],
)
def test_wrong_arguments(parameters: dict[str, Any], text: str) -> None:
    result = call(SandboxFusionTool(LOCAL), parameters)
    assert result.outcome == ToolOutcome.BAD_ARGUMENTS and text in (result.response.text or "")


def children() -> set[int]:
    """The processes that this one has started, themselves or through others."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    mine = {os.getpid()}
    while more := {pid for pid, parent in found.items() if parent in mine} - mine:
        mine |= more
    return mine - {os.getpid()}


@pytest.mark.parametrize("by", ["deadline", "abort", "cancel"])
def test_a_cancelled_call_kills_its_program(by: str) -> None:
    tool = SandboxFusionTool({**LOCAL, "default_timeout": 3600})
    before = children()

    async def run() -> None:
        work = execute_call(tool, "i", {"code": "import time\ntime.sleep(3600)"}, 2.0 if by == "deadline" else None)
        task = asyncio.create_task(work)
        while not children() - before and not task.done():  # its deadline may come first, on a busy machine
            await asyncio.sleep(0.02)
        if by == "abort":
            await tool.abort("i")
        if by == "cancel":
            task.cancel()
        try:
            assert (await task).outcome == ("timeout" if by == "deadline" else "error")
        except asyncio.CancelledError:
            assert by == "cancel"

    asyncio.run(run())
    wait_until(lambda: not children() - before)


def reply(status: str = "Finished", **run: Any) -> tuple[int, Any]:
    return 200, {"status": "Success", "run_result": {"status": status, **run}, "compile_result": None}


@pytest.mark.parametrize(
    ("answer", "outcome", "status", "text"),
    [
        (reply(stdout="42\n", stderr="w", return_code=0), "ok", "ok", "42\nw"),
        (reply(stdout="", stderr="Boom", return_code=1), "ok", "runtime error", "Boom"),
        (reply("TimeLimitExceeded", stdout="a"), "timeout", "timeout", "a\nThe program was stopped after 3 s."),
        (
            (200, {"status": "Failed", "compile_result": {"status": "Error", "stderr": "bad"}, "run_result": None}),
            "ok",
            "compile error",
            "bad",
        ),
        ((200, {"status": "SandboxError", "message": "full"}), "error", None, "could not be run: full"),
        ((500, {}), "error", None, "HTTP status 500 in attempt 1"),
        ((200, [1]), "error", None, "is not a program's result"),
    ],
)
def test_programs_in_a_service(answer: tuple[int, Any], outcome: str, status: str | None, text: str) -> None:
    with service(lambda request: answer) as served:
        tool = SandboxFusionTool({"sandbox_fusion_url": f"{served.url}/run_code", "memory_limit_mb": 64})
        result = call(tool, {"code": "print(42)", "timeout": 3})
    assert (result.outcome, result.metrics.get("status")) == (outcome, status)
    assert text in (result.response.text or "")
    assert served.requests == [
        {
            "compile_timeout": 3,
            "run_timeout": 3,
            "code": "print(42)",
            "stdin": None,
            "memory_limit_MB": 64,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sandbox_fusion_ulr": "http://x"}, "config.sandbox_fusion_ulr=http://x: there is no such key; the nearest"),
        ({"sandbox_fusion_url": "x"}, "config.sandbox_fusion_url=x: write an address with http"),
        ({"default_language": "cpp"}, "config.default_language=cpp: the sandbox of this machine runs python only"),
        ({"num_workers": 0}, "config.num_workers=0: must be an integer of 1 or more"),
        ({"default_timeout": "3"}, "config.default_timeout=3: must be a number above 0"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        SandboxFusionTool(config)


class Own(SandboxFusionTool):
    """A tool of a user, with a key that is not ours."""


def test_a_class_of_the_user_may_have_further_keys() -> None:
    assert Own({**LOCAL, "my_key": 3, "default_timeout": 5}).options.default_timeout == 5
