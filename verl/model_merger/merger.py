"""Merge a sharded checkpoint into a Hugging Face folder, or compare it with one."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from verl.base_config import one_line
from verl.errors import CheckpointError, ModelWeightsError
from verl.model_merger.base import HF_FOLDER, BaseMerger, MergeOptions
from verl.models.mcore.weights import is_stack
from verl.utils.checkpoint.files import move_files, temporary_folder
from verl.utils.checkpoint.hf_export import CONFIG_FILE, export_weights, with_dtype, write_fields
from verl.utils.json_types import JsonObject
from verl.utils.loading import not_finite
from verl.utils.model import prediction_layer_names
from verl.workers.engine.fsdp.adapters import ADAPTER_FOLDER
from verl.workers.engine.weights import SafetensorsReader

logger = logging.getLogger(__name__)

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def open_checkpoint(options: MergeOptions) -> BaseMerger:
    """Return the reader of a checkpoint. Raises: CheckpointError if it is incomplete or does not match its config."""
    if options.backend == "megatron":
        from verl.model_merger.megatron import MegatronMerger

        return MegatronMerger(options)
    from verl.model_merger.fsdp import FSDPMerger

    return FSDPMerger(options)


def merge(options: MergeOptions, target_dir: str) -> Path:
    """Write weights, configuration, tokenizer, processor and any ``lora_adapter/`` to ``target_dir`` and return it.

    Files are moved there only after all are complete. Raises: CheckpointError, OSError.
    """
    target = Path(target_dir).expanduser().absolute()
    problem = _target_problem(target_dir, target, Path(options.local_dir).expanduser())
    if problem is not None:
        raise CheckpointError(f"--target_dir={target_dir} {problem}: choose another folder")
    merger = open_checkpoint(options)
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent, target.name) as unfinished:
        kept = shutil.ignore_patterns(*_WEIGHT_FILES)
        shutil.copytree(merger.folder / HF_FOLDER, unfinished, dirs_exist_ok=True, ignore=kept)
        dtypes: dict[torch.dtype, int] = {}
        weights = _finite(tqdm(merger.weights(), "merging", merger.num_tensors), merger.folder)
        export_weights(unfinished, _counted(weights, dtypes), merger.weights_mode)
        write_fields(unfinished, with_dtype(_fields(unfinished, merger), max(dtypes, key=lambda dtype: dtypes[dtype])))
        if merger.adapter_config and not options.merge_lora:
            _write_adapter(unfinished / ADAPTER_FOLDER, merger)
        for pattern in _WEIGHT_FILES:  # an earlier merge may have written another number of files
            for old in target.glob(pattern):
                old.unlink()
        move_files(unfinished, target.parent, target.name)
    return target


def _target_problem(target_dir: str, target: Path, checkpoint: Path) -> str | None:
    """Return why a merged model cannot be written to a folder; None if it can."""
    real = target.resolve()
    source = checkpoint.resolve()
    if not target_dir:
        return "names no folder"
    if real.is_relative_to(source):
        return "is part of the checkpoint"
    if source.is_relative_to(real):
        return "holds the checkpoint"
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not existing.is_dir():
        return f"cannot be made: {existing} is a file" if existing != target else "is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"cannot be written: {existing} is not yours to write"


def _fields(folder: Path, merger: BaseMerger) -> JsonObject:
    """Return the ``config.json`` of the checkpoint, with the fields that the merge changes."""
    fields: JsonObject = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if merger.is_value_model:
        written = json.loads(merger.config.to_json_string(use_diff=False))
        fields |= {name: written[name] for name in ("architectures", "id2label", "label2id")}
    if merger.options.tie_word_embedding:
        fields["tie_word_embeddings"] = True
    return fields


def _counted(weights: Iterable[tuple[str, Tensor]], dtypes: dict[torch.dtype, int]) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors through and count their elements by dtype."""
    for name, tensor in weights:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
        yield name, tensor


def _finite(weights: Iterable[tuple[str, Tensor]], folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors through. Raises: CheckpointError naming one with a value that no weight may have."""
    for name, tensor in weights:
        if found := not_finite(tensor):
            raise CheckpointError(
                f"checkpoint {folder} holds {found} in {name}: "
                "training had diverged before this save; use an earlier checkpoint"
            )
        yield name, tensor


def _write_adapter(folder: Path, merger: BaseMerger) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in merger.adapter()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(merger.adapter_config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def compare(options: MergeOptions, reference_dir: str) -> list[str]:
    """Return the differences between the merged weights and a folder's, one line per tensor.

    Values are compared in the folder's dtype. Multi-token prediction layers of the folder do not count, because no
    engine loads them. Raises: CheckpointError.
    """
    if not Path(reference_dir).is_dir() or not reference_dir:
        raise CheckpointError(f"--test_hf_dir={reference_dir} is no folder: write one with Hugging Face weights")
    if not SafetensorsReader.serves(reference_dir):
        raise CheckpointError(f"--test_hf_dir={reference_dir} holds no model.safetensors")
    merger = open_checkpoint(options)
    merger.source_dtype = None  # round only once, to the dtype of the folder
    merger.other_dtypes = {}
    reader = SafetensorsReader(reference_dir)
    differences = []
    left = reader.names()
    if unused := prediction_layer_names(left, merger.config.get_text_config()):
        left -= unused
        logger.info("%d tensors of multi-token prediction layers in %s are not compared", len(unused), reference_dir)
    for name, tensor in tqdm(merger.weights(), "comparing", merger.num_tensors):
        if name not in left:
            differences.append(f"{name} is not in {reference_dir}")
            continue
        left.discard(name)
        differences += _difference(name, tensor, reader)
    return differences + [f"{name} is only in {reference_dir}" for name in sorted(left)]


def _difference(name: str, tensor: Tensor, reader: SafetensorsReader) -> list[str]:
    if is_stack(name) and reader.shape(name) == tensor.mT.shape:  # as transformers 5 saves it
        tensor = tensor.mT
    try:
        expected = reader.read(name, tensor.shape, slice(None))
    except ModelWeightsError as error:
        return [str(error)]
    found = tensor.to(expected.dtype)
    if torch.equal(found, expected):
        return []
    gap = (found.double() - expected.double()).abs()
    return [f"{name} differs in {int((gap != 0).sum())} of {gap.numel()} values, by up to {float(gap.max()):.3g}"]


def check_upload(repo_id: str) -> None:
    """Check, before a merge, that its result may be uploaded. Raises: CheckpointError."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise CheckpointError(f"--hf_upload_path={repo_id}: {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"--hf_upload_path={repo_id}: HF_HUB_OFFLINE is set: unset it")
    if get_token() is None:
        raise CheckpointError(f"--hf_upload_path={repo_id}: needs a login: set HF_TOKEN, or run `hf auth login`")


def upload(folder: Path, repo_id: str, private: bool) -> str:
    """Upload a merged folder to the hub and return the commit's URL. Raises: CheckpointError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=str(folder), repo_id=repo_id, repo_type="model"))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"--hf_upload_path={repo_id}: {one_line(str(error))}: the merged model is in {folder}: upload it with "
            f"`hf upload {repo_id} {folder}`"
        ) from error


def adapter_note(folder: Path) -> str:
    """Return a note on a merged folder's adapter; empty if it has none."""
    if not (folder / ADAPTER_FOLDER).is_dir():
        return ""
    return f"; it holds the base model's weights and the adapter in {ADAPTER_FOLDER}/ (--merge-lora merges both)"
