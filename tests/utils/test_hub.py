"""A model of the hub on a machine that cannot reach it is refused at once."""

import http.server
import socket
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from huggingface_hub import constants

from verl.errors import WrongInput
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run.environment import check_environment
from verl.trainer.run.refusal import Findings
from verl.utils.hub import cached_folder, hub_problems, model_folder, unreachable


@pytest.fixture
def silent():
    """Return the address of a server that accepts connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_address_without_an_answer(silent):
    assert unreachable(silent, timeout_s=0.3) is not None
    assert "refused" in unreachable("http://127.0.0.1:1", timeout_s=60)


@pytest.fixture
def fake_modelscope(monkeypatch, tmp_path):
    """Put a fake of the package modelscope in its place: it answers with a folder named after the id."""
    fake = ModuleType("modelscope")
    fake.__spec__ = ModuleSpec("modelscope", None)
    fake.snapshot_download = lambda model_id: str(tmp_path / model_id)
    monkeypatch.setitem(sys.modules, "modelscope", fake)


def test_models_come_from_modelscope_if_it_is_asked_for(fake_modelscope, monkeypatch, tmp_path):
    assert model_folder("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert model_folder("Qwen/Qwen2.5-0.5B") == str(tmp_path / "Qwen/Qwen2.5-0.5B")
    assert model_folder(str(tmp_path)) == str(tmp_path) and model_folder("hdfs://a/b") == "hdfs://a/b"
    assert list(hub_problems("Qwen/Qwen2.5-0.5B")) == []


def test_modelscope_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "true")
    (problem,) = hub_problems("Qwen/Qwen2.5-0.5B")
    assert problem.startswith("environment variable VERL_USE_MODELSCOPE=true needs the package modelscope, which is")
    with pytest.raises(ImportError, match="needs the package modelscope"):
        model_folder("Qwen/Qwen2.5-0.5B")
    findings = Findings()
    check_environment(RayConfig(), (), findings)
    with pytest.raises(WrongInput, match="VERL_USE_MODELSCOPE=true needs"):
        findings.refuse()
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "perhaps")
    findings = Findings()
    check_environment(RayConfig(), (), findings)
    with pytest.raises(ValueError, match="VERL_USE_MODELSCOPE='perhaps' is not a boolean"):
        findings.refuse()


def test_a_server_that_answers_is_reachable():
    class Teapot(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(418)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Teapot) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert unreachable(f"http://127.0.0.1:{server.server_port}", timeout_s=60) is None
        server.shutdown()


def test_what_is_wrong_with_a_hub_id(tmp_path, monkeypatch):
    assert list(hub_problems(str(tmp_path))) == list(hub_problems("hdfs://models/a")) == []
    (problem,) = hub_problems("not a hub id")
    assert "neither a folder nor a hub id" in problem
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (problem,) = hub_problems("nobody/nothing")
    assert "HF_HUB_OFFLINE=1" in problem and constants.HF_HUB_CACHE in problem
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    (problem,) = hub_problems("nobody/nothing")
    assert "http://127.0.0.1:1 cannot be reached" in problem and "copy the model to this machine" in problem


def test_the_folder_of_a_model_on_this_machine(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert cached_folder("some/model") == str(snapshot)
    assert cached_folder(str(tmp_path)) == str(tmp_path)
    assert [cached_folder(other) for other in ("other/model", "no hub id!", "", "hdfs://a/b")] == [None] * 4
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached_folder("~/models--some--model") == str(tmp_path / "models--some--model")
