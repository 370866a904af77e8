"""Tensors out of a folder in Megatron-Core's torch_dist format, one at a time, without ranks or Megatron-Core."""

import io
import json
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from verl.utils.checkpoint.files import CheckpointError

TENSORS_FOLDER = "dist_ckpt"
BACKEND_FILE = "metadata.json"
INDEX_FILE = ".metadata"
OPTIMIZER_KEYS = "optimizer."
"""What the names of the optimizer's tensors start with."""


HEAD = "output_layer.weight"
VOCABULARY = {"embedding.word_embeddings.weight", HEAD}
"""Tensors with a row per token, which ranks pad to equal parts."""


class TorchDistReader:
    """The tensors of one folder. Raises: CheckpointError naming the file that is missing, cut short or another."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        check_format(self.folder)
        path = self.folder / INDEX_FILE
        try:
            with path.open("rb") as file:
                index = pickle.load(file)
            entries = index.state_dict_metadata
            self._places = index.storage_data
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the save did not end") from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        self._tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor."""
        return self._tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        found: torch.dtype = self._tensors[name].properties.dtype
        return found

    def read(self, name: str, at: Sequence[int] = ()) -> Tensor:
        """Return ``tensor[at]``, put together from no more of the files than it takes.

        Raises: CheckpointError naming the file that does not hold its part.
        """
        entry, depth = self._tensors[name], len(at)
        whole = torch.empty(entry.size[depth:], dtype=entry.properties.dtype)
        filled = 0
        for chunk, inner in self._chunks_at(entry, at):
            part = self._read_chunk(name, chunk)
            for position, start in zip(at, chunk.offsets, strict=False):
                part = part[position - start]
            place = tuple(
                slice(start, start + length)
                for start, length in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            )
            whole[place].copy_(part)
            filled += inner
        if filled != whole.numel():
            raise CheckpointError(
                f"{self.folder / INDEX_FILE} lists {filled} of the {whole.numel()} values of {name}{list(at) or ''}"
            )
        return whole

    @staticmethod
    def _chunks_at(entry: TensorStorageMetadata, at: Sequence[int]) -> Iterator[tuple[ChunkStorageMetadata, int]]:
        """Yield each chunk that holds a part of ``tensor[at]``, and how many values of it."""
        for chunk in entry.chunks:
            outer = zip(at, chunk.offsets, chunk.sizes, strict=False)
            if all(start <= position < start + length for position, start, length in outer):
                yield chunk, math.prod(chunk.sizes[len(at) :])

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self._places[MetadataIndex(name, chunk.offsets)]
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            tensor: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} does not hold {name} where it should ({error})") from error
        if tensor.shape != chunk.sizes:
            raise CheckpointError(f"{path} holds {name} as {tuple(tensor.shape)}, not {tuple(chunk.sizes)}")
        return tensor


def holds_value_head(reader: TorchDistReader) -> bool:
    """Whether the output layer is that of a critic or reward model."""
    return HEAD in reader.names() and reader.shape(HEAD)[0] == 1


def vocabulary_problem(reader: TorchDistReader, vocab_size: int, multiple: int | None = None) -> str | None:
    """Return why tensors of the vocabulary are of another model; None where they may be of this one.

    They are padded, to a ``multiple`` where that is known.
    """
    least = vocab_size if multiple is None else -(-vocab_size // multiple) * multiple
    for name in VOCABULARY & reader.names():
        rows = reader.shape(name)[0]
        is_head = name == HEAD and rows == 1
        if not is_head and (rows < least or (multiple is not None and rows != least)):
            return f"it is of another model: it holds {name} of {rows} rows, and the vocabulary has {vocab_size}"
    return None


def check_format(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless a folder holds a checkpoint in the torch_dist format."""
    path = folder / BACKEND_FILE
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: this is no distributed checkpoint, or not all of it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path} says sharded_backend={backend!r}: only torch_dist is read")
