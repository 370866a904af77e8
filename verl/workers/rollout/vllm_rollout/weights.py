"""Load streamed weights into a vLLM model, completely or not at all."""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl.workers.rollout.base import Bucket
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.vllm_rollout.layout import EngineLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

logger = logging.getLogger(__name__)


class EngineWeights:
    """The weights of one rank's vLLM model, changed by vLLM's layer-wise reload.

    After loading a checkpoint, vLLM transforms parameters (it packs, transposes or quantises them). A raw
    ``load_weights`` would write checkpoint rows into the transformed storage, so updates always use the reload, which
    restores a layer, loads it and transforms it again.
    """

    def __init__(self, model: nn.Module, model_config: "ModelConfig", device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self.layout = EngineLayout(model)
        self._arrived: set[str] = set()
        self.pending_bytes = 0
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
            if key not in self.layout.pieces and not self.layout.opaque:
                raise RuntimeError(f"weight sync: the rollout engine's model has no tensor {name!r}")
            self._arrived.add(key)
        bucket.reverse()
        self._model.load_weights(bucket.pop() for _ in range(len(bucket)))  # type: ignore[operator]
        self._own_pending()

    def finish(self) -> None:
        """Close all layers.

        Raises: RuntimeError naming tensors that did not arrive.
        """
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        missing = sorted(self.layout.pieces.keys() - self._arrived) + self._incomplete_opaque_layers()
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(f"weight sync: {len(missing)} tensors of the rollout's model are missing: {shown}")
        finalize_layerwise_reload(self._model, self._model_config)

    def abort(self) -> None:
        """Drop the tensors of unfinished layers; open layers stay open until the next ``begin`` and ``finish``."""
        for _, info in self._open_layers():
            info.loaded_weights.clear()
            info.load_numel = 0
        self.pending_bytes = 0

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every tensor whose place is known, read from the engine's parameters."""
        return _as_ints({key: tensor_checksum(piece.read()) for key, piece in self.layout.pieces.items()})

    def checksum_of_source(self, name: str, full: Tensor) -> tuple[str, Tensor] | None:
        """Return the entry that ``checksums`` must have for a full checkpoint tensor; None if its place is unknown."""
        key = self.layout.key(name)
        piece = self.layout.pieces.get(key)
        if piece is None:
            return None
        held = getattr(piece.module, piece.parameter)
        return key, tensor_checksum(piece.cut(full), held.dtype)

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


def _as_ints(sums: dict[str, Tensor]) -> dict[str, int]:
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
