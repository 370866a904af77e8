"""Checks of files, models and machine before Ray, torch or a model is started. They take values, not the whole tree."""

import glob
import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.base_config import one_line
from verl.errors import DataError, MissingFile, WrongInput
from verl.trainer.config.run_config import RayConfig
from verl.trainer.config.written import overrides_given
from verl.utils.engine_versions import check_vllm
from verl.utils.hdfs_io import is_hdfs, missing_command
from verl.utils.hub import hub_problems
from verl.utils.value_heads import HEAD_FILE, stored_head

if TYPE_CHECKING:
    import pyarrow as pa

    from verl.utils.dataset.files import ColumnCheck

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
JSON_LINES = (".json", ".jsonl")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_PICKLED = (b"PK", b"\x80\x02")  # a zip archive, or as torch wrote before version 1.6
_AGAIN = "copy or download the model again"
_GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvgpu*", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_ASCEND_DEVICES = "/dev/davinci[0-9]*"  # Ray looks for the same files
_CHECKED_ROWS = 1 << 18  # rows checked in each file; the data set checks all rows


# ---- the machine


def check_machine(
    device: str, pools: Mapping[str, tuple[int, int]], cluster: RayConfig, engines: Mapping[str, tuple[str, str]]
) -> None:
    """Check that this machine meets the needs of the workers, if Ray starts on it alone.

    Args: ``pools`` maps a node of the configuration to its (n_gpus_per_node, nnodes), ``engines`` the key of a
        generation engine to its name and mode.
    Raises: WrongInput naming the key.
    """
    ray = sys.modules.get("ray")  # without an import, this process has started none
    if (ray and ray.is_initialized()) or not cluster.is_local:
        return
    ray_init = cluster.ray_init or {}
    workers = sum(per_node * nodes for per_node, nodes in pools.values())
    cores = ray_init.get("num_cpus") or os.cpu_count() or 1
    if device == "cpu" and workers > cores:
        asked = " + ".join(
            f"{node}.n_gpus_per_node={per_node} x {node}.nnodes={nodes}" for node, (per_node, nodes) in pools.items()
        )
        raise WrongInput(
            f"{asked} asks for {workers} workers, and this machine has {cores} cores: lower it, name a larger cluster "
            "in ray_kwargs.ray_init.address, or set ray_kwargs.ray_init.num_cpus to let workers share cores"
        )
    if device == "cuda" and not ray_init.get("num_gpus") and not any(glob.glob(p) for p in _GPU_DEVICES):
        raise WrongInput(
            "trainer.device=cuda: this machine has no GPU: write cpu, or name a cluster in ray_kwargs.ray_init.address"
        )
    for key, (name, mode) in engines.items():
        if name == "vllm":
            check_vllm(mode, key)
        if name == "sglang" and importlib.util.find_spec("sglang") is None:
            install = "run scripts/setup_env.sh" if device == "cpu" else "install it as docs/install.md says"
            raise WrongInput(f"{key}=sglang: needs the package sglang, which is absent: {install}, or write vllm")
    if device == "npu":
        _check_ascend(
            {key: name for key, (name, _) in engines.items()}, bool((ray_init.get("resources") or {}).get("NPU"))
        )


def check_remote(paths: Mapping[str, Iterable[str]]) -> None:
    """Check that this machine has the command that reads from HDFS, if a path of a key needs it.

    Raises: WrongInput naming key and path.
    """
    problem = missing_command()
    for key, of_key in paths.items():
        for path in filter(is_hdfs, of_key):
            if problem:
                raise WrongInput(f"{key}={path}: {problem}")


def _check_ascend(engines: Mapping[str, str], are_counted: bool) -> None:
    """Check the packages and devices of an Ascend machine; ``are_counted`` if the configuration gives their number."""
    cluster = "or name a cluster in ray_kwargs.ray_init.address"
    if importlib.util.find_spec("torch_npu") is None:
        raise WrongInput(
            "trainer.device=npu: needs the package torch_npu, which is not installed: install the one for this torch "
            f"and CANN, write cuda or cpu, {cluster}"
        )
    if not are_counted and not glob.glob(_ASCEND_DEVICES):
        raise WrongInput(
            f"trainer.device=npu: this machine has no Ascend device, no {_ASCEND_DEVICES}: write cpu, {cluster}"
        )
    for key, name in engines.items():
        if name == "vllm" and importlib.util.find_spec("vllm_ascend") is None:
            raise WrongInput(
                f"{key}=vllm: with trainer.device=npu needs the package vllm_ascend, which is not installed: install "
                f"vllm-ascend, or write hf"
            )


