"""The tutorial of agent loops: its cells run, and its sandbox answers as SandboxFusion does."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from examples.tutorial.agent_loop_get_started.sandbox import Sandbox
from verl.tools.calls import execute_call
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.sandbox import isolation_problem

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tutorial" / "agent_loop_get_started" / "agent_loop_tutorial.ipynb"
pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason="this machine cannot isolate code")

RUN = """
import ast, asyncio, sys
code = compile(open(sys.argv[1]).read(), "notebook", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
asyncio.run(eval(code))
"""
"""Runs cells as a notebook does, which may await outside functions."""
CHECKS = """
assert reply["run_result"]["stdout"] == "70\\n"
said = [tokenizer.decode(trajectory.response_ids[turn.start : turn.end]) for turn in trajectory.turns]
assert said == [
    "I compute it.\\n```python\\nprint(48**39 % 97)\\n```<|end|>",
    "<|tool|>70\\n<|end|><|assistant|>",
    "It is \\\\boxed{70}.<|end|>",
]
mask = [bit for turn in trajectory.turns for bit in [int(turn.role == "assistant")] * (turn.end - turn.start)]
assert trajectory.response_mask == mask and len(trajectory.response_logprobs) == len(mask)
assert [(call.outcome, call.text) for call in calls] == [
    ("bad_arguments", "Error: write base, exponent and modulus, three integers."),
    ("ok", "70"),
]
assert tokenizer.decode(with_tool.response_ids).endswith("It is \\\\boxed{70}.<|end|>")
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    """In a process of their own, because a cell names a class of the module ``__main__``."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(["".join(cell["source"]) for cell in cells] + [CHECKS]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_sandbox_serves_the_tool() -> None:
    """Output, errors, a program that takes too long, another language, and a request that is none."""
    with Sandbox() as url:
        tool = SandboxFusionTool({"type": "native", "sandbox_fusion_url": url})

        async def ask(**arguments: object) -> tuple[str, str]:
            instance, _ = await tool.create()
            result = await execute_call(tool, instance, arguments)
            return str(result.outcome), result.response.text or ""

        async def several() -> list[tuple[str, str]]:
            return await asyncio.gather(
                ask(code="print(6 * 7)"),
                ask(code="1 / 0"),
                ask(code="while True: pass", timeout=0.2),
                ask(code="puts 1", language="ruby"),
            )

        right, wrong, slow, ruby = asyncio.run(several())
        assert right == ("ok", "42")
        assert wrong[0] == "ok" and "ZeroDivisionError" in wrong[1]
        assert slow[0] == "timeout" and "stopped after 0.2 s" in slow[1]
        assert ruby[0] == "error" and "python only" in ruby[1]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(url, b"no json"), timeout=10)
