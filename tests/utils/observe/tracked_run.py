"""Log a run to a tracker, and print what the tracker's own library reads back; the environment has no test packages.

python tracked_run.py BACKEND log FIRST LAST   steps FIRST to LAST, of which a later attempt repeats some
python tracked_run.py BACKEND fail DAMAGED     six steps; the folder DAMAGED, or wandb's process, is gone in the third
python tracked_run.py BACKEND read             print the runs as JSON
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from verl.utils.observe.record import RunRecord
from verl.utils.observe.tracking import Tracking, ValidationGenerationsLogger, mlflow_key, plain

PROJECT, NAME = "project", "run"
CONFIG = {
    "trainer": {"seed": 1, "nothing": None, "list": [1, {"a": 2}], "long": "x" * 7000},
    "odd@name": {"a//b": 1},
    "api_key": "hidden",
}
ODD_NAMES = [
    "val-core/openai/gsm8k/acc/best@4/mean",
    "brackets (a) [b] {c}",
    "ünï/数",
    "dots.in.it",
    "/first",
    "last/",
    "double//slash",
    "../up",
    "percent%",
    "hash#1",
    "quote\"'",
    "back\\slash",
    "time_",
    "l" * 300,
    "below/a",
    "below/a/b",
]
BACKGROUND_S = 3
"""Seconds in which a library that logs in the background writes what it has got."""
ROWS = [("question ünï <b>", "answer\nof | two lines $x$", 1.0), ("", "no number", float("nan"))]


def metrics(step: int, attempt: int) -> dict[str, object]:
    """Return the metrics of a step; those of another attempt differ."""
    values = {name: step + number / 8 + attempt / 64 for number, name in enumerate(ODD_NAMES)}
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith("file:"):  # where names are those of files
        del values["below/a/b"]
    return values | {
        "attempt": attempt,
        "nan": float("nan"),
        "infinity": float("inf"),
        "minus_infinity": -float("inf"),
        "sometimes_nan": float("nan") if step % 2 else 0.5,
        "true": True,
        "false": False,
        "numpy_bool": np.bool_(step % 2),
        "numpy": np.float32(step / 3),
        "numpy_nan": np.float64("nan"),
        "no_dimension": np.array(step / 4),
        "integer": np.int64(2**53 + 2),
        "tiny": 1e-300,
        "histogram": np.arange(100.0) / step,
        "short_histogram": np.array([1.0, 2.0, 2.0]),
        "text": "words",
        "nothing": None,
        "list": [1, 2, 3],
    }


def log(backend: str, first: int, last: int) -> None:
    """Log some steps, each with a table of samples."""
    attempt = 1 if first == 1 else 2
    config = CONFIG | {"steps": last}  # which a resume may change
    tracking = Tracking(PROJECT, NAME, [backend], config)
    generations = ValidationGenerationsLogger(PROJECT, NAME)
    record = RunRecord("record", None if first == 1 else first - 1)
    for step in range(first, last + 1):
        generations.log(tracking.logger, ROWS, step)
        tracking.log(metrics(step, attempt), step)
        record.log(metrics(step, attempt), step)
    tracking.finish()
    assert not tracking.failures, tracking.failures
    assert backend != "wandb" or not children()  # nothing is left to do at the exit


def fail(backend: str, damaged: str) -> None:
    """Log six steps; the folder of the tracker is a file in the third and fourth, or its process is killed."""
    tracking = Tracking(PROJECT, NAME, [backend], CONFIG)
    record = RunRecord("record", None)
    place, aside = Path(damaged), Path("aside")
    for step in range(1, 7):
        if step == 3:
            time.sleep(BACKGROUND_S)
            if backend == "wandb":
                for child in children():
                    child.kill()
            else:
                place.rename(aside)
                place.touch()
        tracking.log({"x": step}, step)
        record.log({"x": step}, step)
        if step == 4 and backend != "wandb":
            time.sleep(BACKGROUND_S)
            place.unlink()
            aside.rename(place)
    tracking.finish()
    print("ended", dict(tracking.failures))


def children() -> list:
    """Return the processes that send the metrics."""
    import psutil

    return psutil.Process().children(recursive=True)


# ---- what the libraries read back


def read_mlflow() -> list[dict]:
    """Return the runs by ``MlflowClient``."""
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    found = []
    for run in client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id]):
        names = {mlflow_key(name): name for name in metrics(1, 1)}
        steps: dict[int, dict[str, float]] = {}
        for key in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, key):
                steps.setdefault(point.step, {})[names.get(key, key)] = point.value
        files = [file.path for file in client.list_artifacts(run.info.run_id)]
        tables = {name: mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/{name}") for name in files}
        found.append({"id": run.info.run_id, "steps": steps, "config": run.data.params, "tables": tables})
    return found


def read_trackio() -> list[dict]:
    """Return the runs by ``trackio.Api`` and the storage behind it."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found = []
    for run in trackio.Api().runs(PROJECT):
        steps: dict[int, dict] = {}
        tables = {}
        for entry in SQLiteStorage.get_logs(PROJECT, run.name, run_id=run.id):
            step = entry.pop("step")
            if "val/generations" in entry:
                tables[step] = entry.pop("val/generations")
            steps.setdefault(step, {}).update(entry)
        found.append({"id": run.id, "steps": steps, "config": run.config, "tables": tables})
    return found


def read_swanlab() -> list[dict]:
    """Return the runs by the reader of ``swanlab sync``."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = []
    for file in sorted(Path(os.environ["SWANLAB_LOG_DIR"]).glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(str(file))
        steps: dict[int, dict] = {}
        tables = {}
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "scalar":
                steps.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
            elif kind == "media":
                tables[record.media.step] = record.media.key
        config = (file.parent / "files" / "config.yaml").read_text()
        found.append({"id": file.stem, "steps": steps, "config": config, "tables": tables})
    return found


def read_wandb() -> list[dict]:
    """Return the runs from their files, in the messages that ``wandb sync`` sends."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, dict] = {}
    for file in sorted(Path(os.environ["WANDB_DIR"]).glob("wandb/offline-run-*/*.wandb")):
        run = runs.setdefault(file.stem, {"id": file.stem, "steps": {}, "config": {}, "tables": {}})
        record = wandb_internal_pb2.Record()
        for data in leveldb_records(file.read_bytes()[7:]):  # behind the mark of the file's kind
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                step = items.pop("_step")
                run["steps"].setdefault(step, {}).update(items)
                if path := items.get("val/generations/path"):
                    run["tables"][step] = json.loads((file.parent / "files" / path).read_text())
    return list(runs.values())


def leveldb_records(data: bytes, block: int = 32768, mark: int = 7):
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


if __name__ == "__main__":
    backend, verb, *given = sys.argv[1:]
    if verb == "log":
        log(backend, *map(int, given))
    elif verb == "fail":
        fail(backend, *given)
    else:
        read = {"wandb": read_wandb, "mlflow": read_mlflow, "swanlab": read_swanlab, "trackio": read_trackio}[backend]
        print(json.dumps(plain(read())))
