"""What can be known to be wrong with a run before Ray, torch or a model is started."""

import glob
import importlib.util
import json
import os
import struct
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.ppo.steps import loader_batch_size
from verl.trainer.ppo.utils import config_needs_reference, need_critic
from verl.trainer.run.resume import find_resume_folder
from verl.utils import envs
from verl.utils.config import validate_config
from verl.utils.observe.tracking import check_backends

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_AGAIN = "copy or download the model again"
_GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvgpu*", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_ASCEND_DEVICES = "/dev/davinci[0-9]*"  # what Ray looks for too
_SCORE_HEAD = "score.weight"
_CHECKED_ROWS = 1 << 18  # of each file here; the data set checks all of them


class InputError(ValueError):
    """A file or folder that the configuration names cannot be used."""


class InputNotFoundError(InputError, FileNotFoundError):
    """A file or folder that the configuration names does not exist."""


def check_inputs(config: Any, recipe_nodes: Collection[str] = ()) -> None:
    """Check configuration, trackers, machine, data files, model folders and the checkpoint to resume from.

    ``recipe_nodes`` are nodes of the configuration that the recipe reads, and the main trainer refuses.

    Raises: ValueError naming the dotted key or the file, the value, and what would be right.
    """
    critic = need_critic(config)
    validate_config(config, config_needs_reference(config), critic, recipe_nodes)
    check_backends(config.trainer.logger)
    check_machine(config)
    check_data(config)
    check_rows(config)
    check_model("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    if critic:
        check_model("critic.model.path", config.critic.model.path, tokenizer=False)
    check_chat_template(config)
    if config.reward_model.enable:
        check_reward_model(config.reward_model)
    find_resume_folder(config)


# ---- the machine


def check_machine(config: Any) -> None:
    """Check that this machine has what the workers need, where Ray is going to be started on it alone.

    Raises: InputError naming the key.
    """
    import ray

    ray_init, trainer = config.ray_kwargs.get("ray_init") or {}, config.trainer
    if ray.is_initialized() or not _is_local(config):
        return
    workers, reward = trainer.nnodes * trainer.n_gpus_per_node, config.get("reward_model")
    asked = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} x trainer.nnodes={trainer.nnodes}"
    if reward and reward.enable and reward.enable_resource_pool:  # a run that only generates has no such node
        workers += reward.nnodes * reward.n_gpus_per_node
        asked += f" + reward_model.n_gpus_per_node={reward.n_gpus_per_node} x reward_model.nnodes={reward.nnodes}"
    cores = ray_init.get("num_cpus") or os.cpu_count() or 1
    if trainer.device == "cpu" and workers > cores:
        raise InputError(
            f"{asked} asks for {workers} workers, and this machine has {cores} cores: lower it, name a larger cluster "
            "in ray_kwargs.ray_init.address, or set ray_kwargs.ray_init.num_cpus to let workers share cores"
        )
    if trainer.device == "cuda" and not ray_init.get("num_gpus") and not any(glob.glob(p) for p in _GPU_DEVICES):
        raise InputError(
            "trainer.device=cuda: this machine has no GPU: write cpu, or name a cluster in ray_kwargs.ray_init.address"
        )
    if trainer.device == "npu":
        _check_ascend(config, bool((ray_init.get("resources") or {}).get("NPU")))


def _check_ascend(config: Any, counted: bool) -> None:
    """Check what a machine with Ascend devices needs; with ``counted`` the configuration says how many there are."""
    cluster = "or name a cluster in ray_kwargs.ray_init.address"
    if importlib.util.find_spec("torch_npu") is None:
        raise InputError(
            "trainer.device=npu: needs the package torch_npu, which is not installed: install the one for this torch "
            f"and CANN, write cuda or cpu, {cluster}"
        )
    if not counted and not glob.glob(_ASCEND_DEVICES):
        raise InputError(
            f"trainer.device=npu: this machine has no Ascend device, no {_ASCEND_DEVICES}: write cpu, {cluster}"
        )
    engines = ["actor_rollout_ref.rollout.name", "rollout.name"]
    if OmegaConf.select(config, "reward_model.enable") and config.reward_model.get("model_type") == "generative":
        engines.append("reward_model.name")
    for key in engines:
        if OmegaConf.select(config, key) == "vllm" and importlib.util.find_spec("vllm_ascend") is None:
            raise InputError(
                f"{key}=vllm: with trainer.device=npu needs the package vllm_ascend, which is not installed: install "
                f"vllm-ascend, or write hf"
            )


