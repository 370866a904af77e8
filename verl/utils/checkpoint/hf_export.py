"""Export of weights, config and tokenizer to a folder that ``from_pretrained`` reads."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

MAX_SHARD_BYTES = 2 << 30
REMOTE_MODULES = "transformers_modules."
"""Package into which transformers loads the code of repositories."""


def save_config_and_tokenizer(
    folder: Path, model: nn.Module | None, processing_class: "PreTrainedTokenizerBase | ProcessorMixin | None"
) -> None:
    """Write config, generation config and tokenizer or processor, each if present, and the code of a remote model."""
    for part in (getattr(model, "config", None), getattr(model, "generation_config", None), processing_class):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
    if model is not None:
        _copy_remote_code(folder, [getattr(model, "config", None), *model.modules()])


def _copy_remote_code(folder: Path, parts: list[object]) -> None:
    """Copy the modules that transformers loaded from a model's repository to define these parts."""
    from transformers.dynamic_module_utils import get_relative_import_files

    classes = {cls for part in parts for cls in type(part).__mro__}  # FSDP derives a class of its own
    names = {cls.__module__ for cls in classes if cls.__module__.startswith(REMOTE_MODULES)}
    for file in (sys.modules[name].__file__ for name in names):
        assert file is not None
        for needed in (file, *get_relative_import_files(file)):
            shutil.copy(needed, folder)


_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def other_dtypes(folder: str, dtype: str) -> dict[str, str]:
    """Return the dtypes of the floating-point tensors in a folder's safetensors that are not of ``dtype``."""
    from safetensors import safe_open

    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored = {name: _STORED.get(file.get_slice(name).get_dtype(), dtype) for name in file.keys()}
        found |= {name: own for name, own in stored.items() if own != dtype}
    return found


def export_weights(folder: Path | None, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write (checkpoint name, full tensor) pairs to safetensors shards, holding one shard in memory.

    Making a tensor may be collective, so every rank drains the stream; a rank without a folder writes nothing.
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
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


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
