import json
import logging

import numpy as np
import pytest
import torch

from verl.utils import tracking
from verl.utils.console import get_console
from verl.utils.tracking import (
    FileLogger,
    MissingBackendError,
    Tracking,
    UnknownBackendError,
    check_backends,
    flatten,
    mlflow_key,
)


def test_names_are_checked_before_anything_is_built(monkeypatch, caplog):
    monkeypatch.setattr(tracking, "_installed", lambda package: package == "tensorboard")
    assert check_backends("console") == ["console"]
    assert check_backends(["console", "tensorboard", "console"]) == ["console", "tensorboard"]
    with pytest.raises(UnknownBackendError, match="'wandbb' is none of") as error:
        check_backends(["console", "wandbb"])
    assert isinstance(error.value, AssertionError) and isinstance(error.value, ValueError)
    with pytest.raises(
        MissingBackendError, match=r"package wandb, which is not installed.*trainer.logger='\[console\]'"
    ):
        check_backends(["console", "wandb"])
    with pytest.raises(MissingBackendError, match=r"volcengine_ml_platform.*trainer.logger='\[console\]'"):
        check_backends("vemlp_wandb")
    with caplog.at_level(logging.WARNING), pytest.raises(MissingBackendError):
        check_backends("tracking")
    assert "deprecated" in caplog.text


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


def test_tensorboard_is_read_back(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    log = Tracking("p", "e", ["tensorboard"])
    for step in (1, 2):
        log.log({"actor/lr": step * 0.5, "text": "no number"}, step=step)
    log.finish()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 0.5), (2, 1.0)]


def test_names_and_parameters_for_mlflow():
    assert mlflow_key("val-core/openai/gsm8k/acc/best@4/mean") == "val-core/openai/gsm8k/acc/best_at_4/mean"
    assert mlflow_key("a b:c(d)") == "a b:c_d_"
    assert flatten({"a": {"b": 1, "c": [2, {"d": 3}]}, "e": None}) == {"a/b": 1, "a/c/0": 2, "a/c/1/d": 3, "e": None}


def test_the_console_follows_a_replaced_stdout(capsys):
    get_console().info("first")
    assert capsys.readouterr().out == "first\n"