# ---- data


def local_files(paths: list[str]) -> list[str]:
    """Return the full paths of the files that are on this machine."""
    return [os.path.expanduser(path) for path in paths if "://" not in path]


def count_rows(key: str, path: str, prompt_key: str) -> int:
    """Return the number of rows of a data file; a parquet file has it in its footer.

    Raises: WrongInput naming key, file and column; DataError naming the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import AGAIN, read_parquet

    if path.endswith(JSON_LINES):
        table = read_parquet(path)
        columns = table.column_names
        rows = table.num_rows
    else:
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise WrongInput(f"{key}={path}: cannot be read as parquet: {one_line(str(error))}: {AGAIN}") from error
        columns = file.schema_arrow.names
        rows = file.metadata.num_rows
    if prompt_key not in columns:
        raise WrongInput(
            f"{key}={path}: has no column {prompt_key!r}, it has {columns}: name one of them in data.prompt_key, "
            f"or add the column"
        )
    if not rows:
        raise WrongInput(f"{key}={path}: has no row: {AGAIN}")
    return int(rows)


def check_written_columns(names: Mapping[str, tuple[str | None, str | None]], paths: Iterable[str]) -> None:
    """Check that each column that the user named, also with the default's name, is in some file.

    Args: ``names`` maps a key to its value and its default. Files that are not on this machine may have any column.

    Raises: WrongInput naming the key and the columns that there are.
    """
    paths = list(paths)
    written = {
        key: name for key, (name, usual) in names.items() if name and (name != usual or key in overrides_given())
    }
    if not written or len(local_files(paths)) < len(paths):
        return
    columns = {name for path in local_files(paths) for name in schema_of(path).names}
    for key, name in written.items():
        if name not in columns:
            raise WrongInput(
                f"{key}={name}: no data file has this column, they have {sorted(columns)}: write one of them, or leave "
                f"out the key"
            )


def schema_of(path: str) -> "pa.Schema":
    """Return the names and types of the columns of a data file.

    Raises: DataError naming the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import AGAIN, read_parquet

    if path.endswith(JSON_LINES):
        return read_parquet(path).schema
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {one_line(str(error))}: {AGAIN}") from error


def has_field(path: str, column: str, field: str) -> bool:
    """Whether the dicts of a column of a data file have a field."""
    import pyarrow as pa

    schema = schema_of(path)
    kind = schema.field(column).type if column in schema.names else None
    return kind is not None and pa.types.is_struct(kind) and kind.get_field_index(field) >= 0


def column_checks(path: str, columns: list[str]) -> Iterator["ColumnCheck"]:
    """Yield the given columns that a data file has, in chunks of rows, up to a limit.

    Raises: DataError naming the file and the row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import AGAIN, ColumnCheck, as_plain, plain_schema, read_parquet, refuse_repeated

    if path.endswith(JSON_LINES):
        yield from ColumnCheck.over(path, read_parquet(path))
        return
    first_row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            refuse_repeated(path, names)
            plain_schema(path, file.schema_arrow)
            present = [name for name in columns if name in names]
            for batch in file.iter_batches(ColumnCheck.CHUNK_ROWS, columns=present):
                batch.validate(full=True)
                yield ColumnCheck(path, as_plain(path, pa.Table.from_batches([batch])), first_row, names)
                first_row += batch.num_rows
                if first_row >= _CHECKED_ROWS:
                    return
    except (pa.ArrowException, OSError) as error:
        reason = one_line(str(error))
        raise DataError(f"{path}: cannot be read as parquet after row {first_row}: {reason}: {AGAIN}") from error


# ---- models


def check_model(key: str, path: str) -> dict[str, list[int]]:
    """Check that a local model folder holds complete weight files; no hub is asked.

    Returns: the shapes of the tensors in its safetensors files.
    Raises: WrongInput naming key and file.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return {}  # a model of the hub, or on HDFS
    shapes: dict[str, list[int]] = {}
    for weights in _weight_files(key, folder):
        shapes |= _check_weights(key, weights)
    return shapes


