"""Reader of Megatron-Core's torch_dist folders, one tensor at a time, without ranks or Megatron-Core."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from verl.errors import CheckpointError
from verl.utils.checkpoint.files import TENSORS_FOLDER as TENSORS_FOLDER
from verl.utils.checkpoint.files import reading
from verl.utils.fs import readable_file
from verl.utils.loading import load_pickle, load_tensors, naming

BACKEND_FILE = "metadata.json"
INDEX_FILE = ".metadata"
OPTIMIZER_KEYS = "optimizer."
"""Prefix of the names of optimizer tensors."""


HEAD = "output_layer.weight"
VOCABULARY = {"embedding.word_embeddings.weight", HEAD}
"""Tensors with one row per token; they are padded so that ranks hold equal parts."""


class TorchDistReader:
    """The tensors of one folder. Raises: CheckpointError naming a missing, truncated or unexpected file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / BACKEND_FILE
        with reading(path, ": the folder is not a complete distributed checkpoint"):
            backend = json.loads(Path(readable_file(path)).read_text(encoding="utf-8"))["sharded_backend"]
        if backend != "torch_dist":
            raise CheckpointError(f"{path} says sharded_backend={backend!r}: only torch_dist is supported")
        path = self.folder / INDEX_FILE
        if not path.exists():
            raise CheckpointError(f"{path} is missing: the save did not finish")
        with naming(path):
            self.index = load_pickle(readable_file(path))
            if not isinstance(self.index, Metadata):
                raise TypeError(f"it holds a {type(self.index).__name__}")
            self._places = _checked_places(path, self.index)
            entries = self.index.state_dict_metadata.items()
            self._tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
            available = sum(file.stat().st_size for file in self.folder.iterdir())
            for name, entry in self._tensors.items():
                if entry.size.numel() * entry.properties.dtype.itemsize > available:
                    raise CheckpointError(f"{path} lists {name} with more bytes than the files of the folder have")

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor."""
        return self._tensors[name].size

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """Return ``tensor[at]``, reading only the chunks that hold it.

        Raises: CheckpointError naming the file that lacks its part.
        """
        entry = self._tensors[name]
        depth = len(at)
        whole = torch.empty(entry.size[depth:], dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            outer = zip(at, chunk.offsets, chunk.sizes, strict=False)
            if not all(start <= position < start + length for position, start, length in outer):
                continue
            part = self._read_chunk(name, chunk)
            for position, start in zip(at, chunk.offsets, strict=False):
                part = part[position - start]
            place = tuple(
                slice(start, start + length)
                for start, length in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            )
            whole[place].copy_(part)
            filled += math.prod(chunk.sizes[depth:])
        if filled != whole.numel():
            raise CheckpointError(
                f"{self.folder / INDEX_FILE} lists {filled} of the {whole.numel()} values of {name}{list(at) or ''}"
            )
        return whole

    def load_part(self, index: MetadataIndex) -> Any:
        """Load one part of the index without running code. This is the only function that opens part files.

        Raises: CheckpointError naming the file.
        """
        place = self._places.get(index)
        if place is None:
            raise CheckpointError(f"{self.folder / INDEX_FILE} does not say where {index.fqn} is")
        path = self.folder / place.relative_path
        try:
            with open(readable_file(path), "rb") as file:
                if place.offset + place.length > path.stat().st_size:
                    raise CheckpointError("the file ends before this part")
                part: Any = _create_file_view(file, place.offset, place.length)
                return load_tensors(part)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path} does not hold {index.fqn} where it should ({error})") from error

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        tensor = self.load_part(index)
        if not isinstance(tensor, Tensor) or tensor.shape != chunk.sizes:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            path = self.folder / self._places[index].relative_path
            raise CheckpointError(f"{path} holds {name} as {found}, not {tuple(chunk.sizes)}")
        return tensor


def _checked_places(path: Path, index: Metadata) -> dict[MetadataIndex, _StorageInfo]:
    """Return the file and offset of each part; every file lies in the checkpoint's own folder.

    Raises: CheckpointError naming the index and the part.
    """
    places: dict[MetadataIndex, _StorageInfo] = dict(index.storage_data)
    for part, place in places.items():
        file = place.relative_path
        span = (place.offset, place.length)
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CheckpointError(f"{path} places {part.fqn} in {file!r}: it must be in a file of the same folder")
        if place.transform_descriptors:
            raise CheckpointError(f"{path} gives {part.fqn} transforms {place.transform_descriptors!r}: must be none")
        if not all(isinstance(value, int) and value >= 0 for value in span):
            raise CheckpointError(
                f"{path} places {part.fqn} at {span!r}: offset and length must be integers of 0 or more"
            )
    return places


def holds_value_head(reader: TorchDistReader) -> bool:
    """Whether the output layer belongs to a critic or reward model."""
    return HEAD in reader.names() and reader.shape(HEAD)[0] == 1


def vocabulary_problem(reader: TorchDistReader, vocab_size: int, multiple: int | None = None) -> str | None:
    """Return why the vocabulary tensors cannot belong to a model, or None.

    Their rows are padded, to a ``multiple`` if it is known.
    """
    least = vocab_size if multiple is None else -(-vocab_size // multiple) * multiple
    for name in VOCABULARY & reader.names():
        rows = reader.shape(name)[0]
        is_head = name == HEAD and rows == 1
        if not is_head and (rows < least or (multiple is not None and rows != least)):
            return f"it belongs to another model: {name} has {rows} rows, but the vocabulary has {vocab_size} tokens"
    return None
