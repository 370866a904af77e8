"""Fill the parameters of an engine: parts of a checkpoint's tensors, and new heads."""

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from verl.errors import CheckpointError, ModelWeightsError
from verl.utils.loading import load_tensors, not_finite
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.value_heads import HEAD_FILE, HEAD_NAME, stored_head
from verl.workers.config.engine import DTYPES as DTYPE_NAMES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"


class StoredTensor(Protocol):
    """A tensor in an open safetensors file."""

    def get_shape(self) -> list[int]:
        """Return the shape."""

    def get_dtype(self) -> str:
        """Return the dtype by its name in safetensors."""

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Tensor:
        """Read a part."""


class OpenFile(Protocol):
    """An open safetensors file; the library has no types."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""

    def get_slice(self, name: str) -> StoredTensor:
        """Return a tensor whose parts can be read."""

    def get_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""


STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes by the names of safetensors."""
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
"""Dtypes of values that need scales, stored separately, to mean anything."""


def refuse_not_finite(name: str, values: Tensor, source: str) -> None:
    """Check a tensor of a model. Raises: ModelWeightsError naming tensor and file when a value is NaN or infinite."""
    if found := not_finite(values):
        raise ModelWeightsError(f"tensor {name!r} in {source} holds {found}: the file is damaged, or training diverged")


def _read_index(path: str) -> dict[str, str]:
    """Return the file of each tensor. Raises: ModelWeightsError when the index has another form."""
    try:
        with open(path, encoding="utf-8") as file:
            places: dict[str, str] = json.load(file)["weight_map"]
            if all(os.path.basename(name) == name for name in places.values()):
                return places
            problem = "it names files of other folders"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ModelWeightsError(f"{path} is not an index of weight files ({problem}): copy or download it again")


