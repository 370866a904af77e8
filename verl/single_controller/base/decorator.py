"""Register the methods of a worker that its group can call, and say how arguments are split and outputs merged."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypedDict, TypeVar, cast

from verl.errors import ContractError
from verl.protocol import DataProto, DataProtoFuture, _padding_size_key
from verl.protocol.lazy import BY_REFERENCE, by_reference, fetched
from verl.single_controller.base.actor import Actor
from verl.utils.faults import fault_point
from verl.utils.observe import timeline
from verl.utils.py_functional import DynamicEnum
from verl.utils.ray_utils import parallel_put

if TYPE_CHECKING:
    from ray import ObjectRef

P = ParamSpec("P")
T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Batch = DataProto | DataProtoFuture
DispatchFn = Callable[..., tuple[Args, Kwargs]]
CollectFn = Callable[..., Any]

MAGIC_ATTR = "attrs_3141562937"
"""The attribute that marks a method as callable through a worker group."""


@dataclass
class DistRankInfo:
    """The place of a worker on each axis of its parallel layout."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """The size of each axis of a parallel layout."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class DispatchGroup:
    """The part of a worker group that dispatch reads; it caches the mesh coordinates that the workers report.

    Each registered method of the workers becomes a method of the group at run time.
    """

    def __init__(self) -> None:
        self._workers: list[Actor] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._megatron_layout: tuple[list[DistRankInfo], DistGlobalInfo] | None = None

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing names only. It also tells type checkers that methods are bound at run time.
        raise AttributeError(f"{type(self).__name__} has no method {name!r}: register it on the worker's class")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)


class DispatchFns(TypedDict):
    """The two functions of a dispatch mode."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


class MethodAttrs(TypedDict):
    """The arguments of ``register``, as they are kept under ``MAGIC_ATTR``."""

    dispatch_mode: "Dispatch | DispatchFns"
    execute_mode: "Execute"
    blocking: bool


class Dispatch(DynamicEnum):
    """The rule by which a call's arguments are split among the workers and their outputs merged."""

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
    """The workers that run a call."""

    ALL: "Execute"
    RANK_ZERO: "Execute"


for _modes in (Dispatch, Execute):
    for _name in _modes.__annotations__:
        _modes.register(_name)


def _fns(dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchFns:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


# ---- splitting


def _pad_size(chunks: int, values: Sequence[Batch]) -> int:
    """Return how many rows to append to every batch; 0 if no batch enables padding."""
    batches = [value for value in values if isinstance(value, DataProto)]
    if not any(batch.is_padding_enabled() for batch in batches):
        return 0
    lengths = {len(batch) for batch in batches}
    if len(lengths) > 1:
        raise ContractError(f"batches that are padded must have the same number of rows, got {sorted(lengths)}")
    return -lengths.pop() % chunks


def _split_batches(
    chunks: int, args: Sequence[Batch], kwargs: Mapping[str, Batch]
) -> tuple[tuple[list[Batch], ...], dict[str, list[Batch]], dict[str, int]]:
    """Cut every batch into ``chunks`` parts, padded if a batch enables that.

    Returns: the parts of args and kwargs, and the keyword that tells the caller how many rows were appended.
    """
    for name, batch in (*enumerate(args), *kwargs.items()):
        if not isinstance(batch, DataProto | DataProtoFuture):
            raise ContractError(f"argument {name!r} must be a DataProto or DataProtoFuture, got {type(batch).__name__}")
    pad = _pad_size(chunks, (*args, *kwargs.values()))

    def split(value: Batch) -> list[Batch]:
        if pad and isinstance(value, DataProto):
            # Copies of real rows keep every shape and dtype valid for the workers; the caller drops their outputs.
            value = value.select_idxs([*range(len(value)), *(i % len(value) for i in range(pad))])
        return list(value.chunk(chunks))

    split_args = tuple(split(value) for value in args)
    split_kwargs = {key: split(value) for key, value in kwargs.items()}
    return split_args, split_kwargs, {_padding_size_key: pad} if pad else {}


def dispatch_one_to_all(worker_group: DispatchGroup, *args: T, **kwargs: T) -> tuple[Args, Kwargs]:
    """Give every worker the same arguments."""
    size = worker_group.world_size
    return tuple([arg] * size for arg in args), {key: [value] * size for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: DispatchGroup, *args: T, **kwargs: T) -> tuple[Args, Kwargs]:
    """Pass the arguments through; the executor spreads lists with one element per worker."""
    return args, kwargs


def dispatch_dp_compute(worker_group: DispatchGroup, *args: Sequence[T], **kwargs: Sequence[T]) -> tuple[Args, Kwargs]:
    """Take arguments that the caller has split.

    Raises: ValueError, which is also an AssertionError, unless each is a list or tuple with one element per worker.
    """
    size = worker_group.world_size
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, list | tuple) or len(value) != size:
            raise ContractError(f"argument {name!r} must be a list or tuple of {size} elements, one per worker")
    return tuple(list(arg) for arg in args), {key: list(value) for key, value in kwargs.items()}


