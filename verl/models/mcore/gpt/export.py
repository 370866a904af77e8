"""Export weights from any parallel layout under checkpoint names, one tensor at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verl.models.mcore.families import TOWER, num_experts
from verl.models.mcore.gpt.build import NamedParameter, named_parameters
from verl.models.mcore.gpt.layers import ValueHead
from verl.models.mcore.weights import Rule, is_of_stack, name_in_checkpoint, stacked
from verl.utils.device import current_device
from verl.utils.megatron_utils import unwrap_model
from verl.utils.torch_dtypes import smaller_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Convert = Callable[[str, Sequence[Tensor]], tuple[Sequence[str], Sequence[Tensor]]]
"""(name of a parameter, its parts on all tensor-parallel ranks) -> (checkpoint names, tensors)."""

AgreeOnDtypes = Callable[[Sequence[Sequence[str]]], Sequence[torch.dtype | None]]
"""(checkpoint names of each parameter) -> the dtype in which a receiver holds its tensors, or None; collective."""


@dataclass(frozen=True)
class Entry:
    """One parameter of the export plan, which all ranks share.

    Args:
        stage: pipeline rank that sends the parameter.
        names: checkpoint names of its tensors; for an expert, one tuple per expert-parallel rank, since each of these
            holds a different expert at this place.
        mcore_names: its Megatron-Core name, or those of the expert on each expert-parallel rank.
    """

    name: str
    rule: Rule
    stage: int
    shape: torch.Size
    dtype: torch.dtype
    names: tuple[tuple[str, ...], ...]
    mcore_names: tuple[str, ...]
    is_expert: bool


def exported_weights(
    models: Sequence[GPTModel],
    hf_config: "PretrainedConfig",
    is_value_model: bool,
    of: Callable[[Tensor], Tensor | None] = torch.Tensor.detach,
    before: Callable[[int], None] | None = None,
    convert: Convert | None = None,
    agree: AgreeOnDtypes | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, full tensor): the embedding, the vision tower, the layers by number, the last norm, the
    head; collective.

    Each tensor-parallel part is broadcast first from its pipeline stage, and an expert's part then from its
    expert-parallel rank. Only then are the parts gathered over tensor parallelism. So the peak extra memory is this
    rank's part and the tensors of one parameter, or of all experts of a layer where a checkpoint stacks these.
    Replicated tensors are not gathered, and a tied head is exported once, as the embedding.

    Args:
        of: returns the tensor to export for a parameter, such as its gradient; None skips the parameter.
        before: called with the bytes of each parameter before its parts are gathered.
        convert: replaces the rules' conversion.
        agree: returns the dtypes to cast to before parts are sent, where they are smaller; rules do no arithmetic.
    """
    own = {each.name: each for model in models for each in named_parameters(model, hf_config, is_value_model)}
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts = num_experts(hf_config) or 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        plan = _plan(own, of)
        if agree is not None:
            plan = _in_dtypes(plan, agree)
        for entry in plan:
            if before is not None:
                copies = experts if is_of_stack(entry.names[0][0]) else 1
                before(entry.shape.numel() * entry.dtype.itemsize * tp_size * copies)
            part = of(own[entry.name].parameter) if stage == entry.stage else None
            yield from _tensors_of(entry, part, convert)

    yield from stacked(tensors(), experts)


