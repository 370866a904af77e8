"""Run a command without a training loop on Ray."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.run_config import RayConfig
from verl.trainer.run.launch import ray_session
from verl.utils.dataset.files import localize, read_parquet
from verl.utils.structured import parse_node


def cluster_of(ray_kwargs: DictConfig) -> RayConfig:
    """Parse the node ``ray_kwargs``."""
    tree: Any = OmegaConf.to_container(ray_kwargs, resolve=True)
    return parse_node(tree, RayConfig)[0]


def offline_session(ray_kwargs: DictConfig, device: str) -> AbstractContextManager[None]:
    """Run the enclosed code on Ray; the trace of a failure goes to Hydra's folder. See ``ray_session``."""
    folder = HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else os.getcwd()
    return ray_session(cluster_of(ray_kwargs), device, Path(folder))


def read_rows(path: str) -> tuple[str, pa.Table]:
    """Return the local path of a parquet file, and its content.

    Raises: DataError naming the file.
    """
    local = localize([path if "://" in path else os.path.expanduser(path)])[0]
    return local, read_parquet(local)
