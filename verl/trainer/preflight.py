"""Check a run before Ray starts: configuration, trackers, machine, data files, models and checkpoint.

Nothing here imports torch, so that a wrong key is answered in about a second.
"""

import glob
import importlib.util
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.trainer.config.run_config import RayConfig, RunConfig
from verl.trainer.config.validation import checked_config
from verl.trainer.run.resume import find_resume_folder
from verl.utils import envs
from verl.utils.observe.tracking import check_backends
from verl.workers.config import RewardModelConfig

if TYPE_CHECKING:
    from verl.utils.dataset.files import ColumnCheck

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SCORE_HEAD = "score.weight"
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_AGAIN = "copy or download the model again"
_GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvgpu*", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_ASCEND_DEVICES = "/dev/davinci[0-9]*"  # what Ray looks for too
_CHECKED_ROWS = 1 << 18  # of each file here; the data set checks all of them


class InputError(ValueError):
    """A file or folder that the configuration names cannot be used."""


class InputNotFoundError(InputError, FileNotFoundError):
    """A file or folder that the configuration names does not exist."""


def check_inputs(config: DictConfig, recipe_nodes: Collection[str] = ()) -> RunConfig:
    """Check everything that can be checked before Ray starts, and return the parsed configuration.

    ``recipe_nodes`` are nodes that the recipe reads, and that the main trainer refuses.

    Raises: ValueError naming the dotted key or the file, the value, and what would be right.
    """
    run = checked_config(config, recipe_nodes=recipe_nodes)
    check_backends(run.trainer.logger)
    check_run_machine(run)
    check_data(run)
    check_rows(run)
    check_model("actor_rollout_ref.model.path", run.actor_rollout_ref.model.path)
    if run.critic is not None:
        check_model("critic.model.path", run.critic.model.path)
    check_chat_template(run)
    if run.reward_model.enable:
        check_reward_model(run.reward_model)
    find_resume_folder(run)
    return run


# ---- the machine


def check_run_machine(run: RunConfig) -> None:
    """Check that this machine has what the workers of a run need.

    Raises: InputError naming the key.
    """
    trainer = run.trainer
    reward = run.reward_model
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    if reward.enable and reward.enable_resource_pool:
        pools["reward_model"] = (reward.n_gpus_per_node, reward.nnodes)
    engines = {"actor_rollout_ref.rollout.name": run.actor_rollout_ref.rollout.name}
    if reward.enable and reward.is_generative:
        engines["reward_model.name"] = reward.name
    check_machine(trainer.device, pools, run.ray_kwargs, engines)


def check_machine(
    device: str, pools: Mapping[str, tuple[int, int]], cluster: RayConfig, engines: Mapping[str, str]
) -> None:
    """Check that this machine has what the workers need, if Ray is going to be started on it alone.

    Args: ``pools`` maps a node of the configuration to its (n_gpus_per_node, nnodes), ``engines`` the key of a
        generation engine to its name.
    Raises: InputError naming the key.
    """
    import ray

    if ray.is_initialized() or not cluster.is_local:
        return
    ray_init = cluster.ray_init or {}
    workers = sum(per_node * nodes for per_node, nodes in pools.values())
    cores = ray_init.get("num_cpus") or os.cpu_count() or 1
    if device == "cpu" and workers > cores:
        asked = " + ".join(
            f"{node}.n_gpus_per_node={per_node} x {node}.nnodes={nodes}" for node, (per_node, nodes) in pools.items()
        )
        raise InputError(
            f"{asked} asks for {workers} workers, and this machine has {cores} cores: lower it, name a larger cluster "
            "in ray_kwargs.ray_init.address, or set ray_kwargs.ray_init.num_cpus to let workers share cores"
        )
    if device == "cuda" and not ray_init.get("num_gpus") and not any(glob.glob(p) for p in _GPU_DEVICES):
        raise InputError(
            "trainer.device=cuda: this machine has no GPU: write cpu, or name a cluster in ray_kwargs.ray_init.address"
        )
    if device == "npu":
        _check_ascend(engines, bool((ray_init.get("resources") or {}).get("NPU")))


def _check_ascend(engines: Mapping[str, str], are_counted: bool) -> None:
    """Check what a machine with Ascend devices needs; ``are_counted`` if the configuration gives their number."""
    cluster = "or name a cluster in ray_kwargs.ray_init.address"
    if importlib.util.find_spec("torch_npu") is None:
        raise InputError(
            "trainer.device=npu: needs the package torch_npu, which is not installed: install the one for this torch "
            f"and CANN, write cuda or cpu, {cluster}"
        )
    if not are_counted and not glob.glob(_ASCEND_DEVICES):
        raise InputError(
            f"trainer.device=npu: this machine has no Ascend device, no {_ASCEND_DEVICES}: write cpu, {cluster}"
        )
    for key, name in engines.items():
        if name == "vllm" and importlib.util.find_spec("vllm_ascend") is None:
            raise InputError(
                f"{key}=vllm: with trainer.device=npu needs the package vllm_ascend, which is not installed: install "
                f"vllm-ascend, or write hf"
            )


# ---- data


