"""Sources of an engine's weights: files of this node, a worker of another node, or a seed."""

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl.workers.engine.weights import CheckpointError, SafetensorsReader, draw_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.models.mcore.weights import ReadPart
    from verl.workers.config import HFModelConfig

T = TypeVar("T")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of weight files, which workers do not send whole."""


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Request(NamedTuple):
    """A part of a tensor that a worker wants."""

    name: str
    part: tuple[slice, ...]


def new_weights(hf_config: "PretrainedConfig", seed: int) -> "ReadPart":
    """Return a function that draws each tensor, the same on every layout: norms are 1, biases 0, matrices normal."""

    def make(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        is_norm = len(shape) == 1 and not name.endswith("bias")
        whole = torch.ones(*shape) if is_norm else draw_tensor(name, torch.Size(shape), seed, hf_config)
        return whole[part]

    return make


# The folder of a model, without its weights


def share_folder(config: "HFModelConfig") -> None:
    """Send configuration and tokenizer of ``model.path`` to workers whose node lacks the folder; collective.

    They write them to a temporary folder, which becomes their ``local_path``.
    """
    folder = os.path.expanduser(config.path).rstrip("/")
    here = _gathered(os.path.isfile(os.path.join(folder, "config.json")))
    if all(here) or not any(here):  # no worker has the folder of a hub id
        return
    first = here.index(True)
    box = [_small_files(folder) if dist.get_rank() == first else {}]
    dist.broadcast_object_list(box, src=first)
    if not here[dist.get_rank()]:
        config.local_path = _written(box[0])


def _small_files(folder: str) -> dict[str, bytes]:
    files = (path for path in sorted(Path(folder).iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in files if not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))}


def _written(files: dict[str, bytes]) -> str:
    """Write files to a folder named by their digest, so that the workers of a node share it."""
    digest = hashlib.blake2b(digest_size=12)
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    folder = os.path.join(tempfile.gettempdir(), f"verl-model-{digest.hexdigest()}")
    os.makedirs(folder, exist_ok=True)
    for name, content in files.items():
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            file.write(content)
        os.replace(file.name, os.path.join(folder, name))
    return folder


# Its weights


def _gathered(value: T) -> list[T]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise CheckpointError(problem)


class SharedWeights:
    """Send parts of tensors to the workers without files, each from a worker that has them; collective.

    Workers without files first list the parts that they want, in the order in which they will read them. Parts are
    sent one by one, so that no worker holds more than its own weights and one part.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        """Find out who has files. Raises: CheckpointError on all workers if one cannot read its files."""
        self._device = device
        self._rank = dist.get_rank()
        self.reader: SafetensorsReader | None = None
        self.stored: dict[str, Stored] = {}
        problem = None
        if SafetensorsReader.serves(folder):
            try:
                self.reader = SafetensorsReader(folder)
                self.stored = {name: Stored(*each) for name, each in self.reader.describe().items()}
            except CheckpointError as error:
                problem = str(error)
        found = _gathered((self.reader is not None, problem))
        _raise_first(each for _, each in found)
        self._owners = [rank for rank, (has, _) in enumerate(found) if has]
        self._wanting = [rank for rank, (has, _) in enumerate(found) if not has]
        self._requests: deque[Request] = deque()
        self._problems: list[str] = []
        if self.is_needed:
            box = [self.stored]
            dist.broadcast_object_list(box, src=self._owners[0])
            self.stored = box[0]

    @property
    def is_needed(self) -> bool:
        """Whether some workers have files and others have none."""
        return bool(self._wanting and self._owners)

    def exchange(self, plan: Callable[[], None]) -> None:
        """Collect the requests that ``plan`` makes by ``want``, and send what other workers request.

        Raises: on all workers, the error that ``plan`` raises on one.
        """
        problem = None
        if self.reader is None:
            try:
                plan()
            except ValueError as error:
                problem = str(error)
        asked = _gathered((list(self._requests), problem))
        _raise_first(each for _, each in asked)
        if self.reader is not None:
            mine = [rank for rank in self._wanting if self._source_of(rank) == self._rank]
            # Every waiting worker is told about an unreadable part before this worker raises.
            _raise_first([self._send(request, rank) for rank in mine for request in asked[rank][0]])

    def want(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Request a part, and return a meta tensor of its shape. Raises: CheckpointError for another shape."""
        stored = self.stored[name]
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name!r} has shape {stored.shape}, the model of its config.json needs {tuple(shape)}"
            )
        self._requests.append(Request(name, part))
        return torch.empty(_shape_of(stored, part), dtype=stored.dtype, device="meta")

    def receive(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Return the next requested part, or zeros if its owner could not read it, which ``finish`` raises."""
        request = self._requests.popleft()
        assert request == Request(name, part), f"{request} was requested, not {name} {part}"
        stored = self.stored[name]
        source = self._source_of(self._rank)
        length = torch.zeros(1, dtype=torch.long, device=self._device)
        dist.recv(length, src=source)
        content = torch.empty(abs(int(length)), dtype=torch.uint8, device=self._device)
        if len(content):
            dist.recv(content, src=source)
        if length < 0:
            self._problems.append(f"rank {source}, which has the files: {bytes(content.tolist()).decode()}")
            return torch.zeros(_shape_of(stored, part), dtype=stored.dtype)
        return content.view(stored.dtype).view(_shape_of(stored, part))

    def finish(self) -> None:
        """End an exchange. Raises: CheckpointError with the message of a worker that could not read a part."""
        _raise_first(self._problems)

    def _source_of(self, rank: int) -> int:
        return self._owners[self._wanting.index(rank) % len(self._owners)]

    def _send(self, request: Request, rank: int) -> str | None:
        """Send a length and that many bytes: the part or, with a negative length, an error message.

        Returns: the error message, or None.
        """
        assert self.reader is not None
        problem = None
        try:
            part = self.reader.read(request.name, self.stored[request.name].shape, request.part)
            content = part.contiguous().view(-1).view(torch.uint8)
        except CheckpointError as error:
            problem = str(error)
            content = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8)
        length = len(content) if problem is None else -len(content)
        dist.send(torch.tensor([length], device=self._device), dst=rank)
        if len(content):
            dist.send(content.to(self._device), dst=rank)
        return problem


def _shape_of(stored: Stored, part: tuple[slice, ...]) -> tuple[int, ...]:
    cut = [len(range(*piece.indices(size))) for piece, size in zip(part, stored.shape, strict=False)]
    return (*cut, *stored.shape[len(cut) :])
