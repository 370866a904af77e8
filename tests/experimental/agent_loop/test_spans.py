"""Each trajectory is one trace, with a span for each turn and tool call; the timeline has the same spans."""

import asyncio
import json
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.experimental.agent_loop.test_tool_agent_loop import SCHEMA, TOKENIZER, call, config_of
from tests.experimental.agent_loop.token_server import TokenServer
from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.base import WholeConfig
from verl.experimental.agent_loop.batch import Place
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.experimental.agent_loop.spans import trajectory_span
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.observe import timeline
from verl.utils.observe.rollout_trace import RolloutTraceConfig

NUM = 3


class FakeMlflow(ModuleType):
    """Stands for MLflow where it is not installed: keeps each span with its parent, whichever task opens it."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.spans: list[dict[str, Any]] = []
        self.current: ContextVar[dict[str, Any] | None] = ContextVar("current", default=None)
        self.set_tracking_uri = self.set_experiment = lambda name: None
        self.flush_trace_async_logging = lambda: None

    @contextmanager
    def start_span(self, name: str) -> Any:
        parent = self.current.get()
        span = {"name": name, "parent": parent, "tags": {} if parent is None else parent["tags"]}
        self.spans.append(span)
        token = self.current.set(span)
        try:
            yield type(
                "Span",
                (),
                {"set_inputs": lambda _, v: span.update(inputs=v), "set_outputs": lambda _, v: span.update(outputs=v)},
            )()
        finally:
            self.current.reset(token)

    def update_current_trace(self, tags: dict[str, str]) -> None:
        self.current.get()["tags"].update(tags)

    def read(self) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
        """Return tags and spans of each trace."""
        roots = [span for span in self.spans if span["parent"] is None]
        return [(root["tags"], [span for span in self.spans if span["tags"] is root["tags"]]) for root in roots]


def real_traces(mlflow: Any) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    found = []
    for trace in mlflow.search_traces(return_type="list"):
        names = {span.span_id: span.name for span in trace.data.spans}
        spans = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
        shown = [
            {
                "name": span.name,
                "parent": {"name": names.get(span.parent_id)},
                "inputs": span.inputs,
                "outputs": span.outputs,
            }
            for span in spans
        ]
        found.append((trace.info.tags, shown))
    return found


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_turns_and_tool_calls_of_trajectories_at_the_same_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "fake":
        fake = FakeMlflow()
        monkeypatch.setitem(sys.modules, "mlflow", fake)
    else:
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    item = {"class_name": "tests.experimental.agent_loop.test_tool_agent_loop.Probe", "config": {"type": "native"}}
    tools = tmp_path / "tools.yaml"
    tools.write_text(yaml.dump({"tools": [item | {"tool_schema": SCHEMA}]}))
    config = config_of(tools)
    server = TokenServer(TOKENIZER, lambda text: "It is 42." if "<|tool|>" in text else call(say="42", sleep=0.02))
    RolloutTraceConfig.init("project", "run", "mlflow", token2text=True, decode=TOKENIZER.decode)
    timeline.start()

    async def one(row: int) -> None:
        attempt = Attempt(f"3-train-u{row}-1-0", f"u{row}", 1, "tool_agent", 7)
        with trajectory_span(attempt, Place(row, f"u{row}", 1), 3, False) as ended:
            loop = ToolAgentLoop(WholeConfig(config), manager.of(attempt), TOKENIZER, None)
            ended(await loop.run({"seed": 7}, raw_prompt=[{"role": "user", "content": f"Hi {row}"}]))

    async def run() -> None:
        await asyncio.gather(*map(one, range(NUM)))

    manager = AsyncLLMServerManager(config, [server])
    try:
        asyncio.run(run())
    finally:
        RolloutTraceConfig.finish()
        part = timeline.take("agent loops 0")
    traces = sorted(real_traces(mlflow) if kind == "real" else fake.read(), key=lambda trace: trace[0]["sample_index"])
    assert [tags["sample_index"] for tags, _ in traces] == [f"u{row}" for row in range(NUM)]
    generate = "AsyncLLMServerManager.generate"
    for row, (tags, spans) in enumerate(traces):
        assert tags["step"] == "3" and tags["rollout_n"] == "1" and tags["validate"] == "False"
        assert [each["name"] for each in spans] == ["agent_loop", "trajectory", generate, "probe", generate]
        assert {each["parent"]["name"] for each in spans[2:]} == {"trajectory"}
        _, whole, first, tool, second = spans
        assert first["inputs"]["prompt_text"].endswith(f"Hi {row}<|end|><|assistant|>")
        assert json.loads(tool["inputs"]["arguments"]) == {"say": "42", "sleep": 0.02}
        assert tool["outputs"] == {"outcome": "ok", "reward": None, "text": "42"}
        assert second["outputs"]["text"] == "It is 42.<|end|>" and second["outputs"]["token_ids"]
        assert whole["inputs"]["attempt"] == f"3-train-u{row}-1-0"
        assert whole["outputs"]["response_text"].endswith("<|tool|>42<|end|><|assistant|>It is 42.<|end|>")
    shown = [
        (each.group, each.name)
        for each in sorted(part.spans, key=lambda each: each.start)
        if each.category != "request"
    ]
    for row in range(NUM):
        mine = [name for group, name in shown if group == f"3-train-u{row}-1-0"]
        assert mine == [f"trajectory {row}", "generate", "probe", "generate"]
    ends = [each.args for each in part.spans if each.category == "trajectory"]
    assert all(each["outcome"] == "ok" and each["messages"] == 4 and each["tokens"] > 20 for each in ends)
