"""Send a run's metrics and samples to the console, to files, and to experiment trackers.

Each backend imports its library when it is constructed, so importing this module imports no tracker.
"""

import configparser
import json
import logging
import math
import netrc
import numbers
import os
import pkgutil
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from verl.errors import MissingPackage, WrongSetting
from verl.utils import envs
from verl.utils.failures import on_failure, only_warning
from verl.utils.import_utils import is_installed
from verl.utils.json_types import Json
from verl.utils.masking import masked
from verl.utils.observe.console import get_console

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Metrics = Mapping[str, Any]
"""Metric -> value: numbers, and text, arrays or tensors for backends that can hold them."""
Config = Mapping[str, Any]
"""The resolved configuration of a run, as plain mappings and lists."""
Trackers = Mapping[str, Any] | Sequence[str]
"""Backends by name, or their names alone."""


class Backend(Protocol):
    """One destination of metrics."""

    def log(self, data: Metrics, step: int) -> None:
        """Send the metrics of a step."""

    def finish(self) -> None:
        """Flush and close."""


def number_in(value: Any) -> int | float | None:
    """Return a number, or the number in an array or tensor without dimensions; None for other values."""
    if getattr(value, "ndim", None) == 0:
        value = value.tolist()
    return value if isinstance(value, numbers.Real) else None  # type: ignore[return-value]


def numbers_in(data: Metrics) -> dict[str, int | float]:
    """Return the metrics that are numbers."""
    found = {key: number_in(value) for key, value in data.items()}
    return {key: value for key, value in found.items() if value is not None}


# ---- backends


class LocalLogger:
    """Writes one line per step to the console, numbers only."""

    def __init__(self, project_name: str = "", experiment_name: str = "", config: Config | None = None) -> None:
        self.console = get_console()

    def log(self, data: Metrics, step: int) -> None:
        """Write ``step:<n> - key:value - ...``."""
        shown = [f"step:{step}"]
        for key, value in numbers_in(data).items():
            shown.append(f"{key}:{value if isinstance(value, int) else format(float(value), '.6g')}")
        self.console.info(" - ".join(shown))

    def finish(self) -> None:
        """Do nothing: every line is flushed when written."""


class FileLogger:
    """Appends one JSON object per step to a file and flushes it.

    The file is ``VERL_FILE_LOGGER_PATH``, or ``<VERL_FILE_LOGGER_ROOT or .>/<project>/<experiment>.jsonl``. It has the
    format of a run's record without details, so ``verl.utils.observe.record.read_record`` reads it.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Config | None = None, path: str | Path | None = None
    ) -> None:
        chosen = path or envs.read("VERL_FILE_LOGGER_PATH")
        root = envs.read("VERL_FILE_LOGGER_ROOT", ".") or "."
        self.path = (Path(chosen) if chosen else Path(root, project_name, f"{experiment_name}.jsonl")).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", encoding="utf-8")

    def log(self, data: Metrics, step: int) -> None:
        """Write ``{"step": ..., "data": {...}}``."""
        values = {key: plain(value) for key, value in data.items()}
        self.file.write(json.dumps({"step": step, "data": values}, ensure_ascii=False, allow_nan=False) + "\n")
        self.file.flush()

    def finish(self) -> None:
        """Close the file."""
        self.file.close()


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Text -> the number that JSON cannot write; protocol buffers use the same names."""


def plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors to lists and numbers, other types to text.

    A number that is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``; ``numbers_of`` reverses it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value)


def numbers_of(value: Any) -> Any:
    """Restore the numbers that ``plain`` wrote as text because they are not finite."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: numbers_of(part) for key, part in value.items()}
    return [numbers_of(part) for part in value] if isinstance(value, list) else value


class _ModuleLogger:
    """A backend whose library logs by module functions."""

    def __init__(
        self, module: ModuleType, convert: Callable[[Any], Any] = lambda value: value, **finish_options: int
    ) -> None:
        """``convert`` converts a value for the library; None leaves the metric out."""
        self.module = module
        self.convert = convert
        self.finish = partial(module.finish, **finish_options)

    def log(self, data: Metrics, step: int) -> None:
        converted = {key: self.convert(value) for key, value in data.items()}
        self.module.log({key: value for key, value in converted.items() if value is not None}, step=step)


def _wandb(project_name: str, experiment_name: str, config: Config) -> Backend:
    import wandb

    proxy = (config.get("trainer") or {}).get("wandb_proxy")
    settings = wandb.Settings(https_proxy=proxy) if proxy else None
    wandb.init(project=project_name, name=experiment_name, config=masked(config), settings=settings)
    backend = _ModuleLogger(wandb)
    backend.finish = partial(_finish_wandb, wandb)
    return backend


def _finish_wandb(wandb: ModuleType) -> None:
    """End the run and wandb's process, which Ray would kill before the hook that wandb leaves for the exit."""
    try:
        wandb.finish(exit_code=0)
    finally:
        wandb.teardown(exit_code=0)