def check_head(key: str, path: str, shapes: Mapping[str, list[int]]) -> str | None:
    """Return the name of the value head among the tensors of a local model folder; None if there is none.

    Raises: WrongInput naming a tensor of a head that is not read.
    """
    try:
        return stored_head(shapes, shapes.__getitem__, path)
    except ValueError as error:
        raise WrongInput(f"{key}={path}: {error}") from None


def check_hub(paths: Mapping[str, str | None]) -> None:
    """Check that models and tokenizers of the hub are in its cache, or that this machine reaches the hub.

    Args: ``paths`` maps a key to its value.
    Raises: WrongInput naming the key.
    """
    for key, path in paths.items():
        for problem in hub_problems(path) if path else ():
            raise WrongInput(f"{key}={path}: {problem}")


def _weight_files(key: str, folder: Path) -> list[Path]:
    index = next(iter(sorted(folder.glob("*.index.json"))), None)
    if index is not None:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ValueError("weight_map must map each tensor to a file in this folder")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise WrongInput(f"{key}: {index}: is not an index of weight files: {error}; {_AGAIN}") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise MissingFile(f"{key}: {index} names weight files that are missing: {missing[:4]}; {_AGAIN}")
        head = [folder / HEAD_FILE] if (folder / HEAD_FILE).is_file() else []
        return [folder / name for name in sorted(names)] + head
    found = [path for pattern in _WEIGHT_PATTERNS for path in sorted(folder.glob(pattern))]
    if not found:
        raise MissingFile(f"{key}={folder}: holds no weights, no file like {', '.join(_WEIGHT_PATTERNS)}; {_AGAIN}")
    return found


def _check_weights(key: str, path: Path) -> dict[str, list[int]]:
    """Check the size of a safetensors file against its header; returns the shapes of its tensors."""
    if path.suffix != ".safetensors":
        with path.open("rb") as file:
            start = file.read(2)
        if start not in _PICKLED:
            raise WrongInput(f"{key}: {path}: is not a file of torch.save, or cut short; {_AGAIN}")
        return {}
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        header = file.read(length) if 8 + length <= size else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((_end_of(entry) for entry in tensors.values()), default=0)
        shapes = {name: entry["shape"] for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WrongInput(f"{key}: {path}: is not a safetensors file, or cut short in its header; {_AGAIN}") from None
    if size != 8 + length + end:
        raise WrongInput(
            f"{key}: {path}: is cut short: {size} bytes, and its header asks for {8 + length + end}; {_AGAIN}"
        )
    return shapes


def _end_of(entry: Mapping[str, Any]) -> int:
    """Return the offset at which a tensor of a safetensors file ends.

    Raises: ValueError for offsets that are not two ascending numbers.
    """
    start, end = entry["data_offsets"]
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
        raise ValueError("data_offsets must be two ascending numbers")
    return end


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template, or may bring one."""
    if any(folder.glob("chat_template*")) or any(folder.glob("*chat_templates")):
        return True
    settings = [folder / name for name in ("tokenizer_config.json", *PROCESSOR_FILES)]
    if not settings[0].exists():
        return True  # a tokenizer of another kind, which may bring one
    return any('"chat_template"' in file.read_text(encoding="utf-8") for file in settings if file.is_file())


def chat_templates_of(folder: Path) -> dict[Path, dict[str, str]]:
    """Return the files of a local folder that have chat templates, and their templates by name.

    A tokenizer and a processor may read different ones. Files that a template of its own file replaces are left out.
    """
    own = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    found = {file: {_template_name(file): file.read_text("utf-8", "replace")} for file in own if file.is_file()}
    replaced = () if not found else ("tokenizer_config.json", "chat_template.json")
    for name in ("tokenizer_config.json", "chat_template.json", *PROCESSOR_FILES):
        settings = folder / name
        is_read = settings.is_file() and name not in replaced
        given = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if is_read else None
        if isinstance(given, list):  # pairs of name and text
            given = {str(each.get("name")): each.get("template") for each in given}
        if given:
            found[settings] = given if isinstance(given, dict) else {"default": given}
    return found


def _template_name(file: Path) -> str:
    return "default" if file.name == "chat_template.jinja" else file.stem
