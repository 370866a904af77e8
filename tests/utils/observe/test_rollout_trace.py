"""Traces through the interfaces of MLflow and Weave: the real MLflow if it is installed, else fake modules."""

import asyncio
import gzip
import json
import re
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from verl.base_config import ConfigError
from verl.protocol import DataProto
from verl.trainer.ppo.records import trace_batch
from verl.utils.observe.rollout_trace import (
    RolloutTraceConfig,
    rollout_trace_attr,
    rollout_trace_op,
    rollout_trace_span,
)
from verl.workers.config import TraceConfig


class Span(dict):
    """A span of either library."""

    def set_inputs(self, inputs):
        self["inputs"] = inputs

    def set_outputs(self, outputs):
        self["outputs"] = outputs


class Recorder:
    """The roots of all traces; the open spans."""

    def __init__(self):
        self.roots, self.open, self.calls = [], [], []

    def begin(self, name):
        span = Span(name=name, children=[], tags={})
        (self.open[-1]["children"] if self.open else self.roots).append(span)
        self.open.append(span)
        return span


def fake_mlflow(recorder):
    module = ModuleType("mlflow")

    @contextmanager
    def start_span(name):
        span = recorder.begin(name)
        try:
            yield span
        except Exception as error:
            span["error"] = repr(error)
            raise
        finally:
            recorder.open.pop()

    module.start_span = start_span
    module.update_current_trace = lambda tags: recorder.open[0]["tags"].update(tags)
    module.set_tracking_uri = lambda uri: recorder.calls.append(("uri", uri))
    module.set_experiment = lambda name: recorder.calls.append(("experiment", name))
    module.flush_trace_async_logging = lambda: recorder.calls.append(("flush",))
    return module


def fake_weave(recorder):
    module = ModuleType("weave")

    def create_call(op, inputs, attributes):
        span = recorder.begin(op)
        span["inputs"] = inputs
        span["tags"] = {key: str(value) for key, value in attributes.items()}
        return span

    def finish_call(call, output=None, exception=None):
        assert recorder.open.pop() is call
        call["outputs"] = output
        if exception is not None:
            call["error"] = repr(exception)

    flush = lambda: recorder.calls.append(("flush",))  # noqa: E731
    client = SimpleNamespace(create_call=create_call, finish_call=finish_call, flush=flush)
    module.init = lambda name: recorder.calls.append(("experiment", name)) or client
    return module


@pytest.fixture(params=["mlflow", "weave"])
def recorder(request, monkeypatch):
    made = Recorder()
    made.backend = request.param
    monkeypatch.setitem(sys.modules, request.param, {"mlflow": fake_mlflow, "weave": fake_weave}[request.param](made))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    yield made
    RolloutTraceConfig.finish()


class Engine:
    @rollout_trace_op
    def decode(self, ids, upper=False):
        return "".join(map(chr, ids)).upper() if upper else "".join(map(chr, ids))

    @rollout_trace_op
    async def generate(self, ids):
        await asyncio.sleep(0)
        return {"text": self.decode(ids, upper=True)}

    @rollout_trace_op
    def fail(self):
        raise KeyError("no")


def test_decorated_functions_become_spans(recorder):
    RolloutTraceConfig.init("project", "run", recorder.backend, token2text=True)
    assert RolloutTraceConfig.get_backend() == recorder.backend and RolloutTraceConfig.enable_token2text()
    assert RolloutTraceConfig.get_client() is not None
    assert Engine().decode([97]) == "a" and recorder.roots == []  # no trace is open
    with rollout_trace_attr(sample_index="u1", step=3, rollout_n=2, name="turn"):
        assert asyncio.run(Engine().generate([98])) == {"text": "B"}
        with pytest.raises(KeyError):
            Engine().fail()
    (root,) = recorder.roots
    assert root["name"] == "turn"
    assert root["tags"] == {
        "sample_index": "u1", "step": "3", "rollout_n": "2", "validate": "False", "experiment_name": "run",
    }  # fmt: skip
    generate, fail = root["children"]
    assert generate["name"] == "Engine.generate" and generate["inputs"] == {"ids": [98]}
    assert generate["outputs"] == {"text": "B"} and "no" in fail["error"]
    (decode,) = generate["children"]
    assert decode["inputs"] == {"ids": [98], "upper": True} and decode["outputs"] == "B"
    RolloutTraceConfig.finish()
    assert recorder.calls[-2:] == [("experiment", "project"), ("flush",)]
    assert recorder.open == [] and RolloutTraceConfig.get_backend() is None


