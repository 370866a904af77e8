"""Load weights from a checkpoint into sharded parameters, and export them under checkpoint names."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from verl.workers.engine.weights import CheckpointError, SafetensorsReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def local_rows(shape: torch.Size, group: ProcessGroup | None) -> slice:
    """Return the rows of a tensor that this rank's shard holds, cut over the group as ``Shard(0)`` does."""
    if not shape or group is None:
        return slice(None)
    step = -(-shape[0] // group.size())
    start = min(group.rank() * step, shape[0])
    return slice(start, min(start + step, shape[0]))


LocalReader = Callable[[str, torch.Size, slice], Tensor | None]
"""(name, whole shape, rows) -> those rows, or None for a tensor that the checkpoint does not hold."""


def materialize(
    model: nn.Module, group: ProcessGroup | None, device: torch.device, read: LocalReader, initialize: LocalReader
) -> None:
    """Give every meta parameter its shard on ``device``, from the checkpoint or, if it is new, from ``initialize``.

    Each rank reads only its shard, so no rank ever holds the whole model. Tied parameters stay one.

    Raises: CheckpointError for tensors that neither source has.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    missing = []
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        rows = local_rows(parameter.shape, group)
        local = read(name, parameter.shape, rows)
        if local is None:
            local = initialize(name, parameter.shape, rows)
        if local is None:
            missing.append(name)
            continue
        # A slice of a file may be a view into all of it. Saving such a shard would save the whole file.
        filled = torch.empty_like(parameter.detach(), device=device)
        (filled.to_local() if isinstance(filled, DTensor) else filled).copy_(local)
        new = nn.Parameter(filled, requires_grad=parameter.requires_grad)
        for module, attribute in places[id(parameter)]:
            setattr(module, attribute, new)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors of the model, the first is {missing[0]!r}: "
            "model.path must hold the whole model of its config.json"
        )


def checkpoint_reader(
    folder: str, model: "PreTrainedModel", load_whole: Callable[[], dict[str, Tensor]]
) -> LocalReader:
    """Choose how to read a checkpoint.

    If model and files share their names, each rank reads its slices. If transformers converts names or layouts, rank
    0 loads the tensors by ``load_whole`` and broadcasts them one by one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if SafetensorsReader.serves(folder):
        reader = SafetensorsReader(folder)
        wanted = {name for name, _ in model.named_parameters()}
        most_are_stored = len(wanted & reader.names()) * 2 > len(wanted)
        if most_are_stored and not get_model_conversion_mapping(model, add_legacy=False):
            aliases = _tied_aliases(model)

            def read(name: str, shape: torch.Size, rows: slice) -> Tensor | None:
                stored = next((n for n in (name, *aliases.get(name, ())) if n in reader.files), None)
                return reader.read(stored, shape, rows) if stored is not None else None

            return read
    return _broadcast_reader(load_whole)


def _tied_aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each unique parameter name, the other names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values() if rest}


def _broadcast_reader(load_whole: Callable[[], dict[str, Tensor]]) -> LocalReader:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    first = alone or dist.get_rank() == 0
    whole = load_whole() if first else {}

    def read(name: str, shape: torch.Size, rows: slice) -> Tensor | None:
        tensor = whole.pop(name).detach() if name in whole else None
        if not alone:
            tensor = _broadcast_from_first(tensor)
        if tensor is not None and tensor.shape != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}")
        return tensor if tensor is None or not shape else tensor[rows]

    return read


def _broadcast_from_first(tensor: Tensor | None) -> Tensor | None:
    header: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
    dist.broadcast_object_list(header, src=0)
    if header[0] is None:
        return None
    shape, dtype = header[0]
    received = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype)
    dist.broadcast(received, src=0)
    return received


# Export


def remember_conversions(model: "PreTrainedModel") -> None:
    """Keep the conversions of transformers for this class: it finds them by a class name that sharding changes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(model, add_legacy=False)
    # Prefix changes apply to a model without its head only; save_pretrained of a new model leaves them out, too.
    model._weight_conversions = [step for step in found if not isinstance(step, PrefixChange)] or None  # type: ignore[assignment]


def checkpoint_names(model: "PreTrainedModel", stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename and convert in-memory tensors to those that ``save_pretrained`` writes, one at a time."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not (getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)):
        yield from stream
        return
    for name, tensor in stream:
        yield from revert_weight_conversion(model, {name: tensor}).items()
