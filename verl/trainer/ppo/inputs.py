"""What can be known to be wrong with a run before Ray, torch or a model is started."""

import ast
import json
import os
import struct
from collections.abc import Iterator
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


class NameNotDefinedError(InputError, AttributeError):
    """A Python file does not define what the configuration names in it."""


def check_inputs(config: Any) -> None:
    """Check configuration, trackers, data files, reward function, model folders and the checkpoint to resume from.

    Raises: ValueError naming the dotted key or the file, the value, and what would be right.
    """
    validate_config(config, use_reference_policy=config_needs_reference(config), use_critic=need_critic(config))
    check_backends(config.trainer.logger)
    check_data(config)
    check_python_file("custom_reward_function", config.custom_reward_function.path, config.custom_reward_function.name)
    check_model("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    if need_critic(config):
        check_model("critic.model.path", config.critic.model.path, tokenizer=False)
    find_resume_folder(config)


# ---- data


def check_data(config: Any) -> None:
    """Check that the data files are parquet files with rows and a prompt column; a custom class reads its own."""
    data = config.data
    if (data.get("custom_cls") or {}).get("path"):
        return
    for key in ("train_files", "val_files"):
        rows = sum(count_rows(f"data.{key}", path, data.prompt_key) for path in _paths(f"data.{key}", data[key]))
        size = data.get("gen_batch_size", data.train_batch_size)
        if key == "train_files" and rows and rows < size:
            raise InputError(
                f"data.train_files: {rows} rows in all, fewer than data.train_batch_size={size}: add rows or lower it"
            )


def _paths(key: str, value: Any) -> list[str]:
    paths = [value] if isinstance(value, str) else list(value or [])
    if not paths:
        raise InputError(f"{key}={value!r} must name a parquet file or a list of them")
    return [os.path.expanduser(str(path)) for path in paths]


def count_rows(key: str, path: str, prompt_key: str) -> int:
    """Return the rows of a parquet file from its footer; 0 for a file that is not on this machine."""
    if path.startswith("hdfs://"):
        return 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.isfile(path):
        raise InputNotFoundError(f"{key}: {path}: no such file; write one with the scripts of examples/data_preprocess")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{key}: {path}: cannot be read as parquet: {error}") from error
    columns = file.schema_arrow.names
    if prompt_key not in columns:
        raise InputError(f"{key}: {path}: has no column {prompt_key!r} (data.prompt_key); it has {columns}")
    if not file.metadata.num_rows:
        raise InputError(f"{key}: {path}: has no row")
    return int(file.metadata.num_rows)


# ---- Python files


def check_python_file(key: str, path: Any, name: Any) -> None:
    """Check that a file exists, is Python and defines a name; it is not executed."""
    if not path or str(path).startswith("pkg://"):
        return
    file = Path(os.path.expanduser(str(path).removeprefix("file://")))
    if not file.is_file():
        raise InputNotFoundError(f"{key}.path={path}: no such file")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{key}.path={path}: is not Python: {error}") from error
    names = set(_defined_names(tree.body))
    if "*" not in names and name not in names:
        raise NameNotDefinedError(f"{key}.name={name!r}: {path} does not define it; it defines {sorted(names)}")


def _defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind; ``*`` where some cannot be told."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for field in ("body", "orelse", "finalbody"):
                yield from _defined_names(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined_names(handler.body)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from ("*",) if "globals" in ast.dump(node.value.func) else ()


# ---- models


def check_model(key: str, path: Any, tokenizer: bool = True) -> None:
    """Check that a local model folder holds a configuration, whole weight files and a tokenizer; no hub is asked."""
    text = os.path.expanduser(str(path or ""))
    if not text:
        raise InputError(f"{key} must name a model folder or a model of the hub, got {path!r}")
    folder = Path(text)
    if not folder.exists():
        if text.startswith(("/", ".", "~")) or text.count("/") > 1 and "://" not in text:
            raise InputNotFoundError(f"{key}={path}: no such folder")
        return  # a model of the hub, or on HDFS
    if not folder.is_dir():
        raise InputError(f"{key}={path}: must be a folder with config.json and weights, this is a file")
    _check_model_config(key, folder)
    for weights in _weight_files(key, folder):
        _check_weights(key, weights)
    if tokenizer and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputNotFoundError(f"{key}={path}: has no tokenizer, none of {', '.join(_TOKENIZER_FILES)}")


def _check_model_config(key: str, folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise InputNotFoundError(f"{key}={folder}: has no config.json; give the folder of a transformers checkpoint")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{key}: {file}: is not JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise InputError(f"{key}: {file}: names no model_type, so transformers cannot tell the architecture")


def _weight_files(key: str, folder: Path) -> list[Path]:
    index = next(iter(folder.glob("*.index.json")), None)
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
