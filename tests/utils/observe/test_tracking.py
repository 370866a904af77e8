import json
import logging

import numpy as np
import pytest
import torch

from verl.utils.observe import tracking
from verl.utils.observe.console import get_console
from verl.utils.observe.tracking import (
    FileLogger,
    MissingBackendError,
    Tracking,
    UnknownBackendError,
    ValidationGenerationsLogger,
    check_backends,
    flatten,
    mlflow_key,
)


def test_names_are_checked_before_anything_is_built(monkeypatch, caplog):
    monkeypatch.setattr(tracking, "is_installed", lambda package: package == "tensorboard")
    assert check_backends("console") == ["console"]
    assert check_backends(["console", "tensorboard", "console"]) == ["console", "tensorboard"]
    with pytest.raises(UnknownBackendError, match="'wandbb' must be one of") as error:
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
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FileLogger("project", "run", path="~/mine.jsonl").path == tmp_path / "mine.jsonl"


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


METRICS = [{"val-core/x/acc/mean@4": 0.5 * step, "actor/lr": 1e-6} for step in (1, 2)]


def log_offline(name, config=None):
    """Log two steps and a table of samples; return the open tracker."""
    log, generations = Tracking("project", "run", [name], config), ValidationGenerationsLogger("project", "run")
    for step, metrics in enumerate(METRICS, 1):
        log.log(metrics, step=step)
        generations.log(log.logger, [("question", "answer", 1.0)], step)
    return log


def test_mlflow_is_read_back(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.chdir(tmp_path)
    log_offline("mlflow", {"trainer": {"seed": 1}}).finish()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val-core/x/acc/mean_at_4")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 1.0)]
    assert run.data.params == {"trainer/seed": "1"} and run.info.run_name == "run"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["val_step1.json", "val_step2.json"]


def test_wandb_holds_the_last_step_and_the_table(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log = log_offline("wandb", {"trainer": {"seed": 1}})
    log.log({}, step=3)  # ends the step before it
    assert wandb.run.config["trainer"] == {"seed": 1} and wandb.run.name == "run"
    assert {key: wandb.run.summary[key] for key in METRICS[1]} == METRICS[1]
    assert wandb.run.summary["val/generations"]["nrows"] == 2
    log.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    lines = [line for line in wandb_history(file) if "actor/lr" in line]
    assert [{key: line[key] for key in ("_step", *METRICS[0])} for line in lines] == [
        {"_step": step, **metrics} for step, metrics in enumerate(METRICS, 1)
    ]


def wandb_history(path):
    """Return the lines of metrics in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    lines, record = [], wandb_internal_pb2.Record()
    for data in leveldb_records(path.read_bytes()[7:]):  # behind the mark of the file's kind
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            lines.append({key: value for key, value in items.items() if key[0] != "_" or key == "_step"})
    return lines


def leveldb_records(data, block=32768, mark=7):
    """Yield the records of a log in the format of LevelDB, whose first block lacks ``mark`` bytes."""
    at, whole = 0, b""
    while at + 7 <= len(data):
        left = block - (at + mark) % block
        if left < 7:  # the rest of a block holds nothing
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""


def test_swanlab_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "log"))
    log_offline("swanlab").finish()
    (run,) = (tmp_path / "log").glob("run-*")
    assert any(b"mean@4" in file.read_bytes() for file in run.rglob("*") if file.is_file())


def test_names_and_parameters_for_mlflow():
    assert mlflow_key("val-core/openai/gsm8k/acc/best@4/mean") == "val-core/openai/gsm8k/acc/best_at_4/mean"
    assert mlflow_key("a b:c(d)") == "a b:c_d_"
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


def test_a_backend_that_cannot_start_is_named(monkeypatch):
    def refuse(*_):
        raise ConnectionError("no answer")

    monkeypatch.setitem(tracking._BACKENDS, "wandb", (None, refuse))
    with pytest.raises(ConnectionError) as error:
        Tracking("project", "run", ["wandb"])
    assert error.value.__notes__ == ["trainer.logger: 'wandb' could not be started"]