def _vemlp_wandb(project_name: str, experiment_name: str, config: Config) -> Backend:
    import volcengine_ml_platform
    from volcengine_ml_platform import wandb

    variables = {"ak": "VOLC_ACCESS_KEY_ID", "sk": "VOLC_SECRET_ACCESS_KEY", "region": "MLP_TRACKING_REGION"}
    for variable in variables.values():
        if not envs.read(variable):
            raise ValueError(f"trainer.logger: 'vemlp_wandb' needs the environment variable {variable}")
    volcengine_ml_platform.init(**{name: envs.read(variable) for name, variable in variables.items()})
    wandb.init(project=project_name, name=experiment_name, config=masked(config), sync_tensorboard=True)
    return _ModuleLogger(wandb, exit_code=0)


def _swanlab(project_name: str, experiment_name: str, config: Config) -> Backend:
    import swanlab

    if key := envs.read("SWANLAB_API_KEY"):
        swanlab.login(key)
    swanlab.init(
        project=project_name,
        experiment_name=experiment_name,
        config={"FRAMEWORK": "verl", **masked(config)},
        logdir=envs.read("SWANLAB_LOG_DIR", "swanlog"),
        mode=envs.read("SWANLAB_MODE", "cloud"),
    )

    def convert(value: Any) -> Any:
        """Keep numbers and SwanLab's media; SwanLab would log an error for any other value in each step."""
        first = value[0] if isinstance(value, list) and value else value
        is_media = type(first).__module__.startswith(("swanlab", "pyecharts"))
        return value if is_media else number_in(value)

    return _ModuleLogger(swanlab, convert)


def _trackio(project_name: str, experiment_name: str, config: Config) -> Backend:
    import trackio

    resume = envs.read("TRACKIO_RESUME", "never")
    trackio.init(project=project_name, name=experiment_name, config=masked(config), resume=resume)

    def convert(value: Any) -> Any:
        """Turn an array or tensor into a number or a histogram."""
        if not hasattr(value, "ndim"):
            return value
        number = number_in(value)
        return trackio.Histogram(value.tolist()) if number is None else number

    return _ModuleLogger(trackio, convert)


