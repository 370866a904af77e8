"""Load streamed weights into an SGLang model, and read back what its parameters hold.

SGLang stacks projections, splits them over ranks and renames tensors, in the loader of each model. So this module does
not know where a tensor belongs. While a loader runs, each write into a parameter is recorded: the checkpoint tensor
that came last, the place in the parameter, and the checksum of what was written. A tensor that nothing takes is
unknown, a place that nothing has written is missing, and a place whose checksum has changed by the end is wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.unread import check_nothing_is_nan, fill_with_nan
from verl.workers.rollout.weight_channel import Bucket, common_dtypes, name_of


class Place(NamedTuple):
    """A part of a parameter."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class Write:
    """The content of a place.

    Attributes:
        name: the checkpoint tensor.
        address: the memory of the parameter, which is another one if the parameter has been packed since.
        checksum: that of the part of the tensor; None if it was not a plain copy.
        dtype: that of the parameter, if it took a part of the tensor as it came, or a number.
    """

    name: str
    address: int
    checksum: Tensor | None
    dtype: torch.dtype | None = None


class UnknownTensorError(RuntimeError):
    """No rank has a place for a tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(f"weight sync: the rollout engine's model has no tensor {name!r}")


class EngineWeights:
    """The weights of one rank's SGLang model, changed completely or not at all.

    Args:
        is_part: whether this rank does not hold every layer or expert, so it may ignore a tensor.
        is_unread: whether the model has read no weights, so that its first update must fill it.
    """

    def __init__(self, model: nn.Module, is_part: bool = False, is_unread: bool = False) -> None:
        self._model = model
        self._is_part = is_part
        self._is_unread = is_unread
        self._writes: dict[Place, Write] = {}
        self._known: dict[Place, str] = {}  # the names of the last complete update
        self._received: dict[str, Tensor] = {}
        self._taken: set[str] = set()

    @property
    def received(self) -> dict[str, int]:
        """The checksum of each tensor that has arrived in this update."""
        return {name: int(value) for name, value in self._received.items()}

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of the parameter that took each tensor unchanged; None if it was changed or the dtypes differ."""
        return common_dtypes({write.name: name_of(write.dtype)} for write in self._writes.values())

    @property
    def ignored(self) -> set[str]:
        """The tensors of this update that this rank has no place for."""
        return self._received.keys() - self._taken

    def begin(self) -> None:
        """Forget the last update."""
        if self._is_unread:
            fill_with_nan(self._model)
        self._writes.clear()
        self._received.clear()
        self._taken.clear()

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Load the next tensors; no reference to them remains.

        Raises: RuntimeError naming a tensor that the model lacks, or that arrived twice.
        """
        for name, tensor in bucket:
            if name in self._received:
                raise RuntimeError(f"weight sync: tensor {name!r} came twice in one update")
            self._received[name] = tensor_checksum(tensor)
        record = _Record(self._model, self._received)
        with record:
            self._model.load_weights(record.following(bucket))  # type: ignore[operator]
        self._writes |= record.writes
        self._taken |= record.taken
        ignored = [] if self._is_part else [name for name, _ in bucket if name not in record.taken]
        if ignored:
            raise UnknownTensorError(ignored[0])

    def check_complete(self) -> None:
        """Raise RuntimeError naming the tensors that did not arrive."""
        written: dict[str, int] = {}
        for place in self._writes:
            written[place.parameter] = written.get(place.parameter, 0) + torch.Size(place.shape).numel()
        short = [name for name, parameter in self._model.named_parameters() if written.get(name, 0) < parameter.numel()]
        missing = sorted({name for each in short for name in self._missing_in(each)})
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(f"weight sync: {len(missing)} tensors of the rollout's model are missing: {shown}")
        self._known = {place: write.name for place, write in self._writes.items()}

    def verify(self) -> int:
        """Compare the parameters with the tensors that were written; return how many cannot be compared.

        Raises: RuntimeError naming the tensors that differ, or that the first update of an unread model left out.
        """
        if self._is_unread:
            check_nothing_is_nan(self._model)
            self._is_unread = False
        parameters = dict(self._model.named_parameters())
        wrong: set[str] = set()
        found: set[str] = set()
        for place, write in self._writes.items():
            held = parameters.get(place.parameter)
            if write.checksum is None or held is None or _address(held) != write.address:
                continue
            view = held.detach().as_strided(place.shape, place.stride, place.offset)
            found.add(write.name)
            if int(tensor_checksum(view)) != int(write.checksum):
                wrong.add(write.name)
        if wrong:
            names = sorted(wrong)
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise RuntimeError(
                f"{len(names)} of {len(self._received)} tensors in the engine differ from what arrived: {shown}"
            )
        return len(self._taken - found)

    def _missing_in(self, parameter: str) -> list[str]:
        """Return the names of the tensors whose places in a parameter are not written."""
        known = {place: name for place, name in self._known.items() if place.parameter == parameter}
        if known:
            return [name for place, name in known.items() if place not in self._writes]
        return _unwritten_projections(self._model, parameter, self._writes) or [parameter]


class _Record(TorchDispatchMode):
    """Records the writes into a model's parameters while its loader runs."""

    def __init__(self, model: nn.Module, checksums: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[Place, Write] = {}
        self.taken: set[str] = set()
        self._checksums = checksums
        self._name = ""
        self._tensor: Tensor | None = None
        self._parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(_address(parameter), []).append((name, parameter))

    def following(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a bucket; following writes are attributed to the tensor that was yielded last."""
        for self._name, self._tensor in bucket:
            yield self._name, self._tensor
        self._tensor = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].numel():
            owners = self._parameters.get(_address(args[0]))
            if owners is not None:
                self._note(owners, args[0], _written(func, args))
            elif self._tensor is not None and _address(args[0]) == _address(self._tensor):
                self._tensor = None  # changed in place after its arrival, as Gemma's loader does, which adds 1
        return result

    def _note(self, owners: list[tuple[str, nn.Parameter]], target: Tensor, source: Tensor | None) -> None:
        offset = int(target.storage_offset())
        owner = next(
            name for name, each in owners if each.storage_offset() <= offset < each.storage_offset() + each.numel()
        )
        place = Place(owner, offset, tuple(target.shape), tuple(target.stride()))
        self.taken.add(self._name)
        if source is None:
            self.writes[place] = Write(self._name, _address(target), None)
            return
        whole = self._tensor
        if whole is not None and source.numel() > whole.numel():  # fused with tensors that came before
            parent = self._name.rpartition(".")[0].rpartition(".")[0]
            self.taken.update(name for name in self._checksums if name.startswith(f"{parent}."))
        if whole is not None and _is_same(source, whole) and target.dtype == whole.dtype:
            checksum = self._checksums[self._name]
        else:
            checksum = tensor_checksum(source.expand(target.shape), target.dtype)
        is_as_it_came = source.dim() == 0 or (whole is not None and _address(source) == _address(whole))
        self.writes[place] = Write(self._name, _address(target), checksum, target.dtype if is_as_it_came else None)


def _written(func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """Return the tensor or number that an operator has written into its first argument; None if it is unknown."""
    aten = torch.ops.aten
    if func is aten.copy_.default:
        return args[1]
    if func in (aten.zero_.default, aten.fill_.Scalar):  # padding, and heads that a rank does not have
        return args[0].new_full((), 0 if func is aten.zero_.default else args[1])
    return None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unwritten_projections(model: nn.Module, parameter: str, writes: dict[Place, Write]) -> list[str]:
    """Return the names of the projections of a stacked parameter that are not written; empty for other parameters."""
    from sglang.srt.model_loader.auto_loader import STANDARD_STACKED_MAPPING

    path, _, leaf = parameter.rpartition(".")
    parent, _, stack = path.rpartition(".")
    names = [part for whole, part, _ in STANDARD_STACKED_MAPPING.mappings if whole == stack]
    sizes = getattr(model.get_submodule(path), "output_partition_sizes", [])
    if len(names) != len(sizes):
        return []
    value = model.get_parameter(parameter)
    rows = value.stride(0) if value.dim() > 1 else 1
    unwritten = []
    first = value.storage_offset()
    for name, size in zip(names, sizes, strict=True):
        if not any(place.parameter == parameter and place.offset == first for place in writes):
            unwritten.append(".".join(filter(None, (parent, name, leaf))))
        first += size * rows
    return unwritten


def serialized(bucket: Bucket) -> str:
    """Return handles to a copy of a bucket on a GPU, for another process that sees this GPU.

    The form is that of SGLang's ``load_format="flattened_bucket"``. The memory lives until that process drops it.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    _know_devices_by_uuid()
    flat = FlattenedTensorBucket(named_tensors=aligned(bucket))
    payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return str(MultiprocessingSerializer.serialize(payload, output_str=True))


def aligned(bucket: Bucket) -> Bucket:
    """Return the tensors of a bucket, those with the largest elements first.

    SGLang joins their bytes without gaps and views each part as its dtype, which fails for four-byte elements after an
    odd number of two-byte ones.
    """
    return sorted(bucket, key=lambda named: named[1].element_size(), reverse=True)


def deserialized(payload: str) -> Bucket:
    """Return the tensors to which ``serialized`` has made handles."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    _know_devices_by_uuid()
    found = MultiprocessingSerializer.deserialize(payload)
    bucket = FlattenedTensorBucket(flattened_tensor=found["flattened_tensor"], metadata=found["metadata"])
    return list(bucket.reconstruct_tensors())


def _know_devices_by_uuid() -> None:
    """Let handles name a GPU by its UUID, since the processes may number GPUs differently."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if torch.cuda.is_available():  # its patch fails for tensors of a CPU
        monkey_patch_torch_reductions()
