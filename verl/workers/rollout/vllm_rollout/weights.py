"""Load streamed weights into a vLLM model, completely or not at all, and read them back.

vLLM stacks projections (query, key and value; gate and up), splits them over tensor-parallel ranks, and replicates key
and value heads when ranks outnumber them. The checksum of a weight sync compares the part on this rank with the same
part of the full tensor that was sent, so ``EngineLayout`` maps each checkpoint tensor to the parameter, rows and
columns that this rank holds.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.errors import WrongInput
from verl.workers.rollout.base import Bucket
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.unread import check_nothing_is_nan, fill_with_nan

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

logger = logging.getLogger(__name__)

Span = tuple[int, int]
_PLAIN = {torch.float32, torch.bfloat16, torch.float16}
_OF_EXPERT = re.compile(r"(?P<path>.+\.experts)\.(\d+\.\w+\.weight|gate_up_proj|down_proj)")
_LATENT_ATTENTION = "attention.mla_attention"


class EngineWeights:
    """The weights of one rank's vLLM model, changed by vLLM's layer-wise reload.

    After loading a checkpoint, vLLM transforms parameters (it packs, transposes or quantises them). A raw
    ``load_weights`` would write checkpoint rows into the transformed storage, so updates always use the reload, which
    restores a layer, loads it and transforms it again.

    Args: an ``is_unread`` model has read no weights, so its first update must fill it.
    """

    def __init__(
        self, model: nn.Module, model_config: "ModelConfig", device: torch.device, is_unread: bool = False
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self.layout = EngineLayout(model)
        self._arrived: set[str] = set()
        self.pending_bytes = 0
        self._is_unread = is_unread
        if self.layout.opaque:
            logger.warning(
                "%d parameters are in layers of unknown layout, for instance %s: the weight sync cannot verify them",
                len(self.layout.opaque),
                min(self.layout.opaque),
            )

    def begin(self) -> None:
        """Open every layer for loading."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        self._arrived.clear()
        self.pending_bytes = 0
        if self._device.type == "cpu":
            self._pack_experts_again()
        if self._is_unread:
            fill_with_nan(self._model)
        with self._device:
            initialize_layerwise_reload(self._model)

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Load the next tensors, removing them from the list; no reference to them remains.

        Raises: RuntimeError naming a tensor that the model lacks, or that arrived twice.
        """
        for name, _ in bucket:
            key = self.layout.key(name)
            if key in self._arrived:
                raise RuntimeError(f"weight sync: tensor {name!r} came twice in one update")
            if self.layout.find(key) is None and not self.layout.opaque:
                raise RuntimeError(f"weight sync: the rollout engine's model has no tensor {name!r}")
            self._arrived.add(key)
        bucket.reverse()
        self._model.load_weights(bucket.pop() for _ in range(len(bucket)))  # type: ignore[operator]
        self._own_pending()

    def finish(self) -> None:
        """Close all layers.

        Raises: RuntimeError naming tensors that did not arrive, or that the first update of an unread model left out.
        """
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        due = self.layout.pieces.keys() - self._arrived_joined()
        missing = sorted(due - self._arrived) + self._incomplete_opaque_layers()
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(f"weight sync: {len(missing)} tensors of the rollout's model are missing: {shown}")
        finalize_layerwise_reload(self._model, self._model_config)
        if self._is_unread:
            check_nothing_is_nan(self._model)
            self._is_unread = False

    def abort(self) -> None:
        """Drop the tensors of unfinished layers; open layers stay open until the next ``begin`` and ``finish``."""
        for _, info in self._open_layers():
            info.loaded_weights.clear()
            info.load_numel = 0
        self.pending_bytes = 0

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every tensor whose place is known, read from the engine's parameters."""
        pieces = {name: joined.piece for name, joined in self.layout.joined.items() if name in self._arrived}
        in_joined = self._arrived_joined()
        pieces |= {name: piece for name, piece in self.layout.pieces.items() if name not in in_joined}
        sums = [tensor_checksum(piece.read()) for piece in pieces.values()]
        return dict(zip(pieces, torch.stack(sums).tolist(), strict=True))

    def checksum_of_source(self, name: str, full: Tensor) -> tuple[str, Tensor] | None:
        """Return the entry that ``checksums`` must have for a full checkpoint tensor; None if its place is unknown."""
        key = self.layout.key(name)
        piece = self.layout.find(key)
        if piece is None:
            return None
        return key, tensor_checksum(piece.cut(full), getattr(piece.module, piece.parameter).dtype)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype of the parameter that takes a checkpoint tensor by a plain copy; None if there is none.

        The checksum proves it for known layers. The loader of experts in 16 or 32 bits copies, too.
        """
        if self._model_config.quantization is not None:
            return None
        key = self.layout.key(name)
        piece = self.layout.find(key)
        held = self.layout.parameters_of_experts(key) if piece is None else [getattr(piece.module, piece.parameter)]
        dtypes = {parameter.dtype for parameter in held}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= _PLAIN else None

    def places(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return where each tensor of a checkpoint is, as a view of the present parameter; see ``BaseRollout``.

        Raises: WrongInput naming a tensor that has no place in the engine, or that the checkpoint lacks.
        """
        if strange := self.layout.opaque | self.layout.derived:
            raise WrongInput(
                f"the engine holds {len(strange)} tensors in a form that no checkpoint has, such as {min(strange)}"
            )
        pieces = {name: self.layout.find(self.layout.key(name)) for name in names}
        if unknown := [name for name, piece in pieces.items() if piece is None]:
            raise WrongInput(f"the engine has no {len(unknown)} tensors of the trainer, such as {min(unknown)}")
        keys = {self.layout.key(name) for name in names}
        if missing := self.layout.pieces.keys() - keys - self._joined_parts(keys):
            raise WrongInput(f"the trainer has no {len(missing)} tensors of the engine, such as {min(missing)}")
        self._is_unread = False  # the trainer writes into these places
        return {name: piece.whole(name) for name, piece in pieces.items() if piece is not None}

    def _arrived_joined(self) -> set[str]:
        """Return the names of the projections that arrived in one tensor."""
        return self._joined_parts(self._arrived)

    def _joined_parts(self, keys: Collection[str]) -> set[str]:
        return {part for name, joined in self.layout.joined.items() if name in keys for part in joined.parts}

    def _pack_experts_again(self) -> None:
        """Make vLLM prepare layers of experts as at their first load.

        vLLM 0.32 packs them for the CPU only then, and would read the rows of an update as if they were packed.
        """
        for module in self._model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]

    def _open_layers(self) -> list[tuple[str, "LayerReloadingInfo"]]:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        named = ((path, get_layerwise_info(module)) for path, module in self._model.named_modules())
        return [(path, info) for path, info in named if info.can_load()]

    def _own_pending(self) -> None:
        """Copy the tensors that vLLM keeps until their layer is complete, because the sender may reuse their memory."""
        self.pending_bytes = 0
        for _, info in self._open_layers():
            for _, bound in info.loaded_weights:
                for argument, value in bound.arguments.items():
                    if not isinstance(value, Tensor) or value.is_meta:
                        continue
                    self.pending_bytes += value.nbytes
                    if not getattr(value, "_verl_owned", False):
                        bound.arguments[argument] = value.clone()
                        bound.arguments[argument]._verl_owned = True

    def _incomplete_opaque_layers(self) -> list[str]:
        if not self.layout.opaque:
            return []
        paths = {name.rpartition(".")[0] for name in self.layout.opaque}
        open_layers = [(path, info) for path, info in self._open_layers() if path in paths]
        return sorted(path for path, info in open_layers if info.load_numel < (info.load_numel_total or 0))