class _MlflowLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Config) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(envs.read("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db"))
        # Of a server that is gone, MLflow would keep each step waiting for minutes.
        envs.write_default({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"})
        experiment = mlflow.set_experiment(project_name)
        run = mlflow.start_run(experiment_id=experiment.experiment_id, run_name=experiment_name)
        parameters = {mlflow_key(key): value for key, value in flatten(masked(config)).items()}
        # A run that MLFLOW_RUN_ID continues keeps its parameters: MLflow lets no value change.
        mlflow.log_params({key: value for key, value in parameters.items() if key not in run.data.params})

    def log(self, data: Metrics, step: int) -> None:
        values = {mlflow_key(key): float(value) for key, value in numbers_in(data).items()}
        self.mlflow.log_metrics(metrics=values, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


_MLFLOW_KEY_LENGTH = 250


def mlflow_key(key: str) -> str:
    """Turn a name into a valid one for MLflow: its characters and length, no empty part and no dots in its path."""
    allowed = re.sub(r"[^/\w.\- :]", "_", key.replace("@", "_at_"))
    path = "/".join(part for part in allowed.split("/") if part.strip("."))
    return path[:_MLFLOW_KEY_LENGTH].rstrip("/") or "_"


def flatten(config: Config, separator: str = "/") -> dict[str, Json]:
    """Flatten a nested mapping: join keys, and positions in lists, by the separator."""
    flat: dict[str, Json] = {}

    def visit(prefix: str, value: Json) -> None:
        children: Iterable[tuple[str | int, Json]]
        if isinstance(value, list):
            children = enumerate(value)
        elif isinstance(value, Mapping):
            children = value.items()
        else:
            flat[prefix] = value
            return
        for key, child in children:
            visit(f"{prefix}{separator}{key}" if prefix else str(key), child)

    visit("", config)
    return flat


class _TensorboardLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = envs.read("TENSORBOARD_DIR", f"tensorboard_log/{project_name}/{experiment_name}")
        self.writer = SummaryWriter(folder)
        get_console().info("tensorboard log in %s", folder)

    def log(self, data: Metrics, step: int) -> None:
        for key, value in numbers_in(data).items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class _ClearmlLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Config) -> None:
        import clearml

        self.task = clearml.Task.init(
            task_name=experiment_name, project_name=project_name, continue_last_task=True, output_uri=False
        )
        self.task.connect_configuration(masked(config), name="Hyperparameters")

    def log(self, data: Metrics, step: int) -> None:
        reporter = self.task.get_logger()
        for key, value in data.items():
            title, _, series = key.partition("/")
            number = number_in(value)
            if number is not None:
                reporter.report_scalar(title=title, series=series or title, value=number, iteration=step)
            else:
                logger.warning("clearml accepts numbers only: dropped %s of type %s", key, type(value).__name__)

    def finish(self) -> None:
        self.task.close()


_BACKENDS: dict[str, tuple[str | None, Callable[[str, str, Config], Backend]]] = {
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", _MlflowLogger),
    "swanlab": ("swanlab", _swanlab),
    "vemlp_wandb": ("volcengine_ml_platform", _vemlp_wandb),
    "tensorboard": ("tensorboard", _TensorboardLogger),
    "console": (None, LocalLogger),
    "clearml": ("clearml", _ClearmlLogger),
    "trackio": ("trackio", _trackio),
    "file": (None, FileLogger),
}
"""Name in ``trainer.logger`` -> the package that it needs, and the function that starts it."""


# ---- the trackers of a run


def check_backends(backends: str | Iterable[str]) -> list[str]:
    """Return the backends that ``trainer.logger`` names after checking that their packages are installed.

    The deprecated ``tracking`` means ``wandb``.

    Raises: WrongSetting, which is a ValueError and an AssertionError; MissingPackage, a ValueError that
        names the package and an alternative.
    """
    given = [backends] if isinstance(backends, str) else list(backends)
    if "tracking" in given:
        logger.warning("trainer.logger: 'tracking' is deprecated, write 'wandb'")
    names = list(dict.fromkeys("wandb" if name == "tracking" else name for name in given))
    for name in names:
        if name not in _BACKENDS:
            raise WrongSetting(f"trainer.logger: {name!r} must be one of {sorted(_BACKENDS)}")
    needed = {name: _BACKENDS[name][0] for name in names}
    missing = {name: package for name, package in needed.items() if package and not is_installed(package)}
    if missing:
        rest = [name for name in names if name not in missing] or ["console"]
        packages = ", ".join(f"{name!r} needs the package {package}" for name, package in missing.items())
        raise MissingPackage(
            f"trainer.logger={names}: {packages}, which is not installed. Install it, or set "
            f"trainer.logger='[{','.join(rest)}]'"
        )
    return names


_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
"""Modes in which wandb sends nothing."""


def wandb_obstacle(variables: Mapping[str, str]) -> str | None:
    """Return why wandb cannot log with these environment variables; None if it can. Does not import wandb."""
    if not is_installed("wandb"):
        return "the package wandb is not installed"
    settings = _wandb_settings(variables)
    if (variables.get("WANDB_MODE") or settings.get("mode")) in _WITHOUT_LOGIN:
        return None
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    url = variables.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
    host = urlsplit(url).hostname or url
    return None if _has_netrc_entry(host, variables) else f"it has no login for {host}"


def _wandb_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that the ``wandb`` command saved for this user and folder."""
    folders = (variables.get("WANDB_CONFIG_DIR") or "~/.config/wandb", Path(variables.get("WANDB_DIR") or ".", "wandb"))
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, UnicodeError):
        parser.read([Path(folder, "settings").expanduser() for folder in folders], encoding="utf-8")
    return dict(parser["default"]) if parser.has_section("default") else {}


def _has_netrc_entry(host: str, variables: Mapping[str, str]) -> bool:
    given = variables.get("NETRC")
    for file in [given] if given else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError, UnicodeError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False


_PATIENCE_S = 1.0
_PAUSE = 10
"""A backend that takes longer than ``_PATIENCE_S`` to fail is left alone for this many times the seconds it took."""


class Tracking:
    """Sends metrics to every backend of ``trainer.logger``."""

    supported_backend = [*_BACKENDS, "tracking"]

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Config | None = None,
    ) -> None:
        config = config or {}
        self.failures: Counter[str] = Counter()
        self._paused_until: dict[str, float] = {}
        self.logger: dict[str, Backend] = {}
        for name in check_backends(default_backend):
            _, start = _BACKENDS[name]
            note = f"trainer.logger: {name!r} could not be started"
            with on_failure(methodcaller("add_note", note)):
                self.logger[name] = start(project_name, experiment_name, config)

    def log(self, data: Metrics, step: int, backend: str | list[str] | None = None) -> None:
        """Send the metrics of a step to all backends, or only to the named ``backend``.

        A failing backend causes a warning and does not end the run, since the run's record holds the metrics too. A
        backend that takes a time t to fail gets no metrics for 10 t.
        """
        wanted = self.logger if backend is None else [backend] if isinstance(backend, str) else backend
        for name, instance in self.logger.items():
            if name not in wanted:
                continue
            began = time.monotonic()
            if began < self._paused_until.get(name, began):
                self.failures[name] += 1
                continue
            try:
                instance.log(data=data, step=step)
            except Exception as error:  # libraries raise arbitrary classes
                now = time.monotonic()
                if now - began > _PATIENCE_S:
                    self._paused_until[name] = now + _PAUSE * (now - began)
                self.failures[name] += 1
                if str(self.failures[name]).rstrip("0") == "1":  # the 1st, 10th, 100th, ... failure
                    text = f"{type(error).__name__}: {error}"
                    logger.warning("trainer.logger: %r failed to log step %d; the run continues: %s", name, step, text)

    def finish(self) -> None:
        """Flush and close every backend."""
        backends = self.logger
        self.logger = {}
        for name, instance in backends.items():
            with only_warning(logger, "trainer.logger: %r could not be closed", name):  # the others must be closed too
                instance.finish()
            if self.failures[name]:
                logger.warning("trainer.logger: %r missed the metrics of %d steps", name, self.failures[name])

    def __del__(self) -> None:
        if hasattr(self, "logger"):
            self.finish()


# ---- samples of validation

Sample = Sequence[str | float]
"""One validation sample: (input, output, score)."""


class ValidationGenerationsLogger:
    """Sends the samples of each validation to every tracker that shows text."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.rows: list[list[str | float]] = []

    def log(self, loggers: Trackers, samples: Sequence[Sample], step: int) -> None:
        """Log the samples of one validation to the given backends that can show text."""
        writers: dict[str, Callable[[Sequence[Sample], int], None]] = {
            "wandb": partial(self._log_table, "wandb"),
            "vemlp_wandb": partial(self._log_table, "volcengine_ml_platform.wandb"),
            "swanlab": self._log_swanlab,
            "trackio": partial(self._log_table, "trackio"),
            "mlflow": self._log_mlflow,
            "clearml": self._log_clearml,
        }
        for name in loggers:
            if name in writers:
                writers[name](samples, step)
            elif name == "tensorboard" and isinstance(loggers, Mapping):
                self._log_tensorboard(loggers[name].writer, samples, step)

    def _log_table(self, library: str, samples: Sequence[Sample], step: int) -> None:
        tracker = pkgutil.resolve_name(library)
        columns = ["step"]
        for number in range(1, len(samples) + 1):
            columns += [f"input_{number}", f"output_{number}", f"score_{number}"]
        self.rows.append([step, *(value for sample in samples for value in sample)])
        # A logged table cannot grow: each validation logs a new one with all rows so far.
        rows = [row for row in self.rows if len(row) == len(columns)]
        tracker.log({"val/generations": tracker.Table(columns=columns, data=rows)}, step=step)

    def _log_swanlab(self, samples: Sequence[Sample], step: int) -> None:
        import swanlab

        table = swanlab.echarts.Table()
        table.add(headers=["step", "input", "output", "score"], rows=[[step, *sample] for sample in samples])
        swanlab.log({"val/generations": table}, step=step)

    def _log_mlflow(self, samples: Sequence[Sample], step: int) -> None:
        import mlflow

        rows = [dict(zip(("input", "output", "score"), sample, strict=True)) for sample in samples]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"val_step{step}.json")
            file.write_text(json.dumps(plain(rows), ensure_ascii=False, allow_nan=False), encoding="utf-8")
            mlflow.log_artifact(str(file))

    def _log_clearml(self, samples: Sequence[Sample], step: int) -> None:
        import clearml
        import pandas as pd

        task = clearml.Task.current_task()
        if task is not None:
            table = pd.DataFrame(samples, columns=["input", "output", "score"])
            table.insert(0, "step", step)
            task.get_logger().report_table(
                series="Validation generations", title="Validation", table_plot=table, iteration=step
            )

    def _log_tensorboard(self, writer: "SummaryWriter", samples: Sequence[Sample], step: int) -> None:
        named = enumerate(samples, 1)
        parts = [f"**sample {i}** (score {score})\n\n{given}\n\n{output}" for i, (given, output, score) in named]
        writer.add_text("val/generations", "\n\n---\n\n".join(parts), step)
        writer.flush()
