"""Load untrusted files without running any code in them.

A pickle names functions to call. Tensors are read by torch's weights-only reader; states, batches and indices by an
unpickler that calls only what ``LISTED`` names, which makes values and has no other effect. A test keeps every other
way to unpickle a file out of the library. Nothing here imports torch or numpy before it loads a file.
"""

import importlib
import io
import logging
import math
import os
import pickle
import pickletools
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

from verl.errors import CheckpointError, UntrustedClassError
from verl.utils.checkpoint.files import StrPath
from verl.utils.failures import replacing_errors

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

State = dict[str, Any]
"""A state dict: tensors and plain values under names."""

STATE_LIMIT_BYTES = 1 << 30
"""Size of the largest state of a loader; a seed, an epoch and a position need a few hundred bytes."""


def _names(classes: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module, names in classes.items() for name in names.split())


_ARRAYS = "_reconstruct scalar"
_TENSORS = "deserialize_single_tensor writable"
LISTED = _names(
    {
        "builtins": "bytearray complex dict frozenset int list set slice",
        "collections": "Counter OrderedDict defaultdict deque",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "pathlib": "Path PosixPath PurePosixPath",
        "uuid": "UUID",
        "_codecs": "encode",
        "numpy": "dtype ndarray",
        "numpy.core.multiarray": _ARRAYS,
        "numpy._core.multiarray": _ARRAYS,
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "torch": "Size device bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
        "torch._utils": "_rebuild_tensor_v2",
        "torch.serialization": "_get_layout",
        "torch.storage": "_load_from_bytes",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata _MEM_FORMAT_ENCODING"
        ),
        "PIL.Image": "Image",
        "verl.protocol": f"DataProto DataProtoItem {_TENSORS}",
        "verl.protocol.data_proto": "DataProto DataProtoItem",
        "verl.utils.batch.serialization": _TENSORS,
        "verl.utils.serialization": _TENSORS,
        "verl.workers.rewards.scoring": "Reason",
    }
)
"""Classes and functions that a file may name, whoever made it."""

_STORAGES = _names(
    {
        "torch": "BoolStorage ByteStorage CharStorage ShortStorage IntStorage LongStorage HalfStorage BFloat16Storage "
        "FloatStorage DoubleStorage"
    }
)
"""Names in files of ``torch.save`` that torch's reader takes as dtypes."""

_RENAMED = {"__builtin__": "builtins"}
"""Modules that old pickle protocols write under their names of Python 2."""


def untrusted(path: StrPath, names: Iterable[str]) -> UntrustedClassError:
    """Return the error of a file that names classes or functions that are not listed."""
    found = ",".join(sorted(names))
    return UntrustedClassError(
        f"{os.fspath(path)} names {found}, which may run code. If this is a class of yours, set "
        f"trainer.trusted_classes=[{found}]; if not, do not use the file"
    )


