"""Weights out of any layout under checkpoint names, one tensor at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.models.mcore.gpt.build import NamedParameter, named_parameters
from verl.models.mcore.weights import Rule
from verl.workers.engine.megatron.layout import Layout


@dataclass(frozen=True)
class Entry:
    """One parameter in the order of the export, as every rank knows it.

    ``stage`` is the pipeline rank that sends it, ``names`` the checkpoint names of its tensors: of an expert one tuple
    for each expert-parallel rank, of which each has another expert at this place.
    """

    name: str
    rule: Rule
    stage: int
    shape: torch.Size
    dtype: torch.dtype
    names: tuple[tuple[str, ...], ...]
    is_expert: bool


def exported_weights(
    models: Sequence[Any],
    hf_config: Any,
    is_value_model: bool,
    layout: Layout,
    of: Callable[[Tensor], Tensor | None] = torch.Tensor.detach,
    before: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor): the embedding, the layers by number, the last norm, the head; collective.

    ``of`` says what of a parameter is exported: itself, or its gradient; where it is None, nothing. ``before`` is told
    the bytes of each parameter before its parts are gathered.

    A tensor moves from the stage that holds it to the others as one part per tensor-parallel rank, an expert then from
    the rank that holds it to the others, and only then the parts are put together: what is alive at a time is this
    rank's part and the tensors of one parameter. What every rank holds is not gathered, and a tied head comes once, as
    the embedding.
    """
    own = {each.name: each for model in models for each in named_parameters(model, hf_config, is_value_model)}
    for entry in _plan(own, of, layout):
        if before is not None:
            before(entry.shape.numel() * entry.dtype.itemsize * layout.tp_group.size())
        part = of(own[entry.name].parameter) if layout.pp_rank == entry.stage else None
        yield from _tensors_of(entry, part, layout)


def _tensors_of(entry: Entry, part: Tensor | None, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors of one parameter, of which this rank may hold a part."""
    held = [_broadcast(part, entry, layout.pp_group, entry.stage, layout)]
    if len(entry.names) == 1:
        yield from _one_by_one(entry.names[0], entry.rule.export(_gather(held.pop(), entry, layout)))
        return
    for owner, names in enumerate(entry.names):
        mine = held[0] if layout.ep_rank == owner else None
        tensors = entry.rule.export(_gather(_broadcast(mine, entry, layout.ep_group, owner, layout), entry, layout))
        yield from _one_by_one(names, tensors)


def _one_by_one(names: Sequence[str], tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hand tensors over so that only their receiver keeps them alive."""
    for name in names:
        yield name, tensors.pop(0)


def _plan(own: dict[str, NamedParameter], of: Callable[[Tensor], Tensor | None], layout: Layout) -> list[Entry]:
    """Agree on the parameters of the whole model and who sends them; collective."""
    mine = []
    for name, named in own.items():
        if (value := of(named.parameter)) is None:
            continue
        names = (named.checkpoint_names,)
        mine.append(Entry(name, named.rule, layout.pp_rank, value.shape, value.dtype, names, named.is_expert))
    mine = _with_all_experts(mine, layout)
    stages: list[Any] = [mine]
    if layout.pp_size > 1:
        stages = [None] * layout.pp_size
        dist.all_gather_object(stages, mine, group=layout.pp_group)
    first: dict[tuple[tuple[str, ...], ...], Entry] = {}
    for entry in (entry for stage in stages for entry in stage):
        first.setdefault(entry.names, entry)
    return sorted(first.values(), key=lambda entry: _order(entry.name))


def _with_all_experts(mine: list[Entry], layout: Layout) -> list[Entry]:
    """Add to each expert the names of those that stand at its place on the other ranks which share the experts."""
    group = layout.ep_group
    if group.size() == 1 or not any(entry.is_expert for entry in mine):
        return mine
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, [entry.names[0] for entry in mine if entry.is_expert], group=group)
    names = zip(*everywhere, strict=True)
    return [replace(entry, names=next(names)) if entry.is_expert else entry for entry in mine]


def _order(name: str) -> tuple[int, int, str]:
    if name.startswith("embedding."):
        return (0, 0, name)
    if name.startswith("decoder.layers."):
        return (1, int(name.split(".")[2]), "")  # within a layer as the model has them: sorting is stable
    return (2, 0, name)


def _broadcast(own: Tensor | None, entry: Entry, group: ProcessGroup, owner: int, layout: Layout) -> Tensor:
    """Send the part of the rank that is ``owner`` in a group to the others, on the device."""
    if own is None:
        part = torch.empty(entry.shape, dtype=entry.dtype, device=layout.device)
    else:
        part = own.to(layout.device).contiguous()
    if group.size() > 1:
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
    return part


def _gather(part: Tensor, entry: Entry, layout: Layout) -> Sequence[Tensor] | Tensor:
    """Return the parts of all tensor-parallel ranks, in one tensor."""
    group = layout.expert_tp_group if entry.is_expert else layout.tp_group
    if entry.rule.shard_dim is None or group.size() == 1:
        return [part]
    whole = torch.empty(group.size(), *part.shape, dtype=part.dtype, device=part.device)
    dist.all_gather(list(whole.unbind()), part, group=group)
    return whole