def dispatch_dp_compute_data_proto(worker_group: DispatchGroup, *args: Batch, **kwargs: Batch) -> tuple[Args, Kwargs]:
    """Cut every batch into one part per worker."""
    parts, split_kwargs, padding = _split_batches(worker_group.world_size, args, kwargs)
    return parts, {**split_kwargs, **padding}


def dispatch_dp_compute_data_proto_with_func(
    worker_group: DispatchGroup, *args: Any, **kwargs: Batch
) -> tuple[Args, Kwargs]:
    """Give every worker the function, which is the first argument, and a part of each batch."""
    if not args or not inspect.isfunction(args[0]):
        raise ContractError(
            f"the first argument must be a plain function, got {type(args[0]).__name__ if args else 'none'}"
        )
    parts, split_kwargs = dispatch_dp_compute_data_proto(worker_group, *args[1:], **kwargs)
    return ([args[0]] * worker_group.world_size, *parts), split_kwargs


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: DispatchGroup, *args: Sequence[T], **kwargs: Sequence[T]
) -> tuple[Args, Kwargs]:
    """Hand the parts of every argument, one per data-parallel rank, to the workers of that rank.

    Workers of one data-parallel rank share one object in the store.
    """

    def spread(name: int | str, parts: "Sequence[T | ObjectRef[T]]") -> "list[T | ObjectRef[T]]":
        if not isinstance(parts, list | tuple) or len(parts) != dp_size:
            raise ContractError(f"argument {name!r} must be a list or tuple of {dp_size} parts")
        if all(isinstance(part, DataProto) for part in parts):
            # Workers of one data-parallel rank get the reference to one stored object: without it Ray would pickle the
            # part once for each of them.
            parts = parallel_put(list(parts))
        return [parts[dp_rank] for dp_rank in dp_rank_mapping]

    spread_args = tuple(spread(position, parts) for position, parts in enumerate(args))
    return spread_args, {key: spread(key, parts) for key, parts in kwargs.items()}


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: DispatchGroup, *args: Batch, **kwargs: Batch
) -> tuple[Args, Kwargs]:
    """Cut every batch into one part per data-parallel rank and hand them to the workers of that rank."""
    parts, split_kwargs, padding = _split_batches(dp_size, args, kwargs)
    spread_args, spread_kwargs = dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *parts, **split_kwargs)
    return spread_args, {**spread_kwargs, **padding}


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: DispatchGroup, *args: Batch, **kwargs: Batch
) -> tuple[Args, Kwargs]:
    """Dispatch over a mesh that the workers have registered.

    The workers are asked once, for both tables, before the call: a busy worker would answer only after it.
    """
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    mapping = worker_group._dispatch_info[mesh_name]
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def _call_forbidden(worker_group: DispatchGroup, *args: T, **kwargs: T) -> NoReturn:
    raise NotImplementedError("the driver cannot call a method in mode DIRECT_ROLLOUT_METHOD: call it on the actor")


# ---- collecting


def collect_all_to_all(worker_group: DispatchGroup, output: T) -> T:
    """Return the list of outputs."""
    return output


