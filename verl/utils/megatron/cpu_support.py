"""All patches of Megatron-Core for CPU and gloo, and one for any device without Transformer Engine.

Megatron-Core 0.16 hard-codes the device ``cuda``. ``install`` patches its modules as they are imported: inside them,
and nowhere else, the name ``torch`` is a proxy whose factories and ``cuda`` namespace mean the CPU. This way the same
engine code runs on a laptop, and no other library sees the proxy. Each patch states from which version on it is needed
and when to remove it. Tested with megatron-core 0.16.1 and torch 2.13.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from verl.utils.device import get_device_name

logger = logging.getLogger(__name__)

_PACKAGE = "megatron.core"
_CPU = torch.device("cpu")

P = ParamSpec("P")
Movable = TypeVar("Movable", torch.Tensor, torch.nn.Module)
Option = torch.device | torch.dtype | torch.memory_format | str | int | None
"""An argument of a function of torch that moves, converts or names a device."""


def install() -> bool:
    """Prepare Megatron-Core for this machine; return whether it is prepared for the CPU.

    Call it before the first import from ``megatron``. Modules that are already imported are patched as well.
    """
    on_cpu = get_device_name() == "cpu"
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return on_cpu
    sys.meta_path.insert(0, _PatchingFinder())
    for name, module in list(sys.modules.items()):
        if module is not None and _is_megatron(name):
            _patch(module)
    if on_cpu:
        _accept_moves_to_cuda()
    return on_cpu


def _is_megatron(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Patch a module of Megatron-Core right after its code has run, before another module imports its names."""

    _searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._searching or not _is_megatron(name):
            return None
        # ``find_spec`` asks all finders, this one too.
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(module: types.ModuleType) -> None:
    on_cpu = get_device_name() == "cpu"
    if on_cpu and getattr(module, "torch", None) is torch:
        module.torch = _TORCH  # type: ignore[attr-defined]
    special = (_SPECIAL if on_cpu else _ANYWHERE).get(module.__name__.removeprefix(f"{_PACKAGE}."))
    if special is not None:
        special(module)


# The proxy of torch. Needed from 0.9 on; remove it when Megatron-Core takes the device from its configuration.


class _Nothing:
    """Stand in for a stream or an event: a CPU has a single queue of work."""

    def __init__(self, *args: Option, **kwargs: Option) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_Nothing"]:
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return hash(_Nothing)


def _do_nothing(*args: Option, **kwargs: Option) -> None:
    return None


class _CudaOnCpu(types.ModuleType):
    """``torch.cuda`` on a CPU."""

    Stream = Event = current_stream = default_stream = _Nothing
    stream = device = contextlib.nullcontext
    synchronize = empty_cache = set_device = staticmethod(_do_nothing)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    manual_seed = staticmethod(torch.manual_seed)

    @staticmethod
    def get_rng_state(*args: Option, **kwargs: Option) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Option, **kwargs: Option) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    def make(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        # Pinned memory needs a driver of CUDA.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _TorchOnCpu(types.ModuleType):
    """``torch`` with factories that return CPU tensors for ``device="cuda"``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_CUDA = _CudaOnCpu("torch.cuda")
_CUDA.random = _CUDA  # type: ignore[attr-defined]
_TORCH = _TorchOnCpu("torch")
_TORCH.cuda = _CUDA  # type: ignore[attr-defined]
for _name in (
    "zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "as_tensor", "empty_strided",
    "zeros_like", "ones_like", "empty_like", "full_like",
):  # fmt: skip
    setattr(_TORCH, _name, _on_cpu(getattr(torch, _name)))


def _accept_moves_to_cuda() -> None:
    """Make ``tensor.cuda()`` and ``module.cuda()`` return their object; a CPU build would raise.

    Needed from 0.9 on; remove it together with the proxy.
    """

    def stay(self: Movable, *args: Option, **kwargs: Option) -> Movable:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let Megatron-Core's optimizers, which look for ``torch.cuda.FloatTensor``, find CPU parameters.

    Needed from 0.9 on, in ``optimizer.py`` and ``distrib_optimizer.py``; remove it when they compare dtypes.
    """
    if get_device_name() != "cpu":
        yield
        return
    original = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Option, **kwargs: Option) -> str | torch.Tensor:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


# Single modules


def _without_compiler(jit: types.ModuleType) -> None:
    """Leave fused functions uncompiled, because a CPU worker may have no C++ compiler. From 0.9 on; may stay."""
    jit.disable_jit_fuser()


def _random_state_of_cpu(random: types.ModuleType) -> None:
    """Use the CPU's random generator in place of the GPU's (dropout, recompute). From 0.9 on; goes with the proxy."""
    get_from_gpu = random._get_cuda_rng_state
    set_on_gpu = random._set_cuda_rng_state

    def get_state(
        device: Option = "cuda", clone: bool = False, graph_safe: bool = False, **more: Option
    ) -> torch.Tensor:
        return get_from_gpu(device, clone, graph_safe, **more) if more else torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Option = -1, graph_safe: bool = False, **more: Option) -> None:
        set_on_gpu(new_state, device, graph_safe, **more) if more else torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state  # type: ignore[attr-defined]
    # Megatron-Core warns when the CPU's generator has advanced inside a fork, which is intended here.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _splits_on_host(dispatcher: types.ModuleType) -> None:
    """Give all-to-all its split sizes as numbers; Megatron-Core does not convert tensors that are already on the host.

    Needed from 0.12 on; remove it when ``maybe_move_tensor_to_cpu`` converts host tensors as well.
    """

    move = dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False, **more: Any) -> Any:
        if more:
            return move(tensor, as_numpy, record_stream, **more)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _name_without_transformer_engine(moe_utils: types.ModuleType) -> None:
    """Define a name that the router reads but only an import of Transformer Engine defines.

    0.16.1 only.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


_ANYWHERE: dict[str, Callable[[types.ModuleType], None]] = {
    "transformer.moe.moe_utils": _name_without_transformer_engine,
}
_SPECIAL = _ANYWHERE | {
    "jit": _without_compiler,
    "tensor_parallel.random": _random_state_of_cpu,
    "transformer.moe.token_dispatcher": _splits_on_host,
}
