"""Where the metrics of a run go: console, files, and the services of experiment trackers.

Importing this module imports no tracker: each backend imports its own library when it is built.
"""

import importlib.util
import json
import logging
import math
import numbers
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.utils import envs
from verl.utils.observe.console import get_console
from verl.utils.observe.generations import ValidationGenerationsLogger

__all__ = ["Tracking", "ValidationGenerationsLogger", "check_backends"]

logger = logging.getLogger(__name__)

PACKAGE_OF_BACKEND: dict[str, str | None] = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "vemlp_wandb": "volcengine_ml_platform",
    "tensorboard": "tensorboard",
    "console": None,
    "clearml": "clearml",
    "trackio": "trackio",
    "file": None,
}


class UnknownBackendError(ValueError, AssertionError):
    """``trainer.logger`` names something that is not a tracking backend."""


class MissingBackendError(ValueError, ImportError):
    """``trainer.logger`` names a backend whose package is not installed."""


def backend_names(backends: str | Iterable[str]) -> list[str]:
    """Return the backends that ``trainer.logger`` names, the deprecated ``tracking`` as ``wandb``.

    Raises: UnknownBackendError, which is a ValueError and an AssertionError.
    """
    names = [backends] if isinstance(backends, str) else list(backends)
    for position, name in enumerate(names):
        if name == "tracking":
            logger.warning("trainer.logger: 'tracking' is deprecated, write 'wandb'")
            names[position] = "wandb"
        elif name not in PACKAGE_OF_BACKEND:
            raise UnknownBackendError(f"trainer.logger: {name!r} is none of {sorted(PACKAGE_OF_BACKEND)}")
    return list(dict.fromkeys(names))


def check_backends(backends: str | Iterable[str]) -> list[str]:
    """Return the backends that ``trainer.logger`` names when all of them can be used here.

    Raises: UnknownBackendError; MissingBackendError, a ValueError that names the package and what to write instead.
    """
    names = backend_names(backends)
    missing = {name: package for name in names if (package := PACKAGE_OF_BACKEND[name]) and not _installed(package)}
    if missing:
        rest = [name for name in names if name not in missing] or ["console"]
        packages = ", ".join(f"{name!r} needs the package {package}" for name, package in missing.items())
        raise MissingBackendError(
            f"trainer.logger={names}: {packages}, which is not installed. Install it, or write "
            f"trainer.logger='[{','.join(rest)}]'"
        )
    return names


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class Tracking:
    """Send metrics to every backend that a run has chosen."""

    supported_backend = [*PACKAGE_OF_BACKEND, "tracking"]

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        config = config or {}
        self.failures: Counter[str] = Counter()
        self.logger: dict[str, Any] = {}
        for name in check_backends(default_backend):
            try:
                self.logger[name] = _BACKENDS[name](project_name, experiment_name, config)
            except Exception as error:  # each library raises what it likes
                error.add_note(f"trainer.logger: {name!r} could not be started")
                raise

    def log(self, data: Mapping[str, Any], step: int, backend: str | list[str] | None = None) -> None:
        """Send the metrics of a step to all backends, or to those that ``backend`` names.

        A backend that fails does not end the run, which has a record of its own: a warning says so.
        """
        wanted = self.logger if backend is None else [backend] if isinstance(backend, str) else backend
        for name, instance in self.logger.items():
            if name in wanted:
                try:
                    instance.log(data=data, step=step)
                except Exception as error:  # each library raises what it likes
                    self._warn(name, f"step {step}", error)

    def finish(self) -> None:
        """Flush and close every backend."""
        backends, self.logger = self.logger, {}
        for name, instance in backends.items():
            try:
                instance.finish()
            except Exception as error:  # as above; and the other backends are closed as well
                logger.warning("trainer.logger: %r could not be closed: %s: %s", name, type(error).__name__, error)
            if self.failures[name]:
                logger.warning("trainer.logger: %r has missed the metrics of %d steps", name, self.failures[name])

    def _warn(self, name: str, what: str, error: Exception) -> None:
        """Warn of the first failure of a backend, and of each tenth time as many."""
        self.failures[name] += 1
        if str(self.failures[name]).rstrip("0") == "1":
            logger.warning(
                "trainer.logger: %r has not taken the metrics of %s, and the run goes on: %s: %s",
                *(name, what, type(error).__name__, error),
            )

    def __del__(self) -> None:
        if hasattr(self, "logger"):
            self.finish()


# ---- backends


