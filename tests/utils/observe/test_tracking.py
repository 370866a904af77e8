import json
import logging

import numpy as np
import pytest
import torch

from verl.errors import MissingPackage, WrongSetting
from verl.utils.observe import tracking
from verl.utils.observe.console import get_console
from verl.utils.observe.tracking import FileLogger, Tracking, check_backends, flatten, mlflow_key, numbers_in


def test_names_are_checked_before_anything_is_built(monkeypatch, caplog):
    monkeypatch.setattr(tracking, "is_installed", lambda package: package == "tensorboard")
    assert check_backends("console") == ["console"]
    assert check_backends(["console", "tensorboard", "console"]) == ["console", "tensorboard"]
    with pytest.raises(WrongSetting, match="'wandbb' must be one of") as error:
        check_backends(["console", "wandbb"])
    assert isinstance(error.value, AssertionError) and isinstance(error.value, ValueError)
    with pytest.raises(MissingPackage, match=r"package wandb, which is not installed.*trainer.logger='\[console\]'"):
        check_backends(["console", "wandb"])
    with pytest.raises(MissingPackage, match=r"volcengine_ml_platform.*trainer.logger='\[console\]'"):
        check_backends("vemlp_wandb")
    with caplog.at_level(logging.WARNING), pytest.raises(MissingPackage):
        check_backends("tracking")
    assert "deprecated" in caplog.text


def test_what_is_a_number():
    data = {
        "bool": True,
        "numpy": np.bool_(False),
        "array": np.array(2),
        "tensor": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    assert numbers_in(data) == {"bool": True, "numpy": False, "array": 2, "tensor": 0.5}
    others = {"text": "1", "none": None, "complex": 1j, "array": np.array([1.0]), "tensor": torch.ones(2), "list": [1]}
    assert numbers_in(others) == {}


def test_console_shows_numbers_on_one_line(capsys):
    Tracking("p", "e", ["console"]).log({"a": 1, "b": 0.123456789, "c": "text", "d": np.float32(2.5)}, step=3)
    assert capsys.readouterr().out == "step:3 - a:1 - b:0.123457 - d:2.5\n"


def test_file_holds_one_object_per_step(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    log = Tracking("project", "run", ["file"])
    log.log({"x": torch.tensor(1.5), "y": np.arange(2), "text": "ä"}, step=1)
    log.log({"x": 2}, step=2, backend="console")  # not meant for the file
    log.log({"x": 3}, step=3)
    lines = [json.loads(line) for line in (tmp_path / "project" / "run.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "data": {"x": 1.5, "y": [0, 1], "text": "ä"}}, {"step": 3, "data": {"x": 3}}]
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "chosen.jsonl"))
    assert FileLogger("project", "run").path == tmp_path / "chosen.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FileLogger("project", "run", path="~/mine.jsonl").path == tmp_path / "mine.jsonl"


def test_tensorboard_is_read_back(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log = Tracking("p", "e", ["tensorboard"])
    for step in (1, 2):
        log.log({"actor/lr": step * 0.5, "text": "no number", "complex": 1j, "tensor": torch.tensor(step)}, step=step)
    log.finish()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in events.Scalars("tensor")] == [1.0, 2.0]


def test_names_and_parameters_for_mlflow():
    assert mlflow_key("val-core/openai/gsm8k/acc/best@4/mean") == "val-core/openai/gsm8k/acc/best_at_4/mean"
    assert mlflow_key("a b:c(d)") == "a b:c_d_"
    assert [mlflow_key(name) for name in ("/a//b/", "../a/./b", "", "..", "a" * 300)] == [
        "a/b",
        "a/b",
        "_",
        "_",
        "a" * 250,
    ]
    assert flatten({"a": {"b": 1, "c": [2, {"d": 3}]}, "e": None}) == {"a/b": 1, "a/c/0": 2, "a/c/1/d": 3, "e": None}


def test_the_console_follows_a_replaced_stdout(capsys):
    get_console().info("first")
    assert capsys.readouterr().out == "first\n"


def test_a_backend_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    class Service:
        """A service that is down from the second step to the thirtieth."""

        def __init__(self, *_):
            self.taken = []

        def log(self, data, step):
            if 2 <= step <= 30:
                raise ConnectionError("no answer")
            self.taken.append(step)

        def finish(self):
            raise ConnectionError("no end")

    service = Service()
    monkeypatch.setattr(tracking.time, "monotonic", lambda: 0.0)  # no failure takes long
    monkeypatch.setitem(tracking._BACKENDS, "wandb", (None, lambda *_: service))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    log = Tracking("project", "run", ["wandb", "file"])
    for step in range(1, 32):
        log.log({"x": step}, step)
    log.finish()
    assert service.taken == [1, 31]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 31
    assert caplog.text.count("failed to log step") == 2  # of the first, and of the tenth
    assert "'wandb' failed to log step 2; the run continues: ConnectionError: no answer" in caplog.text
    assert "'wandb' missed the metrics of 29 steps" in caplog.text and "no end" in caplog.text


def test_a_backend_that_fails_slowly_is_left_alone_for_a_while(monkeypatch, caplog):
    """So that one without an answer takes a tenth of the run's time at most."""
    clock, asked = [0.0], []

    class Service:
        def log(self, data, step):
            asked.append(step)
            clock[0] += 20.0
            raise TimeoutError("no answer")

        def finish(self):
            pass

    monkeypatch.setattr(tracking.time, "monotonic", lambda: clock[0])
    monkeypatch.setitem(tracking._BACKENDS, "wandb", (None, lambda *_: Service()))
    log = Tracking("project", "run", ["wandb"])
    for step in range(1, 31):
        log.log({"x": step}, step)
        clock[0] += 10.0
    log.finish()
    assert asked == [1, 21] and "'wandb' missed the metrics of 30 steps" in caplog.text


def test_a_backend_that_cannot_start_is_named(monkeypatch):
    def refuse(*_):
        raise ConnectionError("no answer")

    monkeypatch.setitem(tracking._BACKENDS, "wandb", (None, refuse))
    with pytest.raises(ConnectionError) as error:
        Tracking("project", "run", ["wandb"])
    assert error.value.__notes__ == ["trainer.logger: 'wandb' could not be started"]