# The place of each checkpoint tensor


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
        """Return the engine's values as a view."""
        return _cut(getattr(self.module, self.parameter), self.held)

    def whole(self, name: str) -> Tensor:
        """Return the engine's values as a view, if that is the whole tensor of the checkpoint.

        Raises: WrongInput naming the tensor when this rank holds some of its rows, or in another order.
        """
        spans = self.stacked or tuple(span for span in self.source if span is not None)
        starts = [0, *(end for _, end in spans[:-1])] if self.stacked else [0] * len(spans)
        if [start for start, _ in spans] != starts:
            raise WrongInput(f"the engine holds tensor {name!r} in part, or its rows in another order")
        return self.read()

    def cut(self, full: Tensor) -> Tensor:
        """Return the part of the full checkpoint tensor that the engine should hold; a view if it is contiguous."""
        if self.stacked:
            return torch.cat([full[start:end] for start, end in self.stacked])
        return _cut(full, self.source)


class Joined(NamedTuple):
    """A checkpoint tensor that stacks several projections, and their names in a checkpoint that does not."""

    piece: Piece
    parts: tuple[str, ...]


def _cut(tensor: Tensor, spans: tuple[Span | None, Span | None]) -> Tensor:
    for dim, span in enumerate(spans):
        if span is not None:
            tensor = tensor.narrow(dim, span[0], span[1] - span[0])
    return tensor


