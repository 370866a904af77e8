"""Which methods of a worker can be called through its group, and how arguments are split and outputs merged."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from verl.protocol import DataProto, DataProtoFuture, _padding_size_key
from verl.single_controller.base import layout
from verl.utils.py_functional import DynamicEnum
from verl.utils.ray_utils import parallel_put

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

P = ParamSpec("P")
T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
DispatchFn = Callable[..., tuple[Args, Kwargs]]
CollectFn = Callable[..., Any]

MAGIC_ATTR = "attrs_3141562937"
"""The attribute that marks a method as callable through a worker group."""


class Dispatch(DynamicEnum):
    """How the arguments of a call are split among the workers and their outputs merged."""

    RANK_ZERO: "Dispatch"
    ONE_TO_ALL: "Dispatch"
    ALL_TO_ALL: "Dispatch"
    DP_COMPUTE: "Dispatch"
    DP_COMPUTE_PROTO: "Dispatch"
    DP_COMPUTE_PROTO_WITH_FUNC: "Dispatch"
    DP_COMPUTE_METRIC: "Dispatch"
    DIRECT_ROLLOUT_METHOD: "Dispatch"
    MEGATRON_COMPUTE: "Dispatch"
    MEGATRON_PP_AS_DP: "Dispatch"
    MEGATRON_COMPUTE_PROTO: "Dispatch"
    MEGATRON_PP_AS_DP_PROTO: "Dispatch"


class Execute(DynamicEnum):
    """Which workers run a call."""

    ALL: "Execute"
    RANK_ZERO: "Execute"


for _name in (
    "RANK_ZERO",
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
    "MEGATRON_COMPUTE",
    "MEGATRON_PP_AS_DP",
    "MEGATRON_COMPUTE_PROTO",
    "MEGATRON_PP_AS_DP_PROTO",
):
    Dispatch.register(_name)
for _name in ("ALL", "RANK_ZERO"):
    Execute.register(_name)


class DispatchError(ValueError, AssertionError):
    """Arguments or a dispatch mode do not have the form that dispatch needs."""


# ---- splitting


def _is_batch(value: Any) -> bool:
    return isinstance(value, DataProto | DataProtoFuture)


def _check_batches(args: Args, kwargs: Kwargs) -> None:
    for name, value in (*enumerate(args), *kwargs.items()):
        if not _is_batch(value):
            raise DispatchError(
                f"argument {name!r} must be a DataProto or a DataProtoFuture, got {type(value).__name__}"
            )


def _pad_size(chunks: int, values: Sequence[Any]) -> int:
    """Return how many rows to append to every batch; 0 where none asks for padding."""
    if not any(isinstance(value, DataProto) and value.is_padding_enabled() for value in values):
        return 0
    lengths = {len(value) for value in values if isinstance(value, DataProto)}
    if len(lengths) > 1:
        raise DispatchError(f"batches that are padded must have the same number of rows, got {sorted(lengths)}")
    return -lengths.pop() % chunks


def _split_batches(chunks: int, args: Args, kwargs: Kwargs) -> tuple[tuple[list[Any], ...], dict[str, list[Any]]]:
    """Cut every batch into ``chunks`` parts; padded where that is enabled, with the count under the private key."""
    _check_batches(args, kwargs)
    pad = _pad_size(chunks, (*args, *kwargs.values()))

    def split(value: Any) -> list[Any]:
        if pad and isinstance(value, DataProto):
            rows = [*range(len(value)), *(i % len(value) for i in range(pad))]
            value = value.select_idxs(rows)
        parts: list[Any] = value.chunk(chunks)
        return parts

    split_args = tuple(split(value) for value in args)
    split_kwargs = {key: split(value) for key, value in kwargs.items()}
    if pad:
        split_kwargs[_padding_size_key] = pad  # type: ignore[assignment]  # a count, taken out again by the caller
    return split_args, split_kwargs


def dispatch_one_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    """Give every worker the same arguments."""
    size = worker_group.world_size
    return tuple([arg] * size for arg in args), {key: [value] * size for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    """Leave the arguments as they are; the executor spreads lists with one element per worker."""
    return args, kwargs


def dispatch_dp_compute(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    """Take arguments that are split already.

    Raises: ValueError, which is also an AssertionError, when one is no list or tuple with one element per worker.
    """
    size = worker_group.world_size
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, list | tuple) or len(value) != size:
            raise DispatchError(f"argument {name!r} must be a list or tuple of {size} elements, one per worker")
    return tuple(list(arg) for arg in args), {key: list(value) for key, value in kwargs.items()}


def dispatch_dp_compute_data_proto(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    """Cut every batch into one part per worker."""
    return _split_batches(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> tuple[Args, Kwargs]:
    """Give every worker the function that is the first argument, and its part of the batches after it."""
    if not args or not inspect.isfunction(args[0]):
        raise DispatchError(
            f"the first argument must be a plain function, got {type(args[0]).__name__ if args else 'none'}"
        )
    parts, split_kwargs = _split_batches(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *parts), split_kwargs


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> tuple[Args, Kwargs]:
    """Hand the parts of every argument, one per data-parallel rank, to the workers of that rank.

    Workers of one data-parallel rank share one object in the store.
    """
    padding = {key: kwargs.pop(key) for key in (_padding_size_key,) if key in kwargs}

    def spread(name: Any, parts: Any) -> list[Any]:
        if not isinstance(parts, list | tuple) or len(parts) != dp_size:
            raise DispatchError(f"argument {name!r} must be a list or tuple of {dp_size} parts")
        shared = parallel_put(list(parts)) if all(isinstance(part, DataProto) for part in parts) else parts
        return [shared[dp_rank] for dp_rank in dp_rank_mapping]

    all_args = tuple(spread(position, parts) for position, parts in enumerate(args))
    return all_args, {**{key: spread(key, parts) for key, parts in kwargs.items()}, **padding}


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> tuple[Args, Kwargs]:
    """Cut every batch into one part per data-parallel rank and hand them to the workers of that rank."""
    parts, split_kwargs = _split_batches(dp_size, args, kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *parts, **split_kwargs)


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: "WorkerGroup", *args: Any, **kwargs: Any
) -> tuple[Args, Kwargs]:
    """Dispatch over a mesh that the workers have registered; they are asked once, and before they are busy."""
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    mapping = worker_group._dispatch_info[mesh_name]
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def _by_layout(
    split: Callable[..., tuple[Args, Kwargs]], parts: Callable[["WorkerGroup"], tuple[list[int], int]]
) -> DispatchFn:
    """Return a dispatch that splits over ``parts`` of the layout that workers on Megatron-Core report."""

    def dispatch(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        return split(*parts(worker_group), worker_group, *args, **kwargs)

    return dispatch


def _dispatch_forbidden(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
    raise NotImplementedError("a method in mode DIRECT_ROLLOUT_METHOD is called on the actor itself, not by the driver")


# ---- collecting


def collect_all_to_all(worker_group: "WorkerGroup", output: Any) -> Any:
    """Return the list of outputs."""
    return output


def collect_dp_compute(worker_group: "WorkerGroup", output: list[Any]) -> list[Any]:
    """Return the list of outputs, one per worker."""
    if len(output) != worker_group.world_size:
        raise DispatchError(f"expected {worker_group.world_size} outputs, got {len(output)}")
    return output


def _join(worker_group: "WorkerGroup", outputs: list[Any]) -> Any:
    import ray

    if all(isinstance(item, DataProto) for item in outputs):
        return DataProto.concat(outputs)
    if all(isinstance(item, ray.ObjectRef) for item in outputs):
        return DataProtoFuture.concat(outputs)
    raise DispatchError(f"outputs must be DataProto, got {sorted({type(item).__name__ for item in outputs})}")


def collect_dp_compute_data_proto(worker_group: "WorkerGroup", output: list[Any]) -> Any:
    """Concatenate the outputs, or return a future of that when they are not there yet."""
    return _join(worker_group, collect_dp_compute(worker_group, output))


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]) -> list[Any]:
    """Keep the outputs of the ranks that the mask names, in rank order."""
    return [item for item, keep in zip(collect_dp_compute(worker_group, output), collect_mask, strict=True) if keep]


def collect_nd_compute_dataproto(collect_mask: Sequence[bool], worker_group: "WorkerGroup", output: list[Any]) -> Any:
    """Concatenate the outputs of the ranks that the mask names."""
    return _join(worker_group, collect_nd_compute(collect_mask, worker_group, output))


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Any:
    """Collect over a mesh that the workers have registered; they are asked once."""
    if mesh_name not in worker_group._collect_info:
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    return collect_nd_compute_dataproto(worker_group._collect_info[mesh_name], worker_group, *args, **kwargs)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a ``dispatch_mode`` that follows the device mesh of that name."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def _of_layout(join: CollectFn, mask: Callable[["WorkerGroup"], list[bool]]) -> CollectFn:
    """Return a collection of the outputs of those workers on Megatron-Core that ``mask`` names."""

    def collect(worker_group: "WorkerGroup", output: list[Any]) -> Any:
        return join(mask(worker_group), worker_group, output)

    return collect


# ---- the tables


_DISPATCH_FNS: dict[DynamicEnum, tuple[DispatchFn, CollectFn]] = {
    Dispatch.ONE_TO_ALL: (dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: (dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: (dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: (dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: (dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: (dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: (_dispatch_forbidden, _dispatch_forbidden),
    Dispatch.MEGATRON_COMPUTE: (
        _by_layout(dispatch_nd_compute, layout.data_parallel_map),
        _of_layout(collect_nd_compute, layout.output_mask),
    ),
    Dispatch.MEGATRON_COMPUTE_PROTO: (
        _by_layout(dispatch_nd_compute_dataproto, layout.data_parallel_map),
        _of_layout(collect_nd_compute_dataproto, layout.output_mask),
    ),
    Dispatch.MEGATRON_PP_AS_DP: (
        _by_layout(dispatch_nd_compute, layout.pipeline_as_data_map),
        _of_layout(collect_nd_compute, layout.pipeline_as_data_mask),
    ),
    Dispatch.MEGATRON_PP_AS_DP_PROTO: (
        _by_layout(dispatch_nd_compute_dataproto, layout.pipeline_as_data_map),
        _of_layout(collect_nd_compute_dataproto, layout.pipeline_as_data_mask),
    ),
}


def get_predefined_dispatch_fn(dispatch_mode: DynamicEnum) -> dict[str, Callable[..., Any]]:
    """Return ``dispatch_fn`` and ``collect_fn`` of a mode.

    Raises: ValueError, which is also an AssertionError, for a mode without functions.
    """
    if dispatch_mode not in _DISPATCH_FNS:
        raise DispatchError(f"{dispatch_mode!r} has no dispatch function; known are {[m.name for m in _DISPATCH_FNS]}")
    dispatch_fn, collect_fn = _DISPATCH_FNS[dispatch_mode]
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a mode by name.

    Raises: ValueError, which is also an AssertionError, when the name is taken.
    """
    if dispatch_mode_name.upper() in Dispatch.names():
        raise DispatchError(f"dispatch mode {dispatch_mode_name!r} exists already; use update_dispatch_mode")
    _DISPATCH_FNS[Dispatch.register(dispatch_mode_name)] = (dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: DynamicEnum, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the functions of a mode."""
    if not isinstance(dispatch_mode, Dispatch) or dispatch_mode not in _DISPATCH_FNS:
        raise DispatchError(f"{dispatch_mode!r} is not a dispatch mode with functions; use register_dispatch_mode")
    _DISPATCH_FNS[dispatch_mode] = (dispatch_fn, collect_fn)


def get_predefined_execute_fn(execute_mode: DynamicEnum) -> dict[str, str]:
    """Return the name of the group's method that runs a mode, under ``execute_fn_name``."""
    names: dict[DynamicEnum, str] = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}
    return {"execute_fn_name": names[execute_mode]}


