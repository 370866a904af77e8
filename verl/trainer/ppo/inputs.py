"""What can be known to be wrong with a run before Ray, torch or a model is started."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint import find_resume_folder
from verl.trainer.ppo.utils import config_needs_reference, need_critic
from verl.utils.config import validate_config
from verl.utils.tracking import check_backends

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class InputError(ValueError):
    """A file or folder that the configuration names cannot be used."""


class InputNotFoundError(InputError, FileNotFoundError):
    """A file or folder that the configuration names does not exist."""


def check_inputs(config: Any) -> None:
    """Check configuration, trackers, data files, model folders and the checkpoint to resume from.

    Raises: ValueError naming the dotted key or the file, the value, and what would be right.
    """
    critic = need_critic(config)
    validate_config(config, use_reference_policy=config_needs_reference(config), use_critic=critic)
    check_backends(config.trainer.logger)
    check_data(config)
    check_model("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    if critic:
        check_model("critic.model.path", config.critic.model.path, tokenizer=False)
    find_resume_folder(config)


# ---- data


def check_data(config: Any) -> None:
    """Check that the data files are parquet files with rows and a prompt column; a custom class reads its own."""
    data = config.data
    if (data.get("custom_cls") or {}).get("path"):
        return
    for key in ("train_files", "val_files"):
        paths = [data[key]] if isinstance(data[key], str) else list(data[key] or [])
        local = [os.path.expanduser(path) for path in paths if "://" not in path]
        rows = sum(count_rows(f"data.{key}", path, data.prompt_key) for path in local)
        size = data.get("gen_batch_size", data.train_batch_size)
        if key == "train_files" and len(local) == len(paths) and rows < size:
            raise InputError(
                f"data.train_files: {rows} rows in all, fewer than data.train_batch_size={size}: add rows or lower it"
            )


def count_rows(key: str, path: str, prompt_key: str) -> int:
    """Return the rows of a parquet file from its footer.

    Raises: InputError naming key, file and column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.endswith((".json", ".jsonl")):
        with open(path, "rb") as lines:
            return sum(1 for line in lines if line.strip())
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{key}={path}: cannot be read as parquet: {error}") from error
    columns = file.schema_arrow.names
    if prompt_key not in columns:
        raise InputError(f"{key}={path}: has no column {prompt_key!r} (data.prompt_key); it has {columns}")
    if not file.metadata.num_rows:
        raise InputError(f"{key}={path}: has no row")
    return int(file.metadata.num_rows)


# ---- models


def check_model(key: str, path: str, tokenizer: bool = True) -> None:
    """Check that a local model folder holds whole weight files and a tokenizer; no hub is asked.

    Raises: InputError naming key and file.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return  # a model of the hub, or on HDFS
    for weights in _weight_files(key, folder):
        _check_weights(key, weights)
    if tokenizer and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputNotFoundError(f"{key}={path}: has no tokenizer, none of {', '.join(_TOKENIZER_FILES)}")


def _weight_files(key: str, folder: Path) -> list[Path]:
    index = next(iter(sorted(folder.glob("*.index.json"))), None)
    if index is not None:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{key}: {index}: is not an index of weight files: {error}") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise InputNotFoundError(f"{key}: {index} names weight files that are missing: {missing[:4]}")
        return [folder / name for name in sorted(names)]
    found = [path for pattern in _WEIGHT_PATTERNS for path in sorted(folder.glob(pattern))]
    if not found:
        raise InputNotFoundError(f"{key}={folder}: holds no weights, no file like {', '.join(_WEIGHT_PATTERNS)}")
    return found


def _check_weights(key: str, path: Path) -> None:
    """Hold the size of a safetensors file to what its header says."""
    if path.suffix != ".safetensors":
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        header = file.read(length) if 8 + length <= size else b""
    try:
        tensors = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{key}: {path}: is not a safetensors file, or cut short in its header") from None
    if size != 8 + length + end:
        raise InputError(f"{key}: {path}: is cut short: {size} bytes, and its header asks for {8 + length + end}")
