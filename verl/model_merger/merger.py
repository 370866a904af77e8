"""Merge the shards of a checkpoint under the names that ``save_pretrained`` writes, or hold them against a folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from verl.model_merger.base import HF_FOLDER, BaseMerger, MergeOptions
from verl.utils.checkpoint.files import CheckpointError, move_files, temporary_folder
from verl.utils.checkpoint.hf_export import export_weights
from verl.workers.engine.fsdp.adapters import ADAPTER_FOLDER
from verl.workers.engine.weights import CheckpointError as WeightsError
from verl.workers.engine.weights import SafetensorsReader

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def open_checkpoint(options: MergeOptions) -> BaseMerger:
    """Return the weights of a checkpoint. Raises: CheckpointError when they are not whole or of another model."""
    if options.backend == "megatron":
        from verl.model_merger.megatron import MegatronMerger

        return MegatronMerger(options)
    from verl.model_merger.fsdp import FSDPMerger

    return FSDPMerger(options)


def merge(options: MergeOptions, target_dir: str) -> Path:
    """Write ``target_dir``: weights, configuration, tokenizer, processor, and ``lora_adapter/`` where there is one.

    Nothing stands there before everything is written. Returns the folder. Raises: CheckpointError, OSError.
    """
    merger, target = open_checkpoint(options), Path(target_dir).expanduser().absolute()
    if target in (merger.folder.absolute(), (merger.folder / HF_FOLDER).absolute()):
        raise CheckpointError(f"--target_dir={target_dir} is a part of the checkpoint: choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target.parent, target.name) as unfinished:
        kept = shutil.ignore_patterns(*_WEIGHT_FILES)
        shutil.copytree(merger.folder / HF_FOLDER, unfinished, dirs_exist_ok=True, ignore=kept)
        dtypes: dict[torch.dtype, int] = {}
        export_weights(unfinished, _counted(tqdm(merger.weights(), "merging", merger.num_tensors), dtypes))
        merger.config.dtype = max(dtypes, key=lambda dtype: dtypes[dtype])
        merger.config.save_pretrained(unfinished)
        if merger.has_adapter and not options.merge_lora:
            _write_adapter(unfinished / ADAPTER_FOLDER, merger)
        for pattern in _WEIGHT_FILES:  # of an earlier merge, perhaps in another number of files
            for old in target.glob(pattern):
                old.unlink()
        move_files(unfinished, target.parent, target.name)
    return target


def _counted(weights: Any, dtypes: dict[torch.dtype, int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
        yield name, tensor


def _write_adapter(folder: Path, merger: BaseMerger) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in merger.adapter()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(merger.adapter_config, indent=2, sort_keys=True) + "\n")


def compare(options: MergeOptions, reference_dir: str) -> list[str]:
    """Return what differs between the merged weights and those of a folder, tensor by tensor; empty when nothing.

    Values are compared in the dtype of the folder. Raises: CheckpointError.
    """
    if not SafetensorsReader.serves(reference_dir):
        raise CheckpointError(f"--test_hf_dir={reference_dir} holds no model.safetensors")
    merger, reader, differences = open_checkpoint(options), SafetensorsReader(reference_dir), []
    merger.source_dtype, merger.other_dtypes = None, {}  # rounded once, to the dtype of the folder
    left = reader.names()
    for name, tensor in tqdm(merger.weights(), "comparing", merger.num_tensors):
        if name not in left:
            differences.append(f"{name} is not in {reference_dir}")
            continue
        left.discard(name)
        difference = _difference(name, tensor, reader)
        if difference is not None:
            differences.append(difference)
    return differences + [f"{name} is only in {reference_dir}" for name in sorted(left)]


def _difference(name: str, tensor: Tensor, reader: SafetensorsReader) -> str | None:
    try:
        expected = reader.read(name, tensor.shape, slice(None))
    except WeightsError as error:
        return str(error)
    found = tensor.to(expected.dtype)
    if torch.equal(found, expected):
        return None
    gap = (found.double() - expected.double()).abs()
    return f"{name} differs in {int((gap != 0).sum())} of {gap.numel()} values, by up to {float(gap.max()):.3g}"


def upload(folder: Path, repo_id: str, private: bool) -> str:
    """Upload a merged folder to the hub; returns the address of the commit."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=str(folder), repo_id=repo_id, repo_type="model"))


def adapter_note(folder: Path) -> str:
    """Say where the adapter of a merged folder is."""
    if not (folder / ADAPTER_FOLDER).is_dir():
        return ""
    return f"; the weights are those of the base model, its adapter is in {ADAPTER_FOLDER}/ (--merge-lora adds it in)"
