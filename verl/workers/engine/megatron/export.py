"""Weights out of any layout under checkpoint names, one tensor at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.mcore.weights import Rule
from verl.workers.engine.megatron.build import NamedParameter, named_parameters
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
    own = {named[0]: named for model in models for named in named_parameters(model, hf_config, is_value_model)}
    for name, source in _owners(own, layout).items():
        rule, names, part = _share(own.get(name), of, source, layout)
        yield from zip(names, rule.export(_gather(part, rule, layout)), strict=True)


def _owners(own: dict[str, NamedParameter], layout: Layout) -> dict[str, int]:
    """Return, in the order of the export, the rank in this pipeline that sends each parameter."""
    mine = [(name, named[2]) for name, named in own.items()]
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
) -> tuple[Rule, tuple[str, ...], Tensor]:
    """Send one stage's part of a tensor to the same part of the others."""
    if layout.pp_size == 1:
        assert named is not None
        return named[1], named[2], of(named[3])
    sends = layout.pp_rank == source and named is not None
    root = dist.get_global_rank(layout.pp_group, source)
    own = of(named[3]).contiguous() if sends and named is not None else None
    box: list[Any] = [(named[1], named[2], own.shape, own.dtype) if own is not None and named is not None else None]
    dist.broadcast_object_list(box, src=root, group=layout.pp_group)
    rule, names, shape, dtype = box[0]
    part = torch.empty(shape, dtype=dtype, device=layout.device) if own is None else own
    dist.broadcast(part, src=root, group=layout.pp_group)
    return rule, names, part


def _gather(part: Tensor, rule: Rule, layout: Layout) -> list[Tensor]:
    if rule.shard_dim is None or layout.tp_size == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(layout.tp_size)]
    dist.all_gather(parts, part.contiguous(), group=layout.tp_group)
    return parts