def module_weights(
    modules: Sequence[nn.Module], hf_config: "PretrainedConfig", convert: Convert | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield like ``exported_weights`` from chunks that may be wrapped, and that show whether they have a value head."""
    chunks = unwrap_model(list(modules))
    is_value_model = any(isinstance(getattr(chunk, "output_layer", None), ValueHead) for chunk in chunks)
    return exported_weights(chunks, hf_config, is_value_model, convert=convert)


def _tensors_of(entry: Entry, part: Tensor | None, convert: Convert | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors of one parameter; ``part`` is this rank's part, None on other stages."""
    held = [_broadcast(part, entry, parallel_state.get_pipeline_model_parallel_group(), entry.stage)]
    if len(entry.names) == 1:
        yield from _converted(entry, 0, _gather(held.pop(), entry), convert)
        return
    group = parallel_state.get_expert_model_parallel_group()
    for owner in range(len(entry.names)):
        mine = held[0] if group.rank() == owner else None
        parts = _gather(_broadcast(mine, entry, group, owner), entry)
        yield from _converted(entry, owner, parts, convert)


def _converted(
    entry: Entry, owner: int, parts: Sequence[Tensor] | Tensor, convert: Convert | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors without keeping a reference, so that the receiver can free each."""
    if convert is None:
        names: Sequence[str] = entry.names[owner]
        tensors = entry.rule.export(parts)
    else:
        names, found = convert(entry.mcore_names[owner], list(parts))
        tensors = list(found)
        del found
    for name in names:
        yield name, tensors.pop(0)


def _plan(own: dict[str, NamedParameter], of: Callable[[Tensor], Tensor | None]) -> list[Entry]:
    """Agree on the parameters of the whole model and their senders; collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = []
    for name, named in own.items():
        if (value := of(named.parameter)) is None:
            continue
        entry = Entry(
            name=name,
            rule=named.rule,
            stage=group.rank(),
            shape=value.shape,
            dtype=value.dtype,
            names=(named.checkpoint_names,),
            mcore_names=(name,),
            is_expert=named.is_expert,
        )
        mine.append(entry)
    mine = _with_all_experts(mine)
    stages: list[list[Entry]] = [mine]
    if group.size() > 1:
        stages = [[] for _ in range(group.size())]
        dist.all_gather_object(stages, mine, group=group)
    first: dict[tuple[tuple[str, ...], ...], Entry] = {}
    for entry in (entry for stage in stages for entry in stage):
        first.setdefault(entry.names, entry)
    return sorted(first.values(), key=lambda entry: _order(entry.name))


def _with_all_experts(mine: list[Entry]) -> list[Entry]:
    """Add to each expert the names of the experts at its place on the other expert-parallel ranks."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1 or not any(entry.is_expert for entry in mine):
        return mine
    everywhere: list[list[tuple[tuple[str, ...], str]]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everywhere, [(each.names[0], each.name) for each in mine if each.is_expert], group=group)
    there = zip(*everywhere, strict=True)  # for each place, the experts of all ranks

    def with_all(entry: Entry) -> Entry:
        names, mcore_names = zip(*next(there), strict=True)
        return replace(entry, names=names, mcore_names=mcore_names)

    return [with_all(entry) if entry.is_expert else entry for entry in mine]


def _order(name: str) -> tuple[int, int, str]:
    if name.startswith("embedding."):
        return (0, 0, name)
    if name.startswith(TOWER):
        return (0, 1, "")
    if name.startswith("decoder.layers."):
        return (1, int(name.split(".")[2]), "")  # the stable sort keeps the model's order within a layer
    return (2, 0, name)


def _in_dtypes(plan: list[Entry], agree: AgreeOnDtypes) -> list[Entry]:
    names = [[name_in_checkpoint(name) for names in entry.names for name in names] for entry in plan]
    pairs = zip(plan, agree(names), strict=True)
    return [replace(entry, dtype=smaller_dtype(entry.dtype, dtype)) for entry, dtype in pairs]


def _broadcast(own: Tensor | None, entry: Entry, group: ProcessGroup, owner: int) -> Tensor:
    """Broadcast the part of rank ``owner`` of the group on the device; ``own`` is None on the receivers."""
    if own is None:
        part = torch.empty(entry.shape, dtype=entry.dtype, device=current_device())
    else:
        part = own.to(entry.dtype).to(current_device()).contiguous()
    if group.size() > 1:
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
    return part


def _gather(part: Tensor, entry: Entry) -> Sequence[Tensor] | Tensor:
    """Return the parts of all tensor-parallel ranks in one tensor (ranks, ...)."""
    group = parallel_state.get_tensor_model_parallel_group()
    if entry.is_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    if entry.rule.shard_dim is None or group.size() == 1:
        return [part]
    whole = torch.empty(group.size(), *part.shape, dtype=part.dtype, device=part.device)
    dist.all_gather(list(whole.unbind()), part, group=group)
    return whole
