"""vLLM's traces reach a collector, although OpenTelemetry is imported only when something is traced."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tests.workers.rollout import tiny
from verl.workers.rollout.vllm_rollout import importing

received = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


collector = HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=collector.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
if sys.argv[2] == "vllm":
    importing.import_traces_on_use = lambda: None
importing.import_vllm()
assert ("opentelemetry.trace" in sys.modules) == (sys.argv[2] == "vllm")
model = tiny.build_model()
traced = {"vllm": {"otlp_traces_endpoint": endpoint}}
rollout = tiny.start_rollout("vllm", model, Path(sys.argv[1]), engine_kwargs=traced)
tiny.load_all(rollout, model)
rollout.generate_sequences(tiny.prompts_batch(3))

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

assert trace.get_tracer_provider().force_flush()
requests = [ExportTraceServiceRequest.FromString(each) for each in received]
spans = [span for each in requests for by in each.resource_spans for of in by.scope_spans for span in of.spans]
print(sorted((span.name, int(span.kind)) for span in spans))
"""
SERVER = 2  # of ``Span.SpanKind``


def spans_of(folder: Path, imports: str) -> list[tuple[str, int]]:
    """Return name and kind of each span of a rollout of three prompts; ``imports`` is ``verl`` or ``vllm``."""
    command = [sys.executable, "-c", CODE, str(folder), imports]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_requests_and_functions_of_vllm_are_traced(tmp_path):
    found = spans_of(tmp_path, "verl")
    assert found.count(("llm_request", SERVER)) == 3
    assert {name for name, _ in found if name != "llm_request"}, "of functions, whose modules were imported before"


@pytest.mark.full
def test_traces_are_those_of_vllm_alone(tmp_path):
    assert spans_of(tmp_path, "verl") == spans_of(tmp_path, "vllm")