# ---- registration


def _check_modes(dispatch_mode: Any, execute_mode: Any) -> None:
    if isinstance(dispatch_mode, Mapping):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        if missing:
            raise DispatchError(f"a dispatch_mode dict needs dispatch_fn and collect_fn, {sorted(missing)} missing")
    elif not isinstance(dispatch_mode, Dispatch):
        raise DispatchError(f"dispatch_mode must be a Dispatch member or a dict, got {dispatch_mode!r}")
    if not isinstance(execute_mode, Execute):
        raise DispatchError(f"execute_mode must be an Execute member, got {execute_mode!r}")


_FUTURE_KEY = "_future_value_x7261_"


def attach_future_values(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Make the references inside of futures arguments of their own, which are there before the call starts.

    A worker that waited itself would block its event loop, where it has one, and with it the results that its peers
    wait for.
    """
    values: dict[str, Any] = {}

    def detached(value: Any) -> Any:
        if not isinstance(value, DataProtoFuture):
            return value
        names = [f"{_FUTURE_KEY}{len(values) + number}" for number in range(len(value.futures))]
        values.update(zip(names, value.futures, strict=True))
        return replace(
            value, futures=cast(list[Any], names), wait_fn=None
        )  # names, until the worker puts the values in

    args = tuple(map(detached, args))
    kwargs = {key: detached(value) for key, value in kwargs.items()}
    return args, {**kwargs, **values}


def _take_future_values(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Undo ``attach_future_values`` on the worker, where the references have become values."""
    values = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith(_FUTURE_KEY)}

    def attached(value: Any) -> Any:
        if not values or not isinstance(value, DataProtoFuture):
            return value
        return replace(value, futures=[values[cast(str, name)] for name in value.futures])

    return tuple(map(attached, args)), {key: attached(value) for key, value in kwargs.items()}