def test_every_response_becomes_a_trace(recorder):
    RolloutTraceConfig.init("p", "e", recorder.backend, token2text=True)
    tensors = {
        "prompts": torch.tensor([[0, 5], [0, 5], [6, 7]]),
        "responses": torch.tensor([[1, 2], [3, 0], [4, 5]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]]),
    }
    uids = np.array(["a", "a", "b"], dtype=object)
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids}>")
    trace_batch(batch, torch.tensor([0.5, 0.0, 1.0]), 4, tokenizer, validate=True)
    assert [(root["tags"]["sample_index"], root["tags"]["rollout_n"]) for root in recorder.roots] == [
        ("a", "0"), ("a", "1"), ("b", "0"),
    ]  # fmt: skip
    assert {root["tags"]["validate"] for root in recorder.roots} == {"True"}
    spans = [root["children"][0] for root in recorder.roots]
    assert spans[1]["inputs"] == {"prompt_ids": [5], "prompt_text": "<[5]>", "score": 0.0}
    assert [span["outputs"] for span in spans] == [
        {"response_ids": [1, 2], "score": 0.5, "response_text": "<[1, 2]>"},
        {"response_ids": [3], "score": 0.0, "response_text": "<[3]>"},
        {"response_ids": [4, 5], "score": 1.0, "response_text": "<[4, 5]>"},
    ]


def test_a_backend_that_fails_does_not_end_the_run(monkeypatch, caplog):
    class Away:
        name, experiment_name = "mlflow", "run"

        def trace(self, name, attributes):
            raise ConnectionError("no answer")

    monkeypatch.setattr(RolloutTraceConfig, "_backend", Away())
    batch = SimpleNamespace(non_tensor_batch={"uid": ["a"]})
    trace_batch(batch, torch.tensor([0.5]), step=4, tokenizer=None)
    assert "mlflow did not take all traces of step 4; the run continues: ConnectionError: no answer" in caplog.text


def test_nothing_is_traced_without_a_backend():
    RolloutTraceConfig.init("p", "e", None)
    with rollout_trace_attr(step=1):
        assert Engine().decode([97]) == "a"
    trace_batch(None, None, step=4, tokenizer=None)
    with pytest.raises(ValueError, match=r"rollout.trace.backend='x' must be null or one of mlflow, weave"):
        RolloutTraceConfig.init("p", "e", "x")


def test_a_reset_forgets_backend_and_options(monkeypatch):
    monkeypatch.setattr(RolloutTraceConfig, "_backend", SimpleNamespace(name="mlflow", client=None))
    monkeypatch.setattr(RolloutTraceConfig, "_token2text", True)
    RolloutTraceConfig.reset()
    assert RolloutTraceConfig.get_backend() is None and not RolloutTraceConfig.enable_token2text()