def _is_local(config: Any) -> bool:
    """Whether Ray is going to be started on this machine alone."""
    address = (config.ray_kwargs.get("ray_init") or {}).get("address") or envs.read("RAY_ADDRESS")
    return (address or "local") == "local"


# ---- data


def check_data(config: Any) -> None:
    """Check that the data files are parquet files with rows and a prompt column; a custom class reads its own."""
    data = config.data
    if (data.get("custom_cls") or {}).get("path"):
        return
    for key in ("train_files", "val_files"):
        paths = _files(data[key])
        local = _local_files(paths)
        rows = sum(count_rows(f"data.{key}", path, data.prompt_key) for path in local)
        size = loader_batch_size(config)
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


def _files(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _local_files(paths: list[str]) -> list[str]:
    return [os.path.expanduser(path) for path in paths if "://" not in path]


def check_rows(config: Any) -> None:
    """Check the first rows of the data files, by the columns that prompts and rewards are made of.

    Raises: DataError naming file, row and column.
    """
    if not (config.data.get("custom_cls") or {}).get("path"):
        for path in _local_files(_files(config.data.train_files) + _files(config.data.val_files)):
            _check_rows_of(config, path)


def _check_rows_of(config: Any, path: str) -> None:
    from verl.utils.dataset.files import check_data_sources, check_prompt_rows
    from verl.utils.reward_score import data_source_problem

    data, framework_scores = config.data, _framework_scores(config)
    problem_of = partial(data_source_problem, runs_code_here=_runs_code_here(config))
    folder = Path(os.path.expanduser(config.actor_rollout_ref.model.path))
    text_only = folder.is_dir() and not any((folder / name).exists() for name in _PROCESSOR_FILES)
    for check in _column_checks(path, [data.prompt_key, data.reward_fn_key, "reward_model"]):
        check_prompt_rows(check, data.prompt_key, data.reward_fn_key, text_only)
        if framework_scores:
            check_data_sources(check, data.reward_fn_key, problem_of)


def _column_checks(path: str, columns: list[str]) -> Iterator[Any]:
    """Yield the columns that a file has, in parts of many rows, up to a limit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import ColumnCheck, DataError

    if path.endswith((".json", ".jsonl")):
        return
    first_row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            present = [name for name in columns if name in names]
            for batch in file.iter_batches(ColumnCheck.CHUNK_ROWS, columns=present):
                yield ColumnCheck(path, pa.Table.from_batches([batch]), first_row, names)
                first_row += batch.num_rows
                if first_row >= _CHECKED_ROWS:
                    return
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet behind row {first_row}: {error}") from error


def _runs_code_here(config: Any) -> bool:
    """Whether code under test is going to be run on this machine, and is to be kept apart."""
    reward = config.reward_model
    return _is_local(config) and not reward.sandbox_fusion.url and not reward.local_sandbox.allow_unisolated


def _framework_scores(config: Any) -> bool:
    """Whether the scorers that come with the framework are the only ones that can be asked."""
    if config.custom_reward_function.path or config.reward_model.enable or envs.read("VERL_USE_EXTERNAL_MODULES"):
        return False
    manager = config.reward_model.reward_manager
    return manager in ("naive", "dapo", "prime") and not config.actor_rollout_ref.model.get("external_lib")


# ---- models


def check_model(key: str, path: str, tokenizer: bool = True) -> dict[str, list[int]]:
    """Check that a local model folder holds whole weight files and a tokenizer; no hub is asked.

    Returns: the shapes of the tensors in its safetensors files.
    Raises: InputError naming key and file.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return {}  # a model of the hub, or on HDFS
    shapes: dict[str, list[int]] = {}
    for weights in _weight_files(key, folder):
        shapes |= _check_weights(key, weights)
    if tokenizer and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputNotFoundError(f"{key}={path}: has no tokenizer, none of {', '.join(_TOKENIZER_FILES)}")
    return shapes


def _weight_files(key: str, folder: Path) -> list[Path]:
    index = next(iter(sorted(folder.glob("*.index.json"))), None)
    if index is not None:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{key}: {index}: is not an index of weight files: {error}; {_AGAIN}") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise InputNotFoundError(f"{key}: {index} names weight files that are missing: {missing[:4]}; {_AGAIN}")
        return [folder / name for name in sorted(names)]
    found = [path for pattern in _WEIGHT_PATTERNS for path in sorted(folder.glob(pattern))]
    if not found:
        raise InputNotFoundError(
            f"{key}={folder}: holds no weights, no file like {', '.join(_WEIGHT_PATTERNS)}; {_AGAIN}"
        )
    return found


def _check_weights(key: str, path: Path) -> dict[str, list[int]]:
    """Hold the size of a safetensors file to what its header says; returns the shapes of its tensors."""
    if path.suffix != ".safetensors":
        return {}
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        header = file.read(length) if 8 + length <= size else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: entry["shape"] for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{key}: {path}: is not a safetensors file, or cut short in its header; {_AGAIN}") from None
    if size != 8 + length + end:
        raise InputError(
            f"{key}: {path}: is cut short: {size} bytes, and its header asks for {8 + length + end}; {_AGAIN}"
        )
    return shapes


def check_reward_model(node: Any) -> None:
    """Check that a local classifier holds a head with one label, and any reward model the chat template that it needs.

    Raises: InputError naming the key.
    """
    model, key = node.model, "reward_model.model.path"
    path, is_classifier = model.path, node.get("model_type", "discriminative") == "discriminative"
    shapes = check_model(key, path, tokenizer=model.input_tokenizer is not None)
    head = shapes.get(_SCORE_HEAD)
    if is_classifier and shapes and head is None:
        raise InputError(
            f"{key}={path}: holds no {_SCORE_HEAD}, the head of a model for token or sequence classification: write a "
            "reward model with one label. Heads of another name or shape are not supported: load such a model in "
            "custom_reward_function.path, or serve it and ask it there"
        )
    if is_classifier and head is not None and head[0] != 1:
        raise InputError(f"{key}={path}: its {_SCORE_HEAD} has {head[0]} labels: write a reward model with one label")
    folder = Path(os.path.expanduser(path))
    if model.input_tokenizer is not None and folder.is_dir() and not _has_chat_template(folder):
        raise InputError(
            f"{key}={path}: its tokenizer has no chat template: save one with it, or write "
            "reward_model.model.input_tokenizer=null, where policy and reward model share tokenizer and template"
        )


def check_chat_template(config: Any) -> None:
    """Check that prompts can be rendered by the tokenizer of a local folder; a custom data set may need no template.

    Raises: InputError naming the key.
    """
    model, data = config.actor_rollout_ref.model, config.data
    given = model.get("custom_chat_template") or "chat_template" in (data.get("apply_chat_template_kwargs") or {})
    key = "tokenizer_path" if model.get("tokenizer_path") else "path"
    folder = Path(os.path.expanduser(model[key]))
    if given or (data.get("custom_cls") or {}).get("path") or not folder.is_dir() or _has_chat_template(folder):
        return
    raise InputError(
        f"actor_rollout_ref.model.{key}={model[key]}: its tokenizer has no chat template: set "
        "actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs.chat_template"
    )


def _has_chat_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")) or any(folder.glob("*chat_templates")):
        return True
    settings = [folder / name for name in ("tokenizer_config.json", *_PROCESSOR_FILES)]
    if not settings[0].exists():
        return True  # a tokenizer of another kind, which may bring one
    return any('"chat_template"' in file.read_text(encoding="utf-8") for file in settings if file.exists())
