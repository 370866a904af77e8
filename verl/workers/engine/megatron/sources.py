"""Where the weights of an engine come from: files of this node, a worker of another node, or a seed."""

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.model import text_config_of
from verl.workers.engine.weights import CheckpointError, SafetensorsReader, tensor_seed

if TYPE_CHECKING:
    from verl.models.mcore.weights import ReadPart
    from verl.workers.config import HFModelConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files of a model's folder that workers do not hand on whole."""


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Request(NamedTuple):
    """A part of a tensor that a worker wants."""

    name: str
    part: tuple[slice, ...]


def new_weights(hf_config: Any, seed: int) -> "ReadPart":
    """Return what makes up each tensor, the same on every layout: norms are one, biases zero, matrices normal."""
    std = getattr(text_config_of(hf_config), "initializer_range", 0.02)

    def make(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        if name.endswith("bias"):
            whole = torch.zeros(*shape)
        elif len(shape) == 1:
            whole = torch.ones(*shape)
        else:
            generator = torch.Generator().manual_seed(tensor_seed(seed, name))
            whole = torch.randn(*shape, generator=generator) * std
        return whole[part]

    return make


# The folder of a model, without its weights


def share_folder(config: "HFModelConfig") -> None:
    """Give configuration and tokenizer of ``model.path`` to the workers whose node has no such folder; collective.

    They keep them in a folder of their own, which becomes their ``local_path``.
    """
    folder = os.path.expanduser(config.path).rstrip("/")
    here: list[Any] = _gathered(os.path.isfile(os.path.join(folder, "config.json")))
    if all(here) or not any(here):  # a hub id is nobody's folder
        return
    first, box = here.index(True), [None]
    if dist.get_rank() == first:
        box = [_small_files(folder)]  # type: ignore[list-item]
    dist.broadcast_object_list(box, src=first)
    if not here[dist.get_rank()]:
        files: Any = box[0]
        config.local_path = _written(files)


def _small_files(folder: str) -> dict[str, bytes]:
    files = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            with open(path, "rb") as file:
                files[name] = file.read()
    return files


def _written(files: dict[str, bytes]) -> str:
    """Write files to a folder that is named by what they are, which workers of one node share."""
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


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise CheckpointError(problem)


class SharedWeights:
    """Parts of tensors for the workers that have no files, each from one that has them; collective.

    Those without files first say which parts they want, in the order in which they will read them. Each part is sent
    alone, so that nobody holds more than its own weights and one part.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        """Find out who has files. Raises: CheckpointError on all workers where one cannot read what it has."""
        self._device, self._rank = device, dist.get_rank()
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

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self.stored)

    def exchange(self, plan: Callable[[], None]) -> None:
        """Collect what is wanted, which ``plan`` reads by ``want``, and send what this worker is asked for.

        Raises: what ``plan`` raises on one worker, on all of them.
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
            # What cannot be read is told to each that waits for it, and then raised here.
            _raise_first([self._send(request, rank) for rank in mine for request in asked[rank][0]])

    def want(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Note a part, and return one of its shape that holds nothing. Raises: CheckpointError for another shape."""
        stored = self.stored[name]
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name!r} has shape {stored.shape}, the model of its config.json needs {tuple(shape)}"
            )
        self._requests.append(Request(name, part))
        return torch.empty(_shape_of(stored, part), dtype=stored.dtype, device="meta")

    def receive(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Return the next part that was wanted; of one that could not be read, which ``finish`` raises, zeros."""
        request = self._requests.popleft()
        assert request == Request(name, part), f"{request} was wanted, not {name} {part}"
        stored, source = self.stored[name], self._source_of(self._rank)
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
        """End an exchange. Raises: CheckpointError with the message of who could not read a part."""
        _raise_first(self._problems)

    def _source_of(self, rank: int) -> int:
        return self._owners[self._wanting.index(rank) % len(self._owners)]

    def _send(self, request: Request, rank: int) -> str | None:
        """Send a length and as many bytes: those of the part or, with the length below 0, of what went wrong.

        Returns: what went wrong.
        """
        assert self.reader is not None
        problem = None
        try:
            part = self.reader.read(request.name, self.stored[request.name].shape, request.part)
            content, sign = part.contiguous().view(-1).view(torch.uint8), 1
        except CheckpointError as error:
            problem = str(error)
            content, sign = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8), -1
        dist.send(torch.tensor([sign * len(content)], device=self._device), dst=rank)
        if len(content):
            dist.send(content.to(self._device), dst=rank)
        return problem


def _shape_of(stored: Stored, part: tuple[slice, ...]) -> tuple[int, ...]:
    cut = [len(range(*piece.indices(size))) for piece, size in zip(part, stored.shape, strict=False)]
    return (*cut, *stored.shape[len(cut) :])