class LocalLogger:
    """Write one line per step to the console, numbers only."""

    def __init__(
        self, project_name: str = "", experiment_name: str = "", config: Mapping[str, Any] | None = None
    ) -> None:
        self.console = get_console()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write ``step:<n> - key:value - ...``."""
        values = [f"{key}:{_shown(value)}" for key, value in data.items() if isinstance(value, numbers.Number)]
        self.console.info(" - ".join([f"step:{step}", *values]))

    def finish(self) -> None:
        """Do nothing: every line is written at once."""


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{float(value):.6g}"


class FileLogger:
    """Append one JSON object per step to a file, flushed at once.

    The file is ``VERL_FILE_LOGGER_PATH``, or ``<VERL_FILE_LOGGER_ROOT or .>/<project>/<experiment>.jsonl``. Its lines
    are those of a run's record without details: ``verl.utils.observe.record.read_record`` reads it.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
    ) -> None:
        chosen = path or envs.read("VERL_FILE_LOGGER_PATH")
        root = envs.read("VERL_FILE_LOGGER_ROOT", ".") or "."
        self.path = (Path(chosen) if chosen else Path(root, project_name, f"{experiment_name}.jsonl")).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write ``{"step": ..., "data": {...}}``."""
        values = {key: plain(value) for key, value in data.items()}
        self.file.write(json.dumps({"step": step, "data": values}, ensure_ascii=False, allow_nan=False) + "\n")
        self.file.flush()

    def finish(self) -> None:
        """Close the file."""
        self.file.close()


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Text -> the number for which JSON has no other name; protocol buffers write them in JSON in the same way."""


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: arrays and tensors as lists and numbers, what else there is as text.

    A number that is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``; ``numbers_of`` turns it back.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
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
    """Return metrics as they were before ``plain``, numbers that are not finite among them."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: numbers_of(part) for key, part in value.items()}
    return [numbers_of(part) for part in value] if isinstance(value, list) else value


class _WandbLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.wandb = wandb
        proxy = _trainer(config).get("wandb_proxy")
        settings = wandb.Settings(https_proxy=proxy) if proxy else None
        wandb.init(project=project_name, name=experiment_name, config=dict(config), settings=settings)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.wandb.log(data=dict(data), step=step)

    def finish(self) -> None:
        self.wandb.finish(exit_code=0)


class _VemlpWandbLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import volcengine_ml_platform
        from volcengine_ml_platform import wandb

        self.wandb = wandb
        volcengine_ml_platform.init(
            ak=_required_variable("VOLC_ACCESS_KEY_ID", "vemlp_wandb"),
            sk=_required_variable("VOLC_SECRET_ACCESS_KEY", "vemlp_wandb"),
            region=_required_variable("MLP_TRACKING_REGION", "vemlp_wandb"),
        )
        wandb.init(project=project_name, name=experiment_name, config=dict(config), sync_tensorboard=True)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.wandb.log(data=dict(data), step=step)

    def finish(self) -> None:
        self.wandb.finish(exit_code=0)


class _MlflowLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(envs.read("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db"))
        experiment = mlflow.set_experiment(project_name)
        mlflow.start_run(experiment_id=experiment.experiment_id, run_name=experiment_name)
        mlflow.log_params(flatten(config))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        values = {mlflow_key(key): float(value) for key, value in data.items() if isinstance(value, numbers.Real)}
        self.mlflow.log_metrics(metrics=values, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


def mlflow_key(key: str) -> str:
    """Return a metric name in the characters that mlflow allows."""
    return re.sub(r"[^/\w.\- :]", "_", key.replace("@", "_at_"))


def flatten(config: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Return a nested mapping as one level, keys joined by the separator; lists by their positions."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        children = (
            value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
        )
        if children is None:
            flat[prefix] = value
            return
        for key, child in children:
            visit(f"{prefix}{separator}{key}" if prefix else str(key), child)

    visit("", config)
    return flat


class _SwanlabLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import swanlab

        self.swanlab = swanlab
        if key := envs.read("SWANLAB_API_KEY"):
            swanlab.login(key)
        swanlab.init(
            project=project_name,
            experiment_name=experiment_name,
            config={"FRAMEWORK": "verl", **config},
            logdir=envs.read("SWANLAB_LOG_DIR", "swanlog"),
            mode=envs.read("SWANLAB_MODE", "cloud"),
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.swanlab.log(data=dict(data), step=step)

    def finish(self) -> None:
        self.swanlab.finish()


class _TensorboardLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = envs.read("TENSORBOARD_DIR", f"tensorboard_log/{project_name}/{experiment_name}")
        Path(str(folder)).mkdir(parents=True, exist_ok=True)
        self.writer = SummaryWriter(folder)
        get_console().info("tensorboard log in %s", folder)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in data.items():
            if isinstance(value, numbers.Number):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class _ClearmlLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import clearml

        self.task = clearml.Task.init(
            task_name=experiment_name, project_name=project_name, continue_last_task=True, output_uri=False
        )
        self.task.connect_configuration(dict(config), name="Hyperparameters")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        reporter = self.task.get_logger()
        for key, value in data.items():
            title, _, series = key.partition("/")
            if isinstance(value, numbers.Number):
                reporter.report_scalar(title=title, series=series or title, value=value, iteration=step)
            else:
                logger.warning("clearml takes numbers only: %s of type %s is dropped", key, type(value).__name__)

    def finish(self) -> None:
        self.task.close()


class _TrackioLogger:
    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project=project_name, name=experiment_name, config=dict(config))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.trackio.log(dict(data), step=step)

    def finish(self) -> None:
        self.trackio.finish()


_BACKENDS: dict[str, Any] = {
    "wandb": _WandbLogger,
    "mlflow": _MlflowLogger,
    "swanlab": _SwanlabLogger,
    "vemlp_wandb": _VemlpWandbLogger,
    "tensorboard": _TensorboardLogger,
    "console": LocalLogger,
    "clearml": _ClearmlLogger,
    "trackio": _TrackioLogger,
    "file": FileLogger,
}


def _trainer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    node: Mapping[str, Any] = config.get("trainer") or {}
    return node


def _required_variable(name: str, backend: str) -> str:
    value = envs.read(name)
    if not value:
        raise ValueError(f"trainer.logger: {backend!r} needs the environment variable {name}")
    return value
