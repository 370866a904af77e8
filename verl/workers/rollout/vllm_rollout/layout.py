"""The place of each checkpoint tensor in a vLLM model: the parameter, rows and columns that this rank holds.

vLLM stacks projections (query, key and value; gate and up), splits them over tensor-parallel ranks, and replicates key
and value heads when ranks outnumber them. The checksum of a weight sync compares the part on this rank with the same
part of the full tensor that was sent, so this module maps one to the other.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import QKVParallelLinear

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one checkpoint tensor that this rank's engine holds.

    ``held`` is its place in the parameter and ``source`` its place in the checkpoint tensor, as spans of rows and of
    columns; None is the whole axis. ``stacked`` holds the spans of rows if the checkpoint also stacks projections.
    """

    module: nn.Module
    parameter: str
    held: tuple[Span | None, Span | None] = (None, None)
    source: tuple[Span | None, Span | None] = (None, None)
    stacked: tuple[Span, ...] = ()

    def read(self) -> Tensor:
        """Return the engine's values, as a view."""
        return _cut(getattr(self.module, self.parameter), self.held)

    def cut(self, full: Tensor) -> Tensor:
        """Return the part of the full checkpoint tensor that the engine should hold; a view if it is contiguous."""
        if self.stacked:
            return torch.cat([full[start:end] for start, end in self.stacked])
        return _cut(full, self.source)


def _cut(tensor: Tensor, spans: tuple[Span | None, Span | None]) -> Tensor:
    for dim, span in enumerate(spans):
        if span is not None:
            tensor = tensor.narrow(dim, span[0], span[1] - span[0])
    return tensor


class EngineLayout:
    """The checkpoint tensors of a loaded vLLM model.

    ``pieces`` holds the tensors of known layers by their vLLM name, with stacked projections separated. ``opaque``
    holds the names of parameters of layers with an unknown layout (fused experts).
    """

    def __init__(self, model: nn.Module) -> None:
        self.pieces: dict[str, Piece] = {}
        self.opaque: set[str] = set()
        self._translate = _name_mapper(model)
        packed = _packed_modules(model)
        seen: set[int] = set()
        for path, module in model.named_modules():
            for parameter, value in module.named_parameters(recurse=False):
                if id(value) in seen:  # an output layer tied to the embedding
                    continue
                seen.add(id(value))
                self._add(path, module, parameter, value, packed)

    def key(self, checkpoint_name: str) -> str:
        """Return the name of a checkpoint tensor in ``pieces``."""
        return self._translate(checkpoint_name)

    def _add(self, path: str, module: nn.Module, parameter: str, value: Tensor, packed: dict[str, list[str]]) -> None:
        parent, _, leaf = path.rpartition(".")
        pieces = _pieces_of(module, parameter, value)
        parts = packed.get(leaf, [leaf]) if len(pieces) > 1 else [leaf]
        if len(pieces) == 3 and parts == [leaf] and hasattr(module, "total_num_heads"):
            pieces = [Piece(module, parameter, stacked=_fused_qkv_spans(module))]
        if not pieces or len(parts) != len(pieces):
            self.opaque.add(f"{path}.{parameter}")
            return
        for part, piece in zip(parts, pieces, strict=True):
            self.pieces[".".join(filter(None, (parent, part, parameter)))] = piece


def _packed_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return which projections vLLM stacks; in a model of several parts, each part may declare its own."""
    packed: dict[str, list[str]] = {}
    for module in model.modules():
        packed = {**getattr(module, "packed_modules_mapping", {}), **packed}
    return packed


def _name_mapper(model: nn.Module) -> Callable[[str], str]:
    """Return vLLM's own translation of checkpoint names, without its stacking of projections."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    if hasattr(mapper, "orig_to_new_stacked"):
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    translate = getattr(mapper, "map_name", None) or mapper._map_name
    return lambda name: translate(name) or name


def _pieces_of(module: nn.Module, parameter: str, value: Tensor) -> list[Piece]:
    """Return the pieces of one parameter in the order of the stack; an empty list for an unknown layer."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, linear.QKVParallelLinear):
        return list(_stacked(module, parameter, _qkv_spans(module)))
    if isinstance(module, linear.MergedColumnParallelLinear):
        spans = [(module.tp_rank * size // module.tp_size, size // module.tp_size) for size in module.output_sizes]
        return list(_stacked(module, parameter, spans))
    if isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        start = shard.org_vocab_start_index
        end = shard.org_vocab_end_index
        return [Piece(module, parameter, ((0, end - start), None), ((start, end), None))]
    if isinstance(module, linear.ColumnParallelLinear):
        rows = value.shape[0]
        return [Piece(module, parameter, source=((module.tp_rank * rows, (module.tp_rank + 1) * rows), None))]
    if isinstance(module, linear.RowParallelLinear) and value.dim() == 2:
        columns = value.shape[1]
        return [Piece(module, parameter, source=(None, (module.tp_rank * columns, (module.tp_rank + 1) * columns)))]
    if "moe" in type(module).__module__:
        return []
    return [Piece(module, parameter)]


def _qkv_spans(module: "QKVParallelLinear") -> list[Span]:
    """Return (first checkpoint row, number of rows) of this rank's query, key and value heads."""
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    query = module.num_heads * module.head_size
    key = module.num_kv_heads * module.head_size
    value = module.num_kv_heads * getattr(module, "v_head_size", module.head_size)
    return [(module.tp_rank * query, query), (kv_rank * key, key), (kv_rank * value, value)]


def _fused_qkv_spans(module: Any) -> tuple[Span, ...]:
    """Return the spans of this rank's heads in a checkpoint tensor that stacks query, key and value."""
    heads = (module.total_num_heads, module.total_num_kv_heads)
    starts = (0, heads[0] * module.head_size, sum(heads) * module.head_size)
    spans = zip(starts, _qkv_spans(module), strict=True)
    return tuple((start + first, start + first + rows) for start, (first, rows) in spans)


def _stacked(module: nn.Module, parameter: str, spans: list[Span]) -> Iterator[Piece]:
    offset = 0
    for start, rows in spans:
        yield Piece(module, parameter, ((offset, offset + rows), None), ((start, start + rows), None))
        offset += rows
