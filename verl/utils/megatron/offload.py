"""Memory that an engine gives up between its turns: parameters, gradients and the state of the optimizer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.utils.device import get_torch_device
from verl.utils.megatron import cpu_support

cpu_support.install()

from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.optimizer.optimizer import FP32Optimizer  # noqa: E402

PARTS = ("model", "grad", "copies", "optimizer")
"""``copies`` are updated in the place of parameters of half precision; ``optimizer`` is these and the moments."""


@dataclass(frozen=True)
class _Away:
    """One storage that is empty on the device: its size, and its bytes on the host where they are needed again."""

    storage: torch.UntypedStorage
    size: int
    host: Tensor | None


class Offload:
    """The tensors of an engine in three parts, each on the device or away from it.

    Storages are emptied and filled again, so that whatever views them stays as it is: the buffers of Megatron-Core,
    the parameters cut out of them and the shards of the distributed optimizer. Gradients come back as zeros. On a CPU
    worker the bytes move between two places of the same memory.
    """

    def __init__(self, modules: Iterable[Any], optimizer: Any, device: torch.device) -> None:
        self._modules, self._optimizer, self._device = list(modules), optimizer, device
        self._away: dict[str, dict[int, _Away]] = {part: {} for part in PARTS}

    def is_away(self, part: str) -> bool:
        """Whether a part cannot be used."""
        return bool(self._away[part])

    def unload(self, part: str) -> None:
        """Free what a part holds on the device."""
        away = self._away[part]
        if away:
            return
        on_gpu = self._device.type != "cpu"
        for storage in self._storages(part):
            host = None
            if part != "grad":
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                host.untyped_storage().copy_(storage)
            away[storage._cdata] = _Away(storage, storage.nbytes(), host)
            storage.resize_(0)
        if on_gpu:
            get_torch_device().empty_cache()

    def load(self, part: str) -> None:
        """Bring a part back to the device."""
        for away in self._away[part].values():
            away.storage.resize_(away.size)
            if away.host is None:
                away.storage.fill_(0)
            else:
                away.storage.copy_(away.host.untyped_storage())
        self._away[part].clear()

    def value_of(self, parameter: Tensor) -> Tensor:
        """Return what a parameter holds, wherever it is."""
        away = self._away["model"].get(parameter.untyped_storage()._cdata)
        if away is None or away.host is None:
            return parameter.detach()
        empty = torch.empty(0, dtype=parameter.dtype)
        place = (parameter.storage_offset(), parameter.size(), parameter.stride())
        return empty.set_(away.host.untyped_storage(), *place)

    # ---- what the parts are

    def _storages(self, part: str) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of a part on the device, each once."""
        kinds = {"model": self._parameters, "grad": self._gradients, "copies": self._copies, "optimizer": self._states}
        tensors, seen = kinds[part](), set[int]()
        if part in ("copies", "optimizer"):  # it steps on views of parameters, and on copies of those of half precision
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
            if isinstance(module, DistributedDataParallel):  # whose ``buffers`` are its own, not those of a module
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    yield buffer.grad_data

    def _trained(self) -> Iterator[Tensor]:
        """Yield the parameters of the modules and of those that the optimizer knows."""
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
        """Yield moments and copies; counts of steps are read on the host."""
        yield from self._copies()
        for each in self._optimizers():
            for state in each.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())

    def _optimizers(self) -> Iterator[Any]:
        for each in getattr(self._optimizer, "chained_optimizers", ()):
            if not getattr(each, "is_stub_optimizer", False):
                yield each
