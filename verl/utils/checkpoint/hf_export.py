"""Export of weights, config and tokenizer to a folder that ``from_pretrained`` reads."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.errors import TokenizerNotFoundError
from verl.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    Processing = PreTrainedTokenizerBase | ProcessorMixin

MAX_SHARD_BYTES = 2 << 30
REMOTE_MODULES = "transformers_modules."
"""Package into which transformers loads the code of repositories."""


Fields = JsonObject
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATES_FOLDER = "additional_chat_templates"
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = (
    "tokenizer*.json", "*tokens*.json", "vocab*", "merges*", "*.model", "*.tiktoken", "*.bpe", "spm*", "spiece*",
    "tekken*", "*.py", "chat_template*", "*processor_config.json",
)  # fmt: skip
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_ROPE_FIELDS = ("rope_scaling", "rope_theta", "partial_rotary_factor")
"""Older names of the fields of ``rope_parameters``."""
_OF_THE_RUN = frozenset(
    {
        *_DTYPE_FIELDS,
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "classifier_dropout",
        "hidden_dropout",
        "summary_dropout_prob",
        "transformers_version",
        "_name_or_path",
    }
)
"""Fields that a run sets in memory, for itself."""


@dataclass(frozen=True)
class SourceFiles:
    """The files of the model that training started from.

    ``config`` and ``tokenizer`` are their folders. ``read`` is the configuration that transformers read from the
    former, and ``overridden`` names the fields that the user has changed. ``chat_template`` replaces the one of the
    files.
    """

    config: Path
    tokenizer: Path
    read: "PretrainedConfig"
    overridden: frozenset[str] = frozenset()
    chat_template: str | None = None

    def config_fields(self, config: "PretrainedConfig", dtype: torch.dtype | None = None) -> Fields:
        """Return the ``config.json`` of a trained model: the fields of its source with the changes of the run.

        Args: ``dtype`` is the dtype of the weights in the same folder, if there are any.
        """
        fields: Fields = json.loads((self.config / CONFIG_FILE).read_text(encoding="utf-8"))
        before, after = (json.loads(each.to_json_string(use_diff=False)) for each in (self.read, config))
        kept = _OF_THE_RUN - self.overridden
        fields = _merged(fields, _changes(before, after, kept), after)
        for name in before.keys() - after.keys() - kept:  # such as the quantization of the source's weights
            fields.pop(name, None)
        return fields if dtype is None else with_dtype(fields, dtype)

    def read_tokenizer(self, processing_class: Any) -> "PreTrainedTokenizerBase | None":
        """Read the source model's tokenizer again; None if there is none or user code has replaced it."""
        from verl.utils.tokenizer import hf_tokenizer

        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        remote = type(tokenizer).__module__.startswith(REMOTE_MODULES)
        try:
            read = hf_tokenizer(str(self.tokenizer), trust_remote_code=remote)
        except TokenizerNotFoundError:
            return None
        return read if read.get_vocab() == tokenizer.get_vocab() else None


def _changes(before: Mapping[str, Json], after: Mapping[str, Json], kept: frozenset[str]) -> Fields:
    """Return the fields that differ, except those to keep; nested nodes are compared by field."""
    changes: Fields = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and name.endswith("_config"):
            if inner := _changes(old, value, kept):
                changes[name] = inner
        elif name not in kept and (name not in before or old != value):
            changes[name] = value
    return changes


def _merged(fields: Mapping[str, Json], changes: Mapping[str, Json], whole: Mapping[str, Json]) -> Fields:
    """Apply changes to the fields of a file; take nodes that the file lacks from ``whole``."""
    result = dict(fields)
    for name, value in changes.items():
        inner = fields.get(name)
        is_node = isinstance(inner, Mapping) and isinstance(value, Mapping) and name.endswith("_config")
        result[name] = _merged(inner, value, whole[name]) if is_node else whole[name]  # type: ignore[arg-type]
    if "rope_parameters" in changes:
        result = {name: value for name, value in result.items() if name not in _ROPE_FIELDS}
    return result


def with_dtype(fields: Mapping[str, Json], dtype: torch.dtype) -> Fields:
    """Return the fields of a ``config.json`` with another dtype, in each node that names a dtype.

    Fields that name this dtype already stay as they are: nodes below them may have other dtypes on purpose.
    """
    written = str(dtype).removeprefix("torch.")
    if written in (fields.get(name) for name in _DTYPE_FIELDS):
        return dict(fields)
    result = {
        name: with_dtype(value, dtype) if isinstance(value, Mapping) and name.endswith("_config") else value
        for name, value in fields.items()
    }
    return result | {name: written for name in _DTYPE_FIELDS if fields.get(name) is not None}


def write_fields(folder: Path, fields: Mapping[str, Json]) -> None:
    """Write a ``config.json``; if it replaces a file, keep that file's permissions."""
    path = folder / CONFIG_FILE
    unfinished = folder / f".{CONFIG_FILE}"
    unfinished.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if path.exists():
        shutil.copymode(path, unfinished)
    unfinished.replace(path)


