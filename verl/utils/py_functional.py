"""Helpers on plain Python values."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeGuard, TypeVar, cast

import numpy as np

from verl.errors import ContractError
from verl.utils import envs
from verl.utils.import_utils import lazy_exports

if TYPE_CHECKING:
    from torch import Tensor

_FOR_FORKS = ("timeout_limit", "NestedNamespace", "convert_to_regular_types")
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.py_functional"))

P = ParamSpec("P")
T = TypeVar("T")


def run_in_context(
    func: Callable[P, T], context: Callable[P, AbstractContextManager[Callable[[Any], None]]]
) -> Callable[P, T]:
    """Wrap a sync or async function so that each call runs in a context.

    ``context`` gets the arguments of the call, and yields a function that gets the result.
    """

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with context(*args, **kwargs) as keep:
            result = func(*args, **kwargs)
            keep(result)
        return result

    @functools.wraps(func)
    async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        with context(*args, **kwargs) as keep:
            result = await func(*args, **kwargs)  # type: ignore[misc]  # a coroutine function
            keep(result)
        return result

    return cast(Callable[P, T], call_async if inspect.iscoroutinefunction(func) else call)


def deep_equal(a: Any, b: Any, _seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Compare two values recursively: containers, arrays and tensors by dtype, shape and element; NaN equals NaN.

    Containers may contain themselves.
    """
    if a is b:
        return True
    if _is_tensor(a) or _is_tensor(b):
        return _is_tensor(a) and _is_tensor(b) and tensors_equal(a, b)
    pair = (id(a), id(b))
    if pair in _seen:
        return True
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != object or b.dtype != object:
            return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
        return a.shape == b.shape and all(deep_equal(x, y, _seen | {pair}) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key], _seen | {pair}) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if isinstance(a, list) != isinstance(b, list) or len(a) != len(b):
            return False
        return all(deep_equal(x, y, _seen | {pair}) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)


def _is_tensor(value: Any) -> "TypeGuard[Tensor]":
    torch = sys.modules.get("torch")  # no tensor exists before torch is imported
    return torch is not None and isinstance(value, torch.Tensor)


def tensors_equal(a: "Tensor", b: "Tensor") -> bool:
    """Compare two tensors on any devices by dtype, shape and element; NaN equals NaN."""
    if a.dtype != b.dtype or a.layout != b.layout or a.is_nested != b.is_nested:
        return False
    if a.is_nested:  # each nested tensor has a unique symbol as ragged size, so only the parts are comparable
        return len(a.unbind()) == len(b.unbind()) and all(map(tensors_equal, a.unbind(), b.unbind()))
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a is b or (a.data_ptr() and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True  # a column by reference has no memory here
    if sys.modules["torch"].equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def object_array(values: Sequence[T]) -> np.ndarray:
    """Return a one-dim array of objects; lists of equal length stay lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def union_two_dict(dict1: dict[str, T], dict2: dict[str, T]) -> dict[str, T]:
    """Add the entries of ``dict2`` to ``dict1`` and return it.

    Raises: ValueError, which is also an AssertionError, when a shared key holds different values.
    """
    for key, value in dict2.items():
        if key in dict1 and not deep_equal(dict1[key], value):
            raise ContractError(f"key {key!r} holds different values in the two parts: {dict1[key]!r} and {value!r}")
    dict1.update(dict2)
    return dict1


def append_to_dict(data: dict[str, list[T]], new_data: Mapping[str, T | list[T]], prefix: str = "") -> None:
    """Append every value, or extend by every list, under its prefixed key."""
    for key, value in new_data.items():
        target = data.setdefault(f"{prefix}{key}", [])
        target.extend(value) if isinstance(value, list) else target.append(value)


class DynamicEnumMeta(type):
    """Give a ``DynamicEnum`` class access to its registered members, like an enum class."""

    _registry: "dict[str, DynamicEnum]"

    def __iter__(cls) -> "Iterator[DynamicEnum]":
        return iter(cls._registry.values())

    def __contains__(cls, item: object) -> bool:
        return item in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> "DynamicEnum":
        return cls._registry[name]

    def __len__(cls) -> int:
        return len(cls._registry)


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration that gets members at run time; members are pickled by name."""

    _registry: "dict[str, DynamicEnum]" = {}
    _next_value: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> "tuple[Callable[[str], DynamicEnum | None], tuple[str]]":
        return type(self).from_name, (self.name,)

    @classmethod
    def register(cls, name: str) -> "DynamicEnum":
        """Add a member.

        Raises: ValueError when the name is taken.
        """
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} is already registered")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        cls._next_value += 1
        setattr(cls, key, member)
        return member

    @classmethod
    def remove(cls, name: str) -> "DynamicEnum":
        """Remove a member and return it."""
        member = cls._registry.pop(name.upper())
        delattr(cls, name.upper())
        return member

    @classmethod
    def from_name(cls, name: str) -> "DynamicEnum | None":
        """Return the member of a name in any case, or None."""
        return cls._registry.get(name.upper())


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable within a block."""
    before = envs.read(key)
    envs.write({key: value})
    try:
        yield
    finally:
        if before is None:
            envs.remove(key)
        else:
            envs.write({key: before})