def check_data(run: RunConfig) -> None:
    """Check that the data files are parquet files with rows and a prompt column; a custom class reads its files.

    Raises: InputError naming key, file and column.
    """
    data = run.data
    if data.custom_cls.path:
        return
    for key, paths in (("train_files", data.train_paths), ("val_files", data.val_paths)):
        local = local_files(paths)
        rows = sum(count_rows(f"data.{key}", path, data.prompt_key) for path in local)
        size = data.loader_batch_size
        if key == "train_files" and len(local) == len(paths) and rows < size:
            raise InputError(
                f"data.train_files: {rows} rows in all, fewer than data.train_batch_size={size}: add rows or lower it"
            )


def check_rows(run: RunConfig) -> None:
    """Check the first rows of the data files, by the columns that prompts and rewards are made of.

    Raises: DataError naming file, row and column.
    """
    from verl.utils.dataset.files import check_data_sources, check_prompt_rows
    from verl.utils.reward_score import data_source_problem

    data = run.data
    if data.custom_cls.path:
        return
    reward = run.reward_model
    isolates = not reward.sandbox_fusion.url and not reward.local_sandbox.allow_unisolated
    problem_of = partial(data_source_problem, runs_code_here=run.ray_kwargs.is_local and isolates)
    framework_scores = _framework_scores(run)
    folder = Path(os.path.expanduser(run.actor_rollout_ref.model.path))
    text_only = folder.is_dir() and not any((folder / name).exists() for name in _PROCESSOR_FILES)
    for path in local_files(data.train_paths + data.val_paths):
        for check in column_checks(path, [data.prompt_key, data.reward_fn_key, "reward_model"]):
            check_prompt_rows(check, data.prompt_key, data.reward_fn_key, text_only)
            if framework_scores:
                check_data_sources(check, data.reward_fn_key, problem_of)


def _framework_scores(run: RunConfig) -> bool:
    """Whether only the scorers that come with the framework can be asked."""
    reward = run.reward_model
    if run.custom_reward_function.path or reward.enable or envs.read("VERL_USE_EXTERNAL_MODULES"):
        return False
    return reward.reward_manager in ("naive", "dapo", "prime") and not run.actor_rollout_ref.model.external_lib


def local_files(paths: list[str]) -> list[str]:
    """Return those of the paths that are on this machine, in full."""
    return [os.path.expanduser(path) for path in paths if "://" not in path]


def count_rows(key: str, path: str, prompt_key: str) -> int:
    """Return the number of rows of a parquet file, from its footer.

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


def column_checks(path: str, columns: list[str]) -> Iterator["ColumnCheck"]:
    """Yield the columns that a parquet file has, many rows at a time, up to a limit.

    Raises: DataError naming the file and the row.
    """
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


# ---- models


def check_model(key: str, path: str) -> dict[str, list[int]]:
    """Check that a local model folder holds complete weight files; no hub is asked.

    Returns: the shapes of the tensors in its safetensors files.
    Raises: InputError naming key and file.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return {}  # a model of the hub, or on HDFS
    shapes: dict[str, list[int]] = {}
    for weights in _weight_files(key, folder):
        shapes |= _check_weights(key, weights)
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
    """Check the size of a safetensors file against its header; returns the shapes of its tensors."""
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


def check_reward_model(reward: RewardModelConfig) -> None:
    """Check that a local classifier has a head with one label, and a reward model the chat template that it needs.

    Raises: InputError naming the key.
    """
    key = "reward_model.model.path"
    path = reward.model.path
    reads_text = reward.model.input_tokenizer is not None
    shapes = check_model(key, path)
    head = shapes.get(_SCORE_HEAD)
    if not reward.is_generative and shapes and head is None:
        raise InputError(
            f"{key}={path}: holds no {_SCORE_HEAD}, the head of a model for token or sequence classification: write a "
            "reward model with one label. Heads of another name or shape are not supported: load such a model in "
            "custom_reward_function.path, or serve it and ask it there"
        )
    if not reward.is_generative and head is not None and head[0] != 1:
        raise InputError(f"{key}={path}: its {_SCORE_HEAD} has {head[0]} labels: write a reward model with one label")
    if reads_text and not _may_have_template(path):
        raise InputError(
            f"{key}={path}: its tokenizer has no chat template: save one with it, or write "
            "reward_model.model.input_tokenizer=null if policy and reward model share tokenizer and template"
        )


def check_chat_template(run: RunConfig) -> None:
    """Check that the tokenizer of a local folder can render prompts; a custom data set may need no template.

    Raises: InputError naming the key.
    """
    model = run.actor_rollout_ref.model
    is_given = model.custom_chat_template or "chat_template" in run.data.apply_chat_template_kwargs
    key = "path" if model.tokenizer_path in (None, model.path) else "tokenizer_path"
    path = getattr(model, key)
    if not is_given and not run.data.custom_cls.path and not _may_have_template(path):
        raise InputError(
            f"actor_rollout_ref.model.{key}={path}: its tokenizer has no chat template: set "
            "actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs.chat_template"
        )


def _may_have_template(path: str) -> bool:
    """Whether the tokenizer of a model may have a chat template, by the files on this machine."""
    folder = Path(os.path.expanduser(path))
    settings = [folder / name for name in ("tokenizer_config.json", *_PROCESSOR_FILES)]
    if not settings[0].exists():
        return True  # a model of the hub, or a tokenizer of another kind, which may bring one
    if any(folder.glob("chat_template*")) or any(folder.glob("*chat_templates")):
        return True
    return any('"chat_template"' in file.read_text(encoding="utf-8") for file in settings if file.exists())