def _materialize_futures(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    def value_of(value: Any) -> Any:
        return value.get() if isinstance(value, DataProtoFuture) else value

    return tuple(map(value_of, args)), {key: value_of(value) for key, value in kwargs.items()}


@contextmanager
def _counted(method: str, args: Args) -> Iterator[None]:
    """Add the seconds of a call to those that its worker, the first argument, counts by method."""
    start = time.perf_counter()
    try:
        yield
    finally:
        counts = getattr(args[0], "seconds_by_call", None) if args else None
        if counts is not None:
            counts[method] = counts.get(method, 0.0) + time.perf_counter() - start


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method of a worker, sync or async, callable through its worker group.

    Args: ``dispatch_mode`` is a ``Dispatch`` member or a dict of ``dispatch_fn`` and ``collect_fn``; with ``blocking``
    the driver waits for the outputs; with ``materialize_futures`` the worker replaces futures by their values.

    Raises: ValueError, which is also an AssertionError, for other modes.
    """
    _check_modes(dispatch_mode, execute_mode)

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _take_future_values(args, kwargs)
            if materialize_futures:
                args, kwargs = _materialize_futures(args, kwargs)
            with _counted(func.__name__, args):
                return func(*args, **kwargs)

        @wraps(func)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _take_future_values(args, kwargs)
            if materialize_futures:
                args, kwargs = _materialize_futures(args, kwargs)
            with _counted(func.__name__, args):
                return await func(*args, **kwargs)  # type: ignore[misc]  # a coroutine function

        wrapper: Any = call_async if inspect.iscoroutinefunction(func) else call
        attrs = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}
        setattr(wrapper, MAGIC_ATTR, attrs)
        registered: Callable[P, T] = wrapper
        return registered

    return decorate


__all__ = [
    "MAGIC_ATTR",
    "Dispatch",
    "DispatchError",
    "Execute",
    "attach_future_values",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
