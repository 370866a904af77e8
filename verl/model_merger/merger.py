"""Merge the shards of a checkpoint under the names that ``save_pretrained`` writes, or hold them against a folder."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from verl.model_merger.shards import ShardedState, check_checkpoint
from verl.utils.checkpoint.files import CheckpointError, move_files, temporary_folder
from verl.utils.checkpoint.hf_export import export_weights
from verl.utils.fsdp_utils import parameters_on_meta
from verl.utils.model import get_hf_auto_model_class, get_value_model_class
from verl.workers.engine.fsdp.adapters import ADAPTER_FOLDER, base_name, is_adapter
from verl.workers.engine.fsdp.weights import checkpoint_names
from verl.workers.engine.weights import DTYPES, HEAD, SafetensorsReader
from verl.workers.engine.weights import CheckpointError as WeightsError

HF_FOLDER = "huggingface"
_PEFT = "base_model.model."
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


@dataclass(frozen=True)
class MergeOptions:
    """What is merged, and how; ``dtype`` None keeps that of the checkpoint."""

    local_dir: str
    dtype: str | None = None
    merge_lora: bool = False
    is_value_model: bool = False
    tie_word_embedding: bool = False
    trust_remote_code: bool = False


class Merger:
    """The weights of one checkpoint. Raises: CheckpointError when they are not whole or of another model."""

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.folder = Path(options.local_dir).expanduser()
        self.state = ShardedState(self.folder, check_checkpoint(self.folder))
        self.places = {plain: key for key in self.state if (plain := base_name(key)) is not None}
        self.has_adapter = any(is_adapter(key) for key in self.state)
        self.adapter_config = self._adapter_config() if self.has_adapter else {}
        self.model = self._empty_model()
        self.config = self.model.config

    def _adapter_config(self) -> dict[str, Any]:
        path = self.folder / ADAPTER_FOLDER / "adapter_config.json"
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            content["lora_alpha"], content["r"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}, which says how adapters are scaled, cannot be read: {error}") from error
        return content

    def _empty_model(self) -> Any:
        """Build the model without storage: it knows names, order, ties and conversions."""
        from transformers import AutoConfig

        path = self.folder / HF_FOLDER
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=self.options.trust_remote_code)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} does not hold the configuration of a model: {error}") from error
        if self.options.tie_word_embedding:
            config.tie_word_embeddings = True
        is_value = any(name.startswith(HEAD) for name in self.places)
        if self.options.is_value_model and not is_value:
            raise CheckpointError(f"--is-value-model: {self.folder} holds no tensor {HEAD}weight, so it is no critic")
        auto_class = get_value_model_class(config) if is_value else get_hf_auto_model_class(config)
        with parameters_on_meta():
            model = auto_class.from_config(config, trust_remote_code=self.options.trust_remote_code)
        model.config.architectures = [type(model).__name__]
        self._check_names(model)
        return model

    def _check_names(self, model: Any) -> None:
        every = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in model.named_parameters()}
        missing = [name for name in shapes if name not in self.places]
        unexpected = [name for name in self.places if name not in every and name not in model.state_dict()]
        if missing or unexpected:
            which = f"lacks {missing[0]}" if missing else f"has no place for {unexpected[0]}"
            side = "the checkpoint" if missing else "the model"
            raise CheckpointError(f"{self.folder / HF_FOLDER / 'config.json'} is of another model: {side} {which}")
        for name, shape in shapes.items():
            found = self.state.first[self.places[name]].shape
            if found != shape:
                raise CheckpointError(f"{name} has shape {tuple(found)}, the model of config.json needs {tuple(shape)}")

    # ---- streams

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, whole tensor), tied ones once."""
        yield from ((name, self._cast(tensor)) for name, tensor in checkpoint_names(self.model, self._in_memory()))

    def _in_memory(self) -> Iterator[tuple[str, Tensor]]:
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        names = dict(self.model.named_parameters())
        buffers = [name for name in self.model.state_dict() if name not in tied and name in self.places]
        for name in [*names, *buffers]:
            key = self.places[name]
            whole = self.state[key]
            yield name, self._merged(key, whole) if self.options.merge_lora else whole

    def _merged(self, key: str, weight: Tensor) -> Tensor:
        """Add what the adapter of a weight has learnt, as the engine does for generation."""
        layer = key.removesuffix(".base_layer.weight")
        if layer == key:
            return weight
        embedding = f"{layer}.lora_embedding_A.default" in self.state
        ends = ("lora_embedding_A.default", "lora_embedding_B.default")
        a, b = (self.state[f"{layer}.{end}"] for end in (ends if embedding else _LINEAR))
        delta = b.float() @ a.float()
        if embedding or self.adapter_config.get("fan_in_fan_out"):
            delta = delta.T
        scaling = self.adapter_config["lora_alpha"] / self.adapter_config["r"]
        return (weight.float() + scaling * delta).to(weight.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what trained, under peft's names."""
        whole = tuple(f"{_PEFT}{name}." for name in self.adapter_config.get("modules_to_save") or ())
        for key in self.state:
            if is_adapter(key) or key.startswith(whole):
                yield key.replace(".default", ""), self._cast(self.state[key])

    def _cast(self, tensor: Tensor) -> Tensor:
        dtype = self.options.dtype
        return tensor.to(DTYPES[dtype]) if dtype is not None and tensor.is_floating_point() else tensor

    @property
    def num_tensors(self) -> int:
        """Return about how many tensors ``weights`` yields."""
        return len(dict(self.model.named_parameters()))


_LINEAR = ("lora_A.default.weight", "lora_B.default.weight")


def merge(options: MergeOptions, target_dir: str) -> Path:
    """Write ``target_dir``: weights, configuration, tokenizer, processor, and ``lora_adapter/`` where there is one.

    Nothing stands there before everything is written. Returns the folder. Raises: CheckpointError, OSError.
    """
    merger, target = Merger(options), Path(target_dir).expanduser().absolute()
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


def _write_adapter(folder: Path, merger: Merger) -> None:
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
    merger, reader, differences = Merger(options), SafetensorsReader(reference_dir), []
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