def save_config_and_tokenizer(
    folder: Path,
    model: nn.Module | None,
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin | None",
    source: SourceFiles | None = None,
    config: "PretrainedConfig | None" = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config, generation config and tokenizer or processor, each if present, and the code of a remote model.

    With a source its files are copied, except for the fields that the run changed on purpose.

    Args:
        config: the model's configuration, if ``model`` is None.
        dtype: dtype of the weights in the same folder, if there are any.
    """
    own = getattr(model, "config", None) if config is None else config
    if source is None:
        for part in (own, getattr(model, "generation_config", None), processing_class):
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
    else:
        _copy_settings(folder, source, own, dtype)
        _copy_tokenizer(folder, source, processing_class)
    if model is not None:
        _copy_remote_code(folder, [own, *model.modules()], source)


def _copy_settings(folder: Path, source: SourceFiles, config: Any, dtype: torch.dtype | None) -> None:
    for name in (CONFIG_FILE, GENERATION_FILE):
        if (source.config / name).is_file():
            shutil.copy(source.config / name, folder)
    write_fields(folder, source.config_fields(config, dtype))


def _copy_tokenizer(folder: Path, source: SourceFiles, processing_class: "Processing | None") -> None:
    """Copy the tokenizer's files from the source; save a tokenizer that has other tokens than the source."""
    if processing_class is None:
        return
    read = source.read_tokenizer(processing_class)
    if read is None:
        processing_class.save_pretrained(folder)
        return
    names = {path.name for pattern in _TOKENIZER_FILES for path in source.tokenizer.glob(pattern) if path.is_file()}
    for name in sorted(names):
        shutil.copy(source.tokenizer / name, folder)
    if (source.tokenizer / _TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source.tokenizer / _TEMPLATES_FOLDER, folder / _TEMPLATES_FOLDER)
    template = getattr(processing_class, "tokenizer", processing_class).chat_template
    if source.chat_template is not None or template != read.chat_template:
        _replace_template(folder, source.chat_template or template)


def _replace_template(folder: Path, template: str | Mapping[str, str] | None) -> None:
    """Write the chat template into the file that transformers prefers, and remove the old template from other files."""
    for path in (folder / "chat_template.json", folder / _TEMPLATE_FILE):
        path.unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        fields = json.loads(settings.read_text(encoding="utf-8"))
        fields.pop("chat_template", None)
        settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if isinstance(template, str):
        (folder / _TEMPLATE_FILE).write_text(template, encoding="utf-8")


def _copy_remote_code(folder: Path, parts: list[object], source: SourceFiles | None) -> None:
    """Copy the modules that transformers loaded from a model's repository to define these parts.

    They have the permissions of the source's files.
    """
    from transformers.dynamic_module_utils import get_relative_import_files

    classes = {cls for part in parts for cls in type(part).__mro__}  # FSDP derives a class of its own
    names = {cls.__module__ for cls in classes if cls.__module__.startswith(REMOTE_MODULES)}
    for file in (sys.modules[name].__file__ for name in names):
        assert file is not None
        for needed in (file, *get_relative_import_files(file)):
            copied = Path(shutil.copy(needed, folder))
            if source is not None and (origin := source.config / copied.name).is_file():
                shutil.copymode(origin, copied)


_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def other_dtypes(folder: str, dtype: str) -> dict[str, str]:
    """Return the dtypes of the floating-point tensors in a folder's safetensors that are not of ``dtype``."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored = {name: _STORED.get(file.get_slice(name).get_dtype(), dtype) for name in file.keys()}
        found |= {name: own for name, own in stored.items() if own != dtype}
    return found


def weights_mode(folder: str | Path) -> int | None:
    """Return the permissions of the weights in a folder; None if there are none."""
    paths = (path for pattern in _WEIGHT_FILES for path in sorted(Path(folder).glob(pattern)))
    return next((stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()), None)


def _mode_of_new_files() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def export_weights(folder: Path | None, weights: Iterator[tuple[str, Tensor]], mode: int | None = None) -> None:
    """Write (checkpoint name, full tensor) pairs to safetensors shards, holding one shard in memory.

    Making a tensor may be collective, so every rank drains the stream; a rank without a folder writes nothing.

    Args: ``mode`` is the mode of the files, which safetensors would open for their owner only; None: by the umask.
    """
    from safetensors.torch import save_file

    if folder is None:
        for _ in weights:
            pass
        return
    shards: list[list[str]] = []
    total_bytes = 0
    for tensors in _shards_of(weights):
        save_file(tensors, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        (folder / f"shard-{len(shards)}").chmod(_mode_of_new_files() if mode is None else mode)
        shards.append(list(tensors))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    # the names that loaders look for contain the number of shards
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _shards_of(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in dicts of at most ``MAX_SHARD_BYTES``; each is cleared before the next one is filled."""
    pending: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        if pending and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield pending
            pending.clear()
            num_bytes = 0
        # Copy: the stream may reuse the memory, and safetensors rejects views.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
    if pending:
        yield pending
