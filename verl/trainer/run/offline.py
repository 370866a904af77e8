"""Run a command without a training loop on Ray, with a short message when it fails."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl.trainer.run.launch import catch_sigterm, interruption, report_failure, start_ray, stop_ray
from verl.utils.dataset.files import localize, read_parquet

T = TypeVar("T")


@dataclass(frozen=True)
class RayOptions:
    """The node ``ray_kwargs``, and the device of the workers."""

    device: str
    ray_init: Mapping[str, Any]
    timeline_json_file: str | None

    @classmethod
    def parse(cls, ray_kwargs: DictConfig, device: str) -> Self:
        """Parse the node."""
        node: Any = OmegaConf.to_container(ray_kwargs, resolve=True)
        return cls(device, node["ray_init"] or {}, node["timeline_json_file"])


def run_offline(options: RayOptions, prepare: Callable[[], T], work: Callable[[T], None]) -> None:
    """Call ``work(prepare())``: ``prepare`` before Ray starts, ``work`` on Ray.

    Raises: SystemExit after a short message on standard error: 2 if ``prepare`` refuses the input, else 1.
    """
    import ray

    try:
        prepared = prepare()
    except (ValueError, OSError) as error:
        _exit(f"error in the configuration: {error}", 2)
    failure: tuple[str, int] | None = None
    owns_ray = False
    catch_sigterm()
    try:
        owns_ray = start_ray(options.device, options.ray_init)
        catch_sigterm()  # Ray has replaced the handler
        work(prepared)
        if options.timeline_json_file:
            ray.timeline(filename=options.timeline_json_file)
    except KeyboardInterrupt:
        failure = interruption()
    except Exception as error:  # the user sees the cause of any failure instead of Ray's frames
        failure = report_failure(error, _hydra_folder()), 1
    finally:
        stop_ray(owns_ray)
    if failure is not None:
        _exit(*failure)


def _hydra_folder() -> Path:
    return Path(HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else os.getcwd())


def _exit(message: str, code: int) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.exit(code)


def read_rows(path: str) -> tuple[str, pa.Table]:
    """Return the local path of a parquet file, and its content.

    Raises: DataError naming the file.
    """
    local = localize([path if "://" in path else os.path.expanduser(path)])[0]
    return local, read_parquet(local)
