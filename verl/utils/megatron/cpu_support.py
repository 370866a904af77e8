"""Megatron-Core on CPU and gloo: every change to it that this needs, in one place; on CUDA nothing is done.

Megatron-Core 0.16 names the device ``cuda`` in its own source. ``install`` changes its modules as they are imported:
inside them, and nowhere else, ``torch`` is a proxy whose factories and ``cuda`` namespace mean the CPU. Each change
below says from which version on it is needed and when it can go. Checked with megatron-core 0.16.1 and torch 2.13.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from verl.utils.device import get_device_name

logger = logging.getLogger(__name__)

_PACKAGE = "megatron.core"
_CPU = torch.device("cpu")


def install() -> bool:
    """Prepare Megatron-Core for the CPU; returns whether anything was done, which is not so on an accelerator.

    Call it before the first import from ``megatron``; modules that are imported already are changed as well.
    """
    if get_device_name() != "cpu":
        return False
    if any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        return True
    sys.meta_path.insert(0, _PatchingFinder())
    for name, module in list(sys.modules.items()):
        if module is not None and _is_megatron(name):
            _patch(module)
    _accept_moves_to_cuda()
    return True


def _is_megatron(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Changes a module of Megatron-Core as soon as its code has run, before anyone imports names from it."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._searching or not _is_megatron(name):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then_patch(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _then_patch(execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    def exec_module(module: types.ModuleType) -> None:
        execute(module)
        _patch(module)

    return exec_module


def _patch(module: types.ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = _TORCH  # type: ignore[attr-defined]
    special = _SPECIAL.get(module.__name__.removeprefix(f"{_PACKAGE}."))
    if special is not None:
        special(module)


# torch as the modules of Megatron-Core see it. From 0.9 on; can go when they take the device from their configuration.


class _Nothing:
    """Stands for a stream or an event: there is one queue of work on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return hash(_Nothing)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _enter_nothing(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _CudaOnCpu(types.ModuleType):
    """``torch.cuda`` where the device is the CPU."""

    Stream = Event = _Nothing
    stream = device = staticmethod(_enter_nothing)
    synchronize = empty_cache = set_device = staticmethod(_do_nothing)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @staticmethod
    def current_stream(*args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _TorchOnCpu(types.ModuleType):
    """``torch`` with factories that make CPU tensors where CUDA ones are asked for."""

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
    """Let ``tensor.cuda()`` and ``module.cuda()`` return what they are called on: a CPU build can only raise there.

    From 0.9 on; can go with the proxy above.
    """

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let the optimizers of Megatron-Core, which look for ``torch.cuda.FloatTensor``, find CPU parameters.

    From 0.9 on, in ``optimizer.py`` and ``distrib_optimizer.py``; can go when they compare dtypes.
    """
    if get_device_name() != "cpu":
        yield
        return
    original = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


# Single modules


def _without_compiler(jit: types.ModuleType) -> None:
    """Leave fused functions uncompiled: a CPU worker needs no C++ compiler. From 0.9 on; can stay."""
    jit.disable_jit_fuser()


def _random_state_of_cpu(random: types.ModuleType) -> None:
    """Keep the CPU's generator where the GPU's is meant (dropout, recompute). From 0.9 on; can go with the proxy."""
    random._get_cuda_rng_state = _CudaOnCpu.get_rng_state  # type: ignore[attr-defined]
    random._set_cuda_rng_state = _CudaOnCpu.set_rng_state  # type: ignore[attr-defined]
    # A fork warns where the CPU's generator has drawn, which it is there for here.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _splits_on_host(dispatcher: types.ModuleType) -> None:
    """Give all-to-all the split sizes as numbers: tensors that are on the host already are not converted.

    From 0.12 on; can go when ``maybe_move_tensor_to_cpu`` converts host tensors as well.
    """

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _name_without_transformer_engine(moe_utils: types.ModuleType) -> None:
    """Define a name that the router reads and that only an import of Transformer Engine would define.

    0.16.1 only.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


_SPECIAL: dict[str, Callable[[types.ModuleType], None]] = {
    "jit": _without_compiler,
    "tensor_parallel.random": _random_state_of_cpu,
    "transformer.moe.token_dispatcher": _splits_on_host,
    "transformer.moe.moe_utils": _name_without_transformer_engine,
}
