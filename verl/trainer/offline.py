"""What the entry points without a training loop share: Ray around the work, and a short message when it fails."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl.trainer.run.launch import catch_sigterm, describe, interruption, root_cause, start_ray, stop_ray
from verl.utils.dataset.files import localize, read_parquet

ERROR_LOG = "error.log"


def run_offline(config: DictConfig, device: str, prepare: Callable[[], Any], work: Callable[[Any], None]) -> None:
    """Call ``work(prepare())``, the latter before Ray starts and the former on it.

    Raises: SystemExit after a short message on standard error: 2 for what ``prepare`` refuses, 1 for other failures.
    """
    import ray

    try:
        prepared = prepare()
    except (ValueError, OSError) as error:
        _exit(f"error in the configuration: {error}", 2)
    failure, owns_ray = None, False
    catch_sigterm()
    try:
        owns_ray = start_ray(OmegaConf.create({"ray_kwargs": config.ray_kwargs, "trainer": {"device": device}}))
        catch_sigterm()  # Ray has set a handler of its own
        work(prepared)
        if config.ray_kwargs.get("timeline_json_file"):
            ray.timeline(filename=config.ray_kwargs.timeline_json_file)
    except KeyboardInterrupt:
        failure = interruption()
    except Exception as error:  # whatever it is, the person at the terminal gets its cause and not Ray's frames
        failure = _report(error), 1
    finally:
        stop_ray(owns_ray)
    if failure is not None:
        _exit(*failure)


def _report(error: Exception) -> str:
    """Write the whole trace into Hydra's folder of this run and return the cause."""
    folder = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else os.getcwd()
    path = Path(folder, ERROR_LOG)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"Error: {describe(root_cause(error))}\nThe whole trace is in {path}"


def _exit(message: str, code: int) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.exit(code)


def read_rows(path: str) -> tuple[str, pa.Table]:
    """Return where a parquet file lies on this machine, and its content.

    Raises: DataError naming the file.
    """
    local = localize([path if "://" in path else os.path.expanduser(path)])[0]
    return local, read_parquet(local)