def collect_dp_compute(worker_group: DispatchGroup, output: list[T]) -> list[T]:
    """Return the list of outputs, one per worker."""
    if len(output) != worker_group.world_size:
        raise ContractError(f"expected {worker_group.world_size} outputs, got {len(output)}")
    return output


def _join(outputs: "list[Any]") -> Batch:
    """Concatenate batches, or return a future of references to batches."""
    import ray

    if all(isinstance(item, DataProto) for item in outputs):
        return DataProto.concat(outputs)
    if all(isinstance(item, ray.ObjectRef) for item in outputs):
        return DataProtoFuture.concat(outputs)
    raise ContractError(f"outputs must be DataProto, got {sorted({type(item).__name__ for item in outputs})}")


def collect_dp_compute_data_proto(worker_group: DispatchGroup, output: list[T]) -> Batch:
    """Concatenate the outputs; return a future of that if the call is still running."""
    return _join(collect_dp_compute(worker_group, output))


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: DispatchGroup, output: list[T]) -> list[T]:
    """Keep the outputs of the marked ranks, in rank order."""
    return [item for item, keep in zip(collect_dp_compute(worker_group, output), collect_mask, strict=True) if keep]


def collect_nd_compute_dataproto(collect_mask: Sequence[bool], worker_group: DispatchGroup, output: list[T]) -> Batch:
    """Concatenate the outputs of the marked ranks."""
    return _join(collect_nd_compute(collect_mask, worker_group, output))


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: DispatchGroup, output: list[T]) -> Batch:
    """Collect over a mesh that the workers have registered; ask them once."""
    if mesh_name not in worker_group._collect_info:
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    return collect_nd_compute_dataproto(worker_group._collect_info[mesh_name], worker_group, output)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchFns:
    """Return a ``dispatch_mode`` that follows the device mesh of that name."""
    collect_fn = partial(collect_lazy_compute_data_proto, mesh_name)
    return _fns(partial(dispatch_lazy_compute_data_proto, mesh_name), collect_fn)


# ---- the layout that Megatron-Core workers report, for roles that register no mesh


class Split(NamedTuple):
    """The part of each worker, the number of parts, and the workers whose outputs are collected."""

    parts: list[int]
    num_parts: int
    collected: list[bool]


def layout_of(worker_group: DispatchGroup) -> tuple[list[DistRankInfo], DistGlobalInfo]:
    """Return the place of every worker and the sizes of the axes; ask the workers once."""
    if worker_group._megatron_layout is None:
        sizes = worker_group.get_megatron_global_info()
        worker_group._megatron_layout = worker_group.get_megatron_rank_info(), sizes[0]
    return worker_group._megatron_layout


def data_parallel(worker_group: DispatchGroup) -> Split:
    """Give each worker the part of its data-parallel rank; one worker of each, in the last stage, answers."""
    ranks, sizes = layout_of(worker_group)
    # Tensor- and context-parallel peers compute the same rows, and only the last stage has the output of the model.
    collected = [rank.tp_rank == 0 and rank.cp_rank == 0 and rank.pp_rank == sizes.pp_size - 1 for rank in ranks]
    return Split([rank.dp_rank for rank in ranks], sizes.dp_size, collected)


def pipeline_as_data(worker_group: DispatchGroup) -> Split:
    """Give each group of tensor-parallel peers its own part, as generation does; one peer answers.

    Parts are numbered by rank, so that the outputs in rank order are in the order of the parts.
    """
    ranks, sizes = layout_of(worker_group)
    parts = [(rank.pp_rank * sizes.dp_size + rank.dp_rank) * sizes.cp_size + rank.cp_rank for rank in ranks]
    return Split(parts, sizes.pp_size * sizes.dp_size * sizes.cp_size, [rank.tp_rank == 0 for rank in ranks])