class EngineLayout:
    """The checkpoint tensors of a loaded vLLM model.

    ``pieces`` holds the tensors of known layers by their vLLM name, with stacked projections separated. ``joined``
    holds those that may come instead of separate projections, as in GLM-4. ``opaque`` holds the names of parameters of
    layers with an unknown layout (fused ``experts``), ``derived`` those that vLLM computes from others after a load.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pieces: dict[str, Piece] = {}
        self.joined: dict[str, Joined] = {}
        self.opaque: set[str] = set()
        self.derived: set[str] = set()
        self.experts: dict[str, nn.Module] = {}
        self.key = _name_mapper(model)
        """Returns the name of a checkpoint tensor in ``pieces``."""
        packed: dict[str, list[list[str]]] = {}  # stacked module -> the projections in it
        for module in model.modules():  # in a model of several parts, each part may declare its own
            for stack, projections in getattr(module, "packed_modules_mapping", {}).items():
                packed.setdefault(stack, []).append(projections)
        seen: set[int] = set()
        for path, module in model.named_modules():
            for parameter, value in module.named_parameters(recurse=False):
                if id(value) in seen:  # an output layer tied to the embedding
                    continue
                seen.add(id(value))
                self._add(path, module, parameter, value, packed)

    def parameters_of_experts(self, key: str) -> list[nn.Parameter]:
        """Return the stacks of the layer of experts to which a checkpoint tensor belongs; empty for another one."""
        found = _OF_EXPERT.fullmatch(key)
        module = None if found is None else self.experts.get(found["path"])
        return [] if module is None else [each for each in module.parameters(recurse=False) if each.dim() == 3]

    def find(self, key: str) -> Piece | None:
        """Return the piece of a checkpoint tensor by its vLLM name; None for an unknown name or layout."""
        joined = self.joined.get(key)
        return self.pieces.get(key) if joined is None else joined.piece

    def _add(
        self, path: str, module: nn.Module, parameter: str, value: Tensor, packed: dict[str, list[list[str]]]
    ) -> None:
        if _LATENT_ATTENTION in type(module).__module__:  # vLLM computes them from kv_b_proj after each load
            self.derived.add(f"{path}.{parameter}")
            return
        parent, _, leaf = path.rpartition(".")
        if _is_of_experts(module) and value.dim() == 3:
            self.experts[path.removesuffix(".routed_experts")] = module
        pieces = _pieces_of(module, parameter, value)
        parts = [leaf]
        if len(pieces) > 1:
            parts = next((names for names in packed.get(leaf, ()) if len(names) == len(pieces)), parts)
        if len(pieces) == 3 and parts == [leaf] and hasattr(module, "total_num_heads"):
            pieces = [Piece(module, parameter, stacked=_fused_qkv_spans(module))]
        if not pieces or len(parts) != len(pieces):
            self.opaque.add(f"{path}.{parameter}")
            return
        names = [".".join(filter(None, (parent, part, parameter))) for part in parts]
        self.pieces |= dict(zip(names, pieces, strict=True))
        if spans := _joined_spans(module):
            self.joined[f"{path}.{parameter}"] = Joined(Piece(module, parameter, stacked=spans), tuple(names))


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
    if _is_of_experts(module):
        return []
    return [Piece(module, parameter)]


def _is_of_experts(module: nn.Module) -> bool:
    return "moe" in type(module).__module__


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


def _joined_spans(module: Any) -> tuple[Span, ...]:
    """Return the spans of this rank's rows in a checkpoint tensor that stacks gate and up; empty for other layers."""
    from vllm.model_executor.layers import linear

    if not isinstance(module, linear.MergedColumnParallelLinear) or isinstance(module, linear.QKVParallelLinear):
        return ()
    spans = []
    first = 0
    for size in module.output_sizes:
        rows = size // module.tp_size
        spans.append((first + module.tp_rank * rows, first + (module.tp_rank + 1) * rows))
        first += size
    return tuple(spans)


def _stacked(module: nn.Module, parameter: str, spans: list[Span]) -> Iterator[Piece]:
    offset = 0
    for start, rows in spans:
        yield Piece(module, parameter, ((offset, offset + rows), None), ((start, start + rows), None))
        offset += rows
