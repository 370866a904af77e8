"""Weights out of any layout under checkpoint names, one tensor at a time."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.mcore.gpt.build import NamedParameter, named_parameters
from verl.workers.engine.megatron.layout import Layout


def exported_weights(
    models: Sequence[Any],
    hf_config: Any,
    is_value_model: bool,
    layout: Layout,
    of: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor): the embedding, the layers by number, the last norm, the head; collective.

    ``of`` says what of a parameter is exported: itself, or its gradient.

    A tensor moves from the stage that holds it to the others as one part per tensor-parallel rank, and only then the
    parts are put together. What every rank holds is not gathered, and a tied head comes once, as the embedding.
    """
    own = {each.name: each for model in models for each in named_parameters(model, hf_config, is_value_model)}
    for name, source in _owners(own, layout).items():
        named, part = _share(own.get(name), of, source, layout)
        tensors = named.rule.export(_gather(part, named, layout))
        if named.is_expert and layout.ep_group.size() > 1:
            yield from _of_all_experts(named.checkpoint_names, tensors, layout)
        else:
            yield from zip(named.checkpoint_names, tensors, strict=True)


def _owners(own: dict[str, NamedParameter], layout: Layout) -> dict[str, int]:
    """Return, in the order of the export, the rank in this pipeline that sends each parameter."""
    mine = [(name, named.checkpoint_names) for name, named in own.items()]
    stages: list[Any] = [mine]
    if layout.pp_size > 1:
        stages = [None] * layout.pp_size
        dist.all_gather_object(stages, mine, group=layout.pp_group)
    owners: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    for stage, entries in enumerate(stages):
        for name, names in entries:
            if names not in seen:
                seen.add(names)
                owners[name] = stage
    return dict(sorted(owners.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, int, str]:
    if name.startswith("embedding."):
        return (0, 0, name)
    if name.startswith("decoder.layers."):
        return (1, int(name.split(".")[2]), "")  # within a layer as the model has them: sorting is stable
    return (2, 0, name)


def _share(
    named: NamedParameter | None, of: Callable[[torch.nn.Parameter], Tensor], source: int, layout: Layout
) -> tuple[NamedParameter, Tensor]:
    """Send one stage's part of a tensor to the same part of the others."""
    if layout.pp_size == 1:
        assert named is not None
        return named, of(named.parameter)
    root = dist.get_global_rank(layout.pp_group, source)
    own: Tensor | None = None
    box: list[Any] = [None]
    if layout.pp_rank == source and named is not None:
        own = of(named.parameter).contiguous()
        empty = torch.nn.Parameter(torch.empty(0))
        box = [(dataclasses.replace(named, parameter=empty), own.shape, own.dtype)]
    dist.broadcast_object_list(box, src=root, group=layout.pp_group)
    described, shape, dtype = box[0]
    part = torch.empty(shape, dtype=dtype, device=layout.device) if own is None else own
    dist.broadcast(part, src=root, group=layout.pp_group)
    return described, part


def _gather(part: Tensor, named: NamedParameter, layout: Layout) -> list[Tensor]:
    group = layout.expert_tp_group if named.is_expert else layout.tp_group
    if named.rule.shard_dim is None or group.size() == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def _of_all_experts(names: Sequence[str], tensors: Sequence[Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the experts that stand at the same place on the ranks which share the experts."""
    group = layout.ep_group
    all_names: list[Any] = [None] * group.size()
    dist.all_gather_object(all_names, list(names), group=group)
    for at, tensor in enumerate(tensors):
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        yield from zip([each[at] for each in all_names], parts, strict=True)