def _by_layout(split: Callable[[DispatchGroup], Split], dispatch_nd: DispatchFn, collect_nd: CollectFn) -> DispatchFns:
    """Return the functions of a mode that follows the layout which Megatron-Core workers report."""

    def dispatch(worker_group: DispatchGroup, *args: T, **kwargs: T) -> tuple[Args, Kwargs]:
        found = split(worker_group)
        return dispatch_nd(found.parts, found.num_parts, worker_group, *args, **kwargs)

    def collect(worker_group: DispatchGroup, output: list[T]) -> Batch | list[T]:
        return collect_nd(split(worker_group).collected, worker_group, output)

    return _fns(dispatch, collect)


# ---- the tables


DISPATCH_MODE_FN_REGISTRY: dict[DynamicEnum, DispatchFns] = {
    Dispatch.ONE_TO_ALL: _fns(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _fns(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: _fns(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _fns(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _fns(dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: _fns(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: _fns(_call_forbidden, _call_forbidden),
    Dispatch.MEGATRON_COMPUTE: _by_layout(data_parallel, dispatch_nd_compute, collect_nd_compute),
    Dispatch.MEGATRON_PP_AS_DP: _by_layout(pipeline_as_data, dispatch_nd_compute, collect_nd_compute),
    Dispatch.MEGATRON_COMPUTE_PROTO: _by_layout(
        data_parallel, dispatch_nd_compute_dataproto, collect_nd_compute_dataproto
    ),
    Dispatch.MEGATRON_PP_AS_DP_PROTO: _by_layout(
        pipeline_as_data, dispatch_nd_compute_dataproto, collect_nd_compute_dataproto
    ),
}


def get_predefined_dispatch_fn(dispatch_mode: DynamicEnum) -> DispatchFns:
    """Return ``dispatch_fn`` and ``collect_fn`` of a mode.

    Raises: ValueError, which is also an AssertionError, for a mode without functions.
    """
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ContractError(
            f"{dispatch_mode!r} has no dispatch function; known are {[m.name for m in DISPATCH_MODE_FN_REGISTRY]}"
        )
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Add a mode by name.

    Raises: ValueError, which is also an AssertionError, when the name is taken.
    """
    if dispatch_mode_name.upper() in Dispatch:
        raise ContractError(f"dispatch mode {dispatch_mode_name!r} exists; replace it by update_dispatch_mode")
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = _fns(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: DynamicEnum, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the functions of a mode.

    Raises: ValueError, which is also an AssertionError, for a mode without functions.
    """
    if not isinstance(dispatch_mode, Dispatch) or dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ContractError(f"{dispatch_mode!r} is not a dispatch mode with functions; use register_dispatch_mode")
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _fns(dispatch_fn, collect_fn)


def get_predefined_execute_fn(execute_mode: DynamicEnum) -> dict[str, str]:
    """Return the name of the group's method that runs a mode, under ``execute_fn_name``."""
    names: dict[DynamicEnum, str] = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}
    return {"execute_fn_name": names[execute_mode]}


# ---- registration


def _check_dispatch_mode(dispatch_mode: Dispatch | DispatchFns) -> None:
    if isinstance(dispatch_mode, Mapping):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        if missing:
            raise ContractError(f"a dispatch_mode dict needs dispatch_fn and collect_fn, {sorted(missing)} missing")
    elif not isinstance(dispatch_mode, Dispatch):
        raise ContractError(f"dispatch_mode must be a Dispatch member or a dict, got {dispatch_mode!r}")


def _check_execute_mode(execute_mode: Execute) -> None:
    if not isinstance(execute_mode, Execute):
        raise ContractError(f"execute_mode must be an Execute member, got {execute_mode!r}")


_FUTURE_KEY = "_future_value_x7261_"


def attach_future_values(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Turn the references inside of futures into arguments, so that Ray waits for them before the call starts.

    A worker that waited itself would block its event loop, and with it the results that its peers wait for.
    """
    values: dict[str, ObjectRef[DataProto]] = {}

    def detached(value: T) -> T | DataProtoFuture:
        if not isinstance(value, DataProtoFuture):
            return value
        names = [f"{_FUTURE_KEY}{len(values) + number}" for number in range(len(value.futures))]
        values.update(zip(names, value.futures, strict=True))
        # The worker puts the values in the place of their names.
        return replace(value, futures=names, wait_fn=None)

    new_args = tuple(map(detached, args))
    new_kwargs = {key: detached(value) for key, value in kwargs.items()}
    return new_args, {**new_kwargs, **values}


def _received(args: Args, kwargs: Kwargs, materialize_futures: bool) -> tuple[Args, Kwargs]:
    """Return the arguments of a call as the worker's method takes them.

    This undoes ``attach_future_values``, after Ray has replaced the references by values. Columns by reference are read
    here, so that a method of a worker gets plain tensors.
    """
    values = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith(_FUTURE_KEY)}

    def received(value: T) -> T | DataProto | DataProtoFuture:
        if isinstance(value, DataProto):
            return fetched(value)
        if not isinstance(value, DataProtoFuture):
            return value
        future = replace(value, futures=[values[name] for name in value.futures]) if values else value
        return fetched(future.get()) if materialize_futures else future

    return tuple(map(received, args)), {key: received(value) for key, value in kwargs.items()}


def _answered(output: T, args: Args, kwargs: Kwargs) -> T | DataProto:
    """Return the output of a method; move its columns to the object store if a batch of the call asks for that."""
    if not isinstance(output, DataProto):
        return output
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    if not any(batch.meta_info.get(BY_REFERENCE) for batch in batches):
        return output
    import ray

    return by_reference(output) if ray.is_initialized() else output  # a worker in a plain process has no store


def _taking_future_values(method: Callable[..., T]) -> inspect.Signature:
    """Return the signature of a method with any keyword: Ray checks calls by it, and futures add keywords to a call."""
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return signature
    return signature.replace(parameters=[*parameters, inspect.Parameter("futures", inspect.Parameter.VAR_KEYWORD)])


def _offer_fault(method: str, args: Args) -> None:
    """Let a test end or stop the worker before a method, at the step of the batch if it has one."""
    batches = [arg for arg in args if isinstance(arg, DataProto)]
    step = batches[0].meta_info.get("global_steps") if batches else None
    fault_point(f"before_{method}", rank=getattr(args[0], "rank", 0) if args else 0, step=step)


@contextmanager
def _counted(method: str, args: Args, is_direct: bool = False) -> Iterator[None]:
    """Add the seconds of a call to ``seconds_by_call`` of the worker, which is the first argument.

    Calls of the driver are on the timeline; direct calls are not, since there may be thousands at the same time.
    """
    start = time.perf_counter()
    _offer_fault(method, args)
    try:
        with nullcontext() if is_direct else timeline.span(method, "call"):
            yield
    finally:
        counts: dict[str, float] | None = getattr(args[0], "seconds_by_call", None) if args else None
        if counts is not None:
            counts[method] = counts.get(method, 0.0) + time.perf_counter() - start


def register(
    dispatch_mode: Dispatch | DispatchFns = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method of a worker, sync or async, callable through its worker group.

    Args: ``dispatch_mode`` is a ``Dispatch`` member or a dict of ``dispatch_fn`` and ``collect_fn``; with ``blocking``
    the driver waits for the outputs; with ``materialize_futures`` the worker replaces futures by their values.

    Raises: ValueError, which is also an AssertionError, for other modes.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    attrs: MethodAttrs = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}

    is_direct = dispatch_mode is Dispatch.DIRECT_ROLLOUT_METHOD

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        method: Callable[..., Any] = func

        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _received(args, kwargs, materialize_futures)
            with _counted(func.__name__, args, is_direct):
                return _answered(method(*args, **kwargs), args, kwargs)

        @wraps(func)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _received(args, kwargs, materialize_futures)
            with _counted(func.__name__, args, is_direct):
                return _answered(await method(*args, **kwargs), args, kwargs)

        wrapper: Any = call_async if inspect.iscoroutinefunction(func) else call
        wrapper.__signature__ = _taking_future_values(func)
        del wrapper.__wrapped__  # Ray would follow it to a signature that does not take the values of futures
        setattr(wrapper, MAGIC_ATTR, attrs)
        return cast("Callable[P, T]", wrapper)

    return decorate