def naming(source: StrPath | BinaryIO) -> AbstractContextManager[None]:
    """Convert any error of reading a file to a CheckpointError that names the file."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the part of a file"

    def named(error: Exception) -> CheckpointError:
        return CheckpointError(f"{name} cannot be read ({type(error).__name__}: {error})")

    return replacing_errors(named, passes=(CheckpointError, FileNotFoundError))


def _import(full: str) -> Any:
    """Import the object of a dotted name, which may be a class nested in another class."""
    module, _, name = full.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        if "." not in module:
            raise
        return getattr(_import(module), name)


# ---- files of torch.save


def load_tensors(source: StrPath | BinaryIO, mmap: bool = False) -> State:
    """Read tensors and plain containers onto the CPU.

    Raises: CheckpointError naming the file.
    """
    import torch

    mesh_logger = logging.getLogger("torch.distributed.device_mesh")
    level = mesh_logger.level
    mesh_logger.setLevel(logging.ERROR)  # an unpickled mesh has no process groups: only its local tensors are used
    try:
        with naming(source):
            state: State = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    finally:
        mesh_logger.setLevel(level)
    return state


def load_state(path: StrPath, trusted_classes: Iterable[str] = ()) -> Any:
    """Read the state of a data loader, in which user code may have stored objects of its classes.

    Raises: FileNotFoundError; UntrustedClassError, CheckpointError naming the file.
    """
    import torch

    if refused := untrusted_classes(path, trusted_classes):
        raise untrusted(path, refused)
    reader = types.ModuleType("listed_pickle")
    reader.Unpickler = _unpickler_for(path, trusted_classes)  # type: ignore[attr-defined]
    copy = io.BytesIO()
    with naming(path):
        # A copy, since torch could find another content than the checked one in an archive made for that purpose.
        with _state_archive(path) as archive, zipfile.ZipFile(copy, "w") as checked:
            for entry in archive.infolist():
                if not entry.filename.endswith("/constants.pkl"):  # with it torch would run TorchScript
                    checked.writestr(entry.filename, archive.read(entry))
        copy.seek(0)
        return torch.load(copy, map_location="cpu", weights_only=False, pickle_module=reader)


def untrusted_classes(path: StrPath, trusted_classes: Iterable[str]) -> list[str]:
    """Return the names in a state that are neither listed nor trusted, without loading it and without torch.

    Raises: CheckpointError when the file is compressed, too large, or not a file of ``torch.save``.
    """
    with naming(path), _state_archive(path) as archive:
        found = set()
        for code, argument, _ in _codes(archive):
            if code.name == "GLOBAL":  # torch.save names nothing in another way
                module, name = str(argument).split(" ", 1)
                found.add(f"{_RENAMED.get(module, module)}.{name}")
    return sorted(found - LISTED - _STORAGES - set(trusted_classes))


def texts_in_state(path: StrPath, name: str) -> list[str]:
    """Return the texts that the dicts of a state hold under a name, without loading it and without torch.

    Raises: as ``untrusted_classes``.
    """
    with naming(path), _state_archive(path) as archive:
        arguments = [argument for code, argument, _ in _codes(archive) if "PUT" not in code.name]
    return [text for key, text in pairwise(arguments) if key == name and isinstance(text, str)]


def _codes(archive: zipfile.ZipFile) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    """Yield the instructions of the pickle in a file of ``torch.save``."""
    pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
    return pickletools.genops(archive.read(pickled))


def _state_archive(path: StrPath) -> zipfile.ZipFile:
    """Open a file of ``torch.save`` that is not larger unpacked than packed. Raises: ValueError."""
    archive = zipfile.ZipFile(path)
    size = os.path.getsize(path)
    if sum(entry.file_size for entry in archive.infolist()) > size or size > STATE_LIMIT_BYTES:
        archive.close()
        raise ValueError(f"it is compressed, or larger than {STATE_LIMIT_BYTES >> 30} GiB")
    return archive


def not_finite(values: "Tensor") -> str | None:
    """Return "NaN" or "infinity" if a tensor holds such a value; reads the memory once."""
    if not values.is_floating_point() or not values.numel():
        return None
    values = values.detach().float() if values.dtype.itemsize == 1 else values.detach()  # torch compares no float8
    extremes = [float(value) for value in values.aminmax()]  # a NaN among the values makes both NaN
    if any(math.isnan(value) for value in extremes):
        return "NaN"
    return "infinity" if any(math.isinf(value) for value in extremes) else None


# ---- pickles


def load_pickle(path: StrPath | BinaryIO, trusted_classes: Iterable[str] = (), source: StrPath | None = None) -> Any:
    """Unpickle a file that names only listed or trusted classes.

    Args: ``path`` is the file or its open content, which errors call ``source``.
    Raises: FileNotFoundError; UntrustedClassError, CheckpointError naming the file.
    """
    if isinstance(path, str | os.PathLike):
        with open(path, "rb") as file:
            return load_pickle(file, trusted_classes, path)
    name = source or str(path)
    with naming(name):
        return _unpickler_for(name, trusted_classes)(path).load()


def unpickle_text(content: bytes, source: str) -> str:
    """Unpickle bytes that hold a text, as published data sets do; ``source`` names them in errors.

    Raises: UntrustedClassError; CheckpointError for anything but a text.
    """
    with naming(source):
        text = _unpickler_for(source, ())(io.BytesIO(content)).load()
        if not isinstance(text, str):
            raise TypeError(f"it holds a value of type {type(text).__name__}, not str")
        return text


def _build(unpickler: Any) -> None:
    """Set the state on top of the stack on the object below it; states of arrays are checked, since numpy trusts them.

    Raises: ValueError.
    """
    import numpy as np

    *_, target, state = unpickler.stack
    if isinstance(target, type | types.FunctionType | types.BuiltinFunctionType):
        raise ValueError(f"it changes {target.__name__}")
    if isinstance(target, np.dtype):
        if state[1] not in "|<" or state[2:5] != (None, None, None):
            raise ValueError("an array has values in another byte order or with fields")
        unpickler.stack.pop()
        return
    if isinstance(target, np.ndarray):
        _, shape, dtype, _, content = state
        size = math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize)
        if target.size or min(shape, default=0) < 0 or len(content) != size:
            raise ValueError(f"an array of shape {shape} has {len(content)} values")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


class _ListedUnpickler(pickle._Unpickler):
    """An unpickler of listed and trusted names.

    It derives from the unpickler in Python, since the one in C does not show which object gets which state. It is fast
    enough, since tensors and arrays of numbers are single values in a pickle.
    """

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    path: StrPath
    trusted: frozenset[str]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a listed or trusted name. Raises: UntrustedClassError."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full in _CHECKED:
            return _CHECKED[full]
        if not all(part.isidentifier() for part in full.split(".")):
            raise pickle.UnpicklingError(f"{full!r} is no name")  # the file is damaged
        if full not in LISTED and full not in self.trusted:
            raise untrusted(self.path, [full])
        return _import(full)


def _unpickler_for(path: StrPath, trusted_classes: Iterable[str]) -> type[_ListedUnpickler]:
    """Return the unpickler of a file; torch.load takes a class."""
    return type("_Unpickler", (_ListedUnpickler,), {"path": path, "trusted": frozenset(trusted_classes)})


def _bytearray(*content: Any) -> bytearray:
    """Make a bytearray from content. Raises: ValueError for a size, which could take any amount of memory."""
    if any(isinstance(argument, int) for argument in content):
        raise ValueError("a bytearray is declared by its size")
    return bytearray(*content)


def _dtype(name: str, *flags: bool) -> "np.dtype":
    """Return a dtype of numbers, text or objects. Raises: ValueError for others, such as records and times."""
    import numpy as np

    dtype = np.dtype(name)
    if dtype.kind not in "biufcSUO":
        raise ValueError(f"an array has dtype {name}")
    return dtype


def _array(kind: object, shape: tuple[int, ...], dtype: bytes) -> "np.ndarray":
    """Make the empty array that its state fills. Raises: ValueError for another one."""
    import numpy as np

    if kind is not _NDARRAY or shape != (0,):
        raise ValueError(f"an array begins as {kind} of shape {shape}, not as an empty numpy.ndarray of shape (0,)")
    return np.empty(shape, dtype="b")


def _storage(content: bytes) -> Any:
    """Read a pickled storage of tensors; the function of torch would run code."""
    return load_tensors(io.BytesIO(content))


_NDARRAY = object()
"""The class of an array, which a file may name but not call."""
_CHECKED: Mapping[str, object] = {
    "builtins.bytearray": _bytearray,
    "numpy.dtype": _dtype,
    "numpy.ndarray": _NDARRAY,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "torch.storage._load_from_bytes": _storage,
}
"""Stand-ins for listed names that could run code, or allocate any amount of memory."""