def test_what_the_configuration_refuses(monkeypatch):
    monkeypatch.setattr("verl.workers.config.rollout.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="must be null or one of mlflow, weave"):
        TraceConfig(backend="wandb")
    with pytest.raises(ConfigError, match="needs the package mlflow, which is not installed"):
        TraceConfig(backend="mlflow")


def test_mlflow_itself_reads_the_traces_back(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.chdir(tmp_path)
    RolloutTraceConfig.init("project", "run", "mlflow")
    with rollout_trace_attr(sample_index="u1", step=3):
        Engine().decode([97])
    RolloutTraceConfig.finish()
    (trace,) = mlflow.search_traces(return_type="list")
    assert trace.info.tags["step"] == "3" and trace.data.spans[-1].outputs == "a"


def test_mlflow_loses_no_trace_of_a_batch_beyond_its_queue(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("MLFLOW_ASYNC_TRACE_LOGGING_MAX_QUEUE_SIZE", "40")
    monkeypatch.chdir(tmp_path)
    RolloutTraceConfig.init("many", "run", "mlflow")
    mlflow.tracing.reset()  # the queue of this process may be there already
    for sample in range(60):
        with rollout_trace_attr(sample_index="u1", step=1, rollout_n=sample):
            Engine().decode([97])
    RolloutTraceConfig.finish()
    traces = mlflow.search_traces(return_type="list", max_results=100)
    assert sorted(int(trace.info.tags["rollout_n"]) for trace in traces) == list(range(60))
    assert all(trace.data.spans[-1].outputs == "a" for trace in traces)


def test_a_batch_is_sent_before_the_queue_of_mlflow_is_full(monkeypatch):
    made = Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow(made))
    monkeypatch.setenv("MLFLOW_ASYNC_TRACE_LOGGING_MAX_QUEUE_SIZE", "40")
    RolloutTraceConfig.init("p", "e", "mlflow")
    for _ in range(12):  # four entries each
        with rollout_trace_attr(step=1):
            Engine().decode([97])
    assert made.calls.count(("flush",)) == 1
    RolloutTraceConfig.finish()


class WeaveServer(BaseHTTPRequestHandler):
    """A fake Weave service with the endpoints that the client uses; it keeps the received calls."""

    calls: list = []
    answers = {
        "server_info": {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"},
        "graphql": {
            "data": {"viewer": {"username": "me", "defaultEntity": {"name": "me"}}, "project": {"name": "project"}}
        },
        "create": {"digest": "d" * 43},
        "complete": {"res": []},
    }

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        if self.path.endswith("calls/complete"):
            self.calls.extend(json.loads(body)["batch"])
        if self.path.endswith("file/create"):  # the server names a file by what it holds, and so does the client
            expected = re.search(rb'name="expected_digest"\r\n\r\n([^\r]+)', body)
            self.answers["create"] = {"digest": expected.group(1).decode() if expected else "d" * 43}
        answer = json.dumps(self.answers.get(self.path.rsplit("/", 1)[-1], {})).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *args):
        pass


def test_weave_itself_sends_the_traces(tmp_path, monkeypatch):
    """The real client, connected to a server in this process."""
    pytest.importorskip("weave")
    server = ThreadingHTTPServer(("127.0.0.1", 0), WeaveServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    names = {"WANDB_BASE_URL": address, "WF_TRACE_SERVER_URL": address, "WANDB_ENTITY": "me", "WANDB_API_KEY": "0" * 40}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    RolloutTraceConfig.init("project", "run", "weave")
    with rollout_trace_attr(sample_index="u1", step=3, name="turn"):
        asyncio.run(Engine().generate([98]))
        with pytest.raises(KeyError):
            Engine().fail()
    RolloutTraceConfig.finish()
    server.shutdown()
    calls = {call["op_name"].rsplit("/", 1)[1].partition(":")[0]: call for call in WeaveServer.calls}
    turn, generate, decode, fail = (calls[name] for name in ("turn", "Engine.generate", "Engine.decode", "Engine.fail"))
    for call in calls.values():
        assert call["attributes"]["sample_index"] == "u1" and call["attributes"]["step"] == 3
    assert generate["parent_id"] == fail["parent_id"] == turn["id"] and decode["parent_id"] == generate["id"]
    assert decode["inputs"] == {"ids": [98], "upper": True} and decode["output"] == "B"
    assert "KeyError" in fail["exception"] and generate["output"] == {"text": "B"}


def test_some_samples_of_a_step_are_traced_with_all_their_trajectories(recorder):
    RolloutTraceConfig.init("project", "run", recorder.backend, max_samples_per_step=2)

    def traced(*samples, step, validate=False):
        return [RolloutTraceConfig.takes(sample, step, validate) for sample in samples]

    assert traced("a", "b", "c", "a", "b", step=1) == [True, True, False, True, True]
    assert traced("c", step=2) == [True] and traced("d", "e", "f", step=2, validate=True) == [True, True, False]
    with rollout_trace_attr(sample_index="g", step=2, validate=True), rollout_trace_span("left out", {}) as keep:
        keep(1)
    assert "left out" not in str(vars(recorder))