class SafetensorsReader:
    """Read the tensors of a checkpoint folder, one slice at a time."""

    single_file = SINGLE_FILE
    index_file = INDEX_FILE

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open_files: dict[str, OpenFile] = {}
        index = os.path.join(folder, self.index_file)
        if os.path.exists(index):
            self.files = _read_index(index)
        else:
            self.files = dict.fromkeys(self._open(self.single_file).keys(), self.single_file)
        if os.path.exists(os.path.join(folder, HEAD_FILE)):
            self.files |= dict.fromkeys(self._open(HEAD_FILE).keys(), HEAD_FILE)

    @classmethod
    def serves(cls, folder: str) -> bool:
        """Whether the folder holds files under the usual names."""
        return any(os.path.exists(os.path.join(folder, name)) for name in (cls.index_file, cls.single_file))

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self.files)

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every tensor."""
        described = {}
        for name, file in self.files.items():
            stored = self._stored(name)
            dtype = STORED_DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise ModelWeightsError(
                    f"tensor {name!r} in {os.path.join(self.folder, file)} has dtype {stored.get_dtype()}, which is "
                    f"not supported: convert the checkpoint to bfloat16"
                )
            described[name] = tuple(stored.get_shape()), dtype
        return described

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self._stored(name).get_shape())

    def read(self, name: str, shape: Sequence[int], part: slice | tuple[slice, ...]) -> Tensor:
        """Return a part of the leading dims of a tensor. Its whole shape must be ``shape``.

        Raises: ModelWeightsError naming the tensor or file.
        """
        stored = self._stored(name)
        if tuple(stored.get_shape()) != tuple(shape):
            raise ModelWeightsError(
                f"tensor {name!r} in {os.path.join(self.folder, self.files[name])} has shape "
                f"{tuple(stored.get_shape())}, the model of its config.json needs {tuple(shape)}"
            )
        if STORED_DTYPES.get(stored.get_dtype()) in QUANTIZED:
            raise ModelWeightsError(
                f"tensor {name!r} in {os.path.join(self.folder, self.files[name])} is quantized "
                f"({stored.get_dtype()}), and quantized weights are not supported: convert the checkpoint to bfloat16"
            )
        values = stored[part] if shape and part != () else self._open(self.files[name]).get_tensor(name)
        refuse_not_finite(name, values, os.path.join(self.folder, self.files[name]))
        return values

    def _stored(self, name: str) -> StoredTensor:
        """Find a tensor in its file. Raises: ModelWeightsError when the file does not hold it."""
        from safetensors import SafetensorError

        file = self.files[name]
        try:
            return self._open(file).get_slice(name)
        except (SafetensorError, KeyError) as error:
            path = os.path.join(self.folder, file)
            raise ModelWeightsError(f"{path} lacks the tensor {name!r} that {self.index_file} says it holds") from error

    def _open(self, file: str) -> "OpenFile":
        from safetensors import SafetensorError, safe_open

        path = os.path.join(self.folder, file)
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelWeightsError(
                    f"cannot read the weights file {path}: {error}. It is missing, truncated or not safetensors; "
                    "copy or download the checkpoint again"
                ) from error
        return self._open_files[file]


class PickledReader(SafetensorsReader):
    """Reads tensors from files of ``torch.save``, mapped from disk if their format allows it."""

    single_file = PICKLED_FILE
    index_file = PICKLED_INDEX_FILE

    def _open(self, file: str) -> "OpenFile":
        if file == HEAD_FILE:
            return super()._open(file)
        path = os.path.join(self.folder, file)
        if file not in self._open_files:
            try:
                self._open_files[file] = _PickledFile(load_tensors(path, mmap=zipfile.is_zipfile(path)))
            except (CheckpointError, OSError) as error:
                kind = type(error.__cause__ or error).__name__
                raise ModelWeightsError(
                    f"cannot read the weights file {path} ({kind}): it is missing, damaged, or holds more than "
                    "tensors, which could run code; use safetensors, or weights from another source"
                ) from error
        return self._open_files[file]


class _PickledFile(dict[str, Tensor]):
    """The tensors of a file of ``torch.save``, as an ``OpenFile``."""

    def keys(self) -> list[str]:  # type: ignore[override]
        return list(super().keys())

    def get_slice(self, name: str) -> StoredTensor:
        return _PickledTensor(self[name])

    def get_tensor(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True)
class _PickledTensor:
    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return next((name for name, dtype in STORED_DTYPES.items() if dtype == self.tensor.dtype), "unknown")

    def __getitem__(self, part: slice | tuple[slice, ...]) -> Tensor:
        return self.tensor[part]


def open_weights(folder: str, source: str) -> SafetensorsReader:
    """Return a reader of the files of a checkpoint; ``source`` is a key and its value, for the message.

    Raises: ModelWeightsError when the folder holds none.
    """
    for reader in (SafetensorsReader, PickledReader):
        if reader.serves(folder):
            return reader(folder)
    raise ModelWeightsError(
        f"{source} holds no weights ({SINGLE_FILE}, {PICKLED_FILE}, or an index of several such files): copy or "
        "download the model again"
    )


# New weights

DTYPES = {name: PrecisionType.to_dtype(name) for name in DTYPE_NAMES}

HEAD = f"{HEAD_NAME}."
"""Prefix of the value head, which a causal checkpoint lacks."""


def head_aliases(
    source: str,
    folder: str,
    names: Collection[str],
    shape_of: Callable[[str], Sequence[int]] | None,
    makes_head: bool,
    is_first: bool,
) -> dict[str, str]:
    """Map the model's names of value head tensors to the stored names; ``source`` is a key and its value.

    Where the checkpoint holds none and ``makes_head`` allows a new one, the rank that ``is_first`` says so.

    Raises: ModelWeightsError naming a tensor of a head that is not read.
    """
    try:
        head = stored_head(names, shape_of, folder)
    except ValueError as error:
        raise ModelWeightsError(f"{source}: {error}") from error
    if head is None and makes_head and is_first:
        logger.warning("%s: it holds no value head: a new one starts at random, from the seed", source)
    if head in (None, HEAD_NAME):
        return {}
    return {f"{HEAD}{part}": f"{head}.{part}" for part in ("weight", "bias")}


def tensor_seed(seed: int, name: str) -> int:
    """Return a seed that depends on the engine's seed and the name of a tensor alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_tensor(name: str, shape: torch.Size, seed: int, hf_config: "PretrainedConfig") -> Tensor:
    """Draw a new tensor from the seed and its name, so that every layout and engine has the same; biases are 0."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    std = getattr(hf_config.get_text_config(), "initializer_range", 0.02)
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std
