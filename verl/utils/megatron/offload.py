"""Offload of a Megatron engine's parameters, gradients and optimizer state to the host between its turns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.utils.device import get_torch_device
from verl.utils.megatron import cpu_support

cpu_support.install()

from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer  # noqa: E402

PARTS = ("model", "grad", "copies", "optimizer")
"""``copies`` are the fp32 copies of half-precision parameters; ``optimizer`` holds these and the moments."""


@dataclass(frozen=True)
class _Away:
    """One storage that is empty on the device: its size, and its bytes on the host if it will be restored."""

    storage: torch.UntypedStorage
    size: int
    host: Tensor | None


class Offload:
    """The tensors of an engine in ``PARTS``, each part either on the device or on the host.

    Megatron-Core keeps parameters and gradients in large buffers. Parameters, and the shards of the distributed
    optimizer, are views of them. Moving the tensors would break these views, so the storages under them are resized to
    zero and later filled again. Gradients come back as zeros. On a CPU worker the bytes move within the host memory.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizer: MegatronOptimizer | None, device: torch.device) -> None:
        self._modules = list(modules)
        self._optimizer = optimizer
        self._device = device
        self._away: dict[str, dict[int, _Away]] = {part: {} for part in PARTS}

    def is_away(self, part: str) -> bool:
        """Whether a part is on the host."""
        return bool(self._away[part])

    def unload(self, part: str) -> None:
        """Move a part to the host and free its device memory."""
        away = self._away[part]
        if away:
            return
        on_gpu = self._device.type != "cpu"
        for storage in self._storages(part):
            host = None
            if part != "grad":
                # Views of several dtypes may share a storage, so it moves as bytes.
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                host.untyped_storage().copy_(storage)
            # The address of the storage object stays the same while its memory is gone, so it is the key.
            away[storage._cdata] = _Away(storage, storage.nbytes(), host)
            storage.resize_(0)
        if on_gpu:
            get_torch_device().empty_cache()

    def load(self, part: str) -> None:
        """Bring a part back to the device."""
        for away in self._away[part].values():
            away.storage.resize_(away.size)
            if away.host is None:
                away.storage.fill_(0)  # type: ignore[attr-defined]  # torch's stubs lack it
            else:
                away.storage.copy_(away.host.untyped_storage())
        self._away[part].clear()

    def value_of(self, parameter: Tensor) -> Tensor:
        """Return the value of a parameter, from the host if it is offloaded."""
        away = self._away["model"].get(parameter.untyped_storage()._cdata)
        if away is None or away.host is None:
            return parameter.detach()
        # The parameter's own place in its storage, on the bytes of the host.
        empty = torch.empty(0, dtype=parameter.dtype)
        place = (parameter.storage_offset(), parameter.size(), parameter.stride())
        return empty.set_(away.host.untyped_storage(), *place)

    # ---- the tensors of each part

    def _storages(self, part: str) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of a part on the device, each once."""
        kinds = {"model": self._parameters, "grad": self._gradients, "copies": self._copies, "optimizer": self._states}
        tensors = kinds[part]()
        seen = set[int]()
        if part in ("copies", "optimizer"):  # param_groups mix fp32 copies with views of parameters: skip the latter
            seen.update(tensor.untyped_storage()._cdata for tensor in self._trained())
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield storage

    def _parameters(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from module.parameters()

    def _gradients(self) -> Iterator[Tensor]:
        for module in self._modules:
            if isinstance(module, DistributedDataParallel):  # here ``buffers`` is a list of gradient buffers
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    yield buffer.grad_data

    def _trained(self) -> Iterator[Tensor]:
        """Yield the parameters of the modules and of the optimizer's modules."""
        yield from self._parameters()
        for each in self._optimizers():
            for chunk in getattr(each, "model_chunks", ()):
                yield from chunk.parameters()
            for group in (*getattr(each, "float16_groups", ()), *getattr(each, "fp32_from_fp32_groups", ())):
                yield from group
            if isinstance(each, FP32Optimizer):
                yield from each.get_parameters()

    def _copies(self) -> Iterator[Tensor]:
        for each in self._optimizers():
            for group in each.param_groups:
                yield from group["params"]

    def _states(self) -> Iterator[Tensor]:
        """Yield moments and copies; step counters are scalars and stay."""
        yield from self._copies()
        for each in self._optimizers():
            for state in each.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())

    def _optimizers(self) -> Iterator[MegatronOptimizer]:
        for each in getattr(self._optimizer, "chained_optimizers", ()):
            if not getattr(each, "is_stub_optimizer", False):
                yield each
