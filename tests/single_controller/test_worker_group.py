"""Groups of real Ray actors: dispatch, colocation, detaching, nesting and placement."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

import ray
from ray.util.placement_group import remove_placement_group

from tests.single_controller.workers import AsyncWorker, EchoWorker, times_rank
from tests.waiting import wait_until
from verl import DataProto
from verl.errors import ContractError, PlacementError, WorkerTaskError
from verl.protocol import DataProtoFuture
from verl.protocol.lazy import BY_REFERENCE, LazyTensor, by_reference, fetched, take_touched
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    merge_resource_pool,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _class(cls: type, *args: Any) -> RayClassWithInitArgs:
    return RayClassWithInitArgs(ray.remote(cls), *args)


def _batch(rows: int = 4, **kwargs: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"id": [f"row{i}" for i in range(rows)]}, **kwargs)


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    pool = RayResourcePool([2], max_colocate_count=3, name_prefix="shared")
    yield pool
    for group in list(pool.groups)[:1]:
        group.kill()
    for placement in pool.pgs or []:
        remove_placement_group(placement)


@pytest.fixture(scope="module")
def roles(pool: RayResourcePool) -> dict[str, RayWorkerGroup]:
    classes = {"actor": _class(EchoWorker, 0), "actor_rollout": _class(EchoWorker, 10), "server": _class(AsyncWorker)}
    group = RayWorkerGroup(
        pool, create_colocated_worker_cls(classes), device_name="cpu", call_timeout_s=600, worker_env={"EXTRA": 5}
    )
    return group.spawn(classes.keys())


@pytest.fixture(scope="module")
def fused(pool: RayResourcePool) -> RayWorkerGroup:
    cls = create_colocated_worker_cls_fused({"left": _class(EchoWorker, 1), "right": _class(AsyncWorker)})
    group = RayWorkerGroup(pool, cls, device_name="cpu", call_timeout_s=600)
    group.fuse(["left", "right"])
    return group


def test_environment_of_workers(roles: dict[str, RayWorkerGroup]) -> None:
    group = roles["actor"]
    places = group.place()
    assert [place["rank"] for place in places] == [0, 1]
    for rank, place in enumerate(places):
        env = place["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["RAY_LOCAL_WORLD_SIZE"]) == (str(rank), "2", "2")
        assert (env["WG_BACKEND"], env["WG_PREFIX"], env["EXTRA"]) == ("ray", group.name_prefix, "5")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", group.master_port)
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["REDIS_STORE_SERVER_HOST"]) == (
            "0",
            "1",
            env["MASTER_ADDR"],
        )
    assert {place["pid"] for place in places} == {place["pid"] for place in roles["actor_rollout"].place()}
    assert group.worker_names == [f"{group.name_prefix}WorkerDict_0:{rank}" for rank in (0, 1)]


def test_named_dispatch_modes(roles: dict[str, RayWorkerGroup]) -> None:
    actor = roles["actor"]
    assert actor.echo(7, key="k") == [(0, 7, "k"), (1, 7, "k")]
    assert actor.echo([1, 2]) == [(0, [1, 2], None), (1, [1, 2], None)]
    assert actor.echo_all(["a", "b"]) == [(0, "a"), (1, "b")]
    assert actor.echo_all("same") == [(0, "same"), (1, "same")]
    assert actor.execute_rank_zero_sync("actor_echo_all", 3) == (0, 3)
    assert actor.execute_all_sync("actor_echo_all", [3, 4]) == [(0, 3), (1, 4)]
    assert actor.double([3, 4]) == [6, 8]
    assert actor.count(_batch(6)) == [3, 3]
    assert actor.add(_batch()).batch["x"].tolist() == [1, 2, 3, 4]
    assert actor.add(_batch(), other=_batch()).batch["x"].tolist() == [1, 3, 5, 7]
    assert roles["actor_rollout"].add(_batch()).batch["x"].tolist() == [11, 12, 13, 14]
    assert actor.execute_with_func_generator(times_rank, _batch()).batch["x"].tolist() == [0, 1, 4, 6]
    assert actor.execute_func_rank_zero(sorted, [3, 1, 2]) == [1, 2, 3]
    assert roles["server"].answer(5) == [5, 6]


def test_rank_zero_only(roles: dict[str, RayWorkerGroup]) -> None:
    assert roles["actor"].echo_zero([8, 9])[0] == 0


@pytest.mark.parametrize(
    "call", [lambda g: g.double([1]), lambda g: g.add([1, 2]), lambda g: g.add(_batch(3)), lambda g: g.count(5)]
)
def test_arguments_that_cannot_be_split_are_refused(call: Any, roles: dict[str, RayWorkerGroup]) -> None:
    with pytest.raises(AssertionError) as caught:
        call(roles["actor"])
    assert isinstance(caught.value, ValueError)
    assert roles["actor"].double([1, 2]) == [2, 4]  # the group goes on


def test_automatic_padding_is_taken_off_again(roles: dict[str, RayWorkerGroup]) -> None:
    data = _batch(5, auto_padding=True)
    assert roles["actor"].count(data) == [3]  # a list loses as many trailing elements
    assert roles["actor"].add(data).batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert roles["actor"].add_later(data).get().batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert roles["actor"].add_rank(data).batch["x"].tolist() == [0, 1, 2, 103, 104]
    with pytest.raises(ContractError, match="same number of rows"):
        roles["actor"].add(data, other=_batch(4, auto_padding=True))


def test_future_feeds_the_next_call(roles: dict[str, RayWorkerGroup]) -> None:
    for _ in range(20):  # a worker that waits by itself blocks its peer, though not every time
        future = roles["actor"].add_later(_batch())
        assert isinstance(future, DataProtoFuture)
        assert roles["actor_rollout"].add(future).batch["x"].tolist() == [12, 13, 14, 15]
    assert roles["actor"].add_rank(future).batch["x"].tolist() == [1, 2, 103, 104]
    assert future.get().non_tensor_batch["id"].tolist() == ["row0", "row1", "row2", "row3"]


def _columns(rows: int = 4) -> DataProto:
    data = _batch(rows, meta_info={BY_REFERENCE: True})
    data.batch["x"] = torch.arange(rows * 3).reshape(rows, 3)
    return data


def test_columns_stay_in_the_object_store(roles: dict[str, RayWorkerGroup], fused: RayWorkerGroup) -> None:
    plain = _columns()
    data = by_reference(_columns())
    take_touched()
    assert isinstance(data.batch["x"], LazyTensor)
    order = torch.tensor([3, 0, 2, 1])
    for call, added in (
        (roles["actor"].add, torch.ones(4, 1)),
        (roles["actor"].add_rank, torch.tensor([[0], [0], [100], [100]])),
        (roles["actor_rollout"].add_rank_pair, torch.tensor(200)),
        (fused.left.add, torch.tensor(2)),
    ):
        output = call(data)
        assert isinstance(output.batch["x"], LazyTensor)
        output.meta_info = {BY_REFERENCE: True}
        output.reorder(order)
        plain.batch["x"] = (plain.batch["x"] + added.to(torch.int64))[order]
        assert torch.equal(output.batch["x"].sum(-1), plain.batch["x"].sum(-1))
        data = DataProto.concat(output.chunk(2))
    assert not take_touched()  # the driver has not seen a row
    assert torch.equal(fetched(data).batch["x"], plain.batch["x"])
    assert torch.equal(data.batch["x"] + 0, plain.batch["x"])
    assert take_touched() == {"x": 96}


def test_a_written_column_and_a_future_of_columns_reach_the_workers(roles: dict[str, RayWorkerGroup]) -> None:
    data = by_reference(_columns())
    data.batch["x"][1] = 50
    future = roles["actor"].add_later(data)
    output = roles["actor_rollout"].add(future)
    assert output.batch["x"].tolist() == [[12, 13, 14], [62, 62, 62], [18, 19, 20], [21, 22, 23]]
    odd = by_reference(_columns(3))
    odd.meta_info["_verl_auto_padding"] = True
    padded = roles["actor"].add(odd)
    assert len(padded) == 3
    assert isinstance(padded.batch["x"], LazyTensor)
    assert padded.batch["x"].tolist() == (_columns(3).batch["x"] + 1).tolist()


def test_mesh_dispatch(roles: dict[str, RayWorkerGroup]) -> None:
    out = roles["actor"].add_rank(_batch())
    assert out.batch["x"].tolist() == [0, 1, 102, 103]
    assert out.meta_info["metrics"] == {"rows": [2, 2]}
    assert roles["actor"]._dispatch_info["split"] == [0, 1]
    data = DataProto.from_dict({"x": torch.arange(200_000)})  # large enough to be shared memory, which peers map
    for _ in range(2):
        pair = roles["actor"].add_rank_pair(data)
        assert torch.equal(pair.batch["x"], data.batch["x"] + 200)
        pair.batch["x"].zero_()  # what the driver receives can be written too
    assert roles["actor"]._collect_info["pair"] == [False, True]


def test_methods_of_a_role_whose_name_starts_with_another(roles: dict[str, RayWorkerGroup]) -> None:
    assert not hasattr(roles["server"], "echo")
    assert ray.get(roles["actor_rollout"].workers[0].direct.remote(1)) == 11
    with pytest.raises(NotImplementedError):
        roles["actor"].direct(1)
    with pytest.raises(ValueError, match="no role 'nobody'"):
        roles["actor"].spawn(["nobody"])


@pytest.mark.full
def test_a_call_comes_through_while_thousands_wait(roles: dict[str, RayWorkerGroup]) -> None:
    """Such as those that ask for the health of a server, or abort a request."""
    actor = roles["server"].workers[0]
    waiting = [actor.server_hold.remote() for _ in range(2000)]
    ray.get(actor.server_let_go.remote())
    assert all(ray.get(waiting))


def test_attach_by_name(roles: dict[str, RayWorkerGroup]) -> None:
    actor = roles["actor"]
    by_name = RayWorkerGroup.from_detached(
        worker_names=actor.worker_names, ray_cls_with_init=actor.ray_cls_with_init, name_prefix="again"
    )
    assert by_name.actor_echo(1) == [(0, 1, None), (1, 1, None)]
    assert by_name.spawn(["actor"])["actor"].double([1, 2]) == [2, 4]


def test_fused_roles(fused: RayWorkerGroup) -> None:
    assert fused.left.add(_batch()).batch["x"].tolist() == [2, 3, 4, 5]
    assert fused.right.answer(5) == [5, 6]
    assert fused.left.add_rank(_batch()).batch["x"].tolist() == [0, 1, 102, 103]
    assert fused.left.sibling_offset("left") == [1, 1]


def run_nested_group() -> list[int]:
    """Drive a group from inside of a worker."""
    inner_pool = RayResourcePool([1], max_colocate_count=1)
    inner = RayWorkerGroup(inner_pool, _class(EchoWorker, 3), device_name="cpu", call_timeout_s=600)
    result: list[int] = inner.add(_batch()).batch["x"].tolist()
    inner.kill()
    for placement in inner_pool.pgs or []:
        remove_placement_group(placement)
    return result


def test_nested_group(roles: dict[str, RayWorkerGroup]) -> None:
    assert roles["actor"].execute_func_rank_zero(run_nested_group) == [4, 5, 6, 7]


def test_placement_that_cannot_be_met_is_refused(pool: RayResourcePool) -> None:
    cores = int(ray.cluster_resources()["CPU"])
    with pytest.raises(PlacementError, match=rf"{cores + 5} x .*the cluster has .*missing \{{'CPU': 5"):
        RayWorkerGroup(RayResourcePool([cores + 5]), _class(EchoWorker), device_name="cpu")
    with pytest.raises(ValueError, match="'GPU': 1"):
        RayWorkerGroup(RayResourcePool([1], max_colocate_count=1), _class(EchoWorker), device_name="cuda")
    with pytest.raises(ValueError, match="RANK"):
        RayWorkerGroup(pool, _class(EchoWorker), device_name="cpu", worker_env={"RANK": 1})


def test_resource_pools() -> None:
    first, second = RayResourcePool([2, 3], name_prefix="a"), RayResourcePool([1], name_prefix="b")
    assert first.local_world_size_list() == [2, 2, 3, 3, 3] and first.local_rank_list() == [0, 1, 0, 1, 2]
    assert first.bundle("cpu") == {"CPU": 1} and first.bundle("npu") == {"CPU": 10, "NPU": 1}
    first.pgs, second.pgs = [], []
    assert merge_resource_pool(first, second).store == [2, 3, 1]
    with pytest.raises(ValueError, match="max_colocate_count"):
        merge_resource_pool(first, RayResourcePool([1], max_colocate_count=1))
    assert np.sum(first.store) == first.world_size


def test_exception_keeps_its_type_and_ends_all_groups_of_the_pool(
    roles: dict[str, RayWorkerGroup], fused: RayWorkerGroup
) -> None:
    with phase("reward", step=4), pytest.raises(WorkerTaskError) as caught:
        roles["actor"].fail(1)
    first_line = str(caught.value).splitlines()[0]
    for part in ("rank 1", "shared", "method fail", "role actor", "phase reward, step 4", "KeyError: 'no such row'"):
        assert part in first_line
    assert isinstance(caught.value.__cause__, KeyError)
    for group in (roles["actor"], fused):
        for worker in group.workers:
            wait_until(lambda actor=worker: _has_ended(actor))


def _has_ended(actor: ray.actor.ActorHandle) -> bool:
    """Whether the actor is dead; ``ray.kill`` returns before it is, so a first call may still be answered."""
    try:
        ray.get(actor.__ray_ready__.remote())
    except ray.exceptions.ActorDiedError:
        return True
    return False


def test_an_error_of_a_rank_that_is_not_collected_ends_what_waits(ray_cluster: None) -> None:
    pool = RayResourcePool([2], max_colocate_count=1, name_prefix="tower")
    group = RayWorkerGroup(pool, _class(EchoWorker), device_name="cpu", call_timeout_s=3600)
    with phase("reward", step=2):
        future = group.fail_pair(_batch())
    with pytest.raises(WorkerTaskError, match="rank 0.*method fail_pair.*phase reward, step 2.*no such image"):
        future.get()
    for placement in pool.pgs or []:
        remove_placement_group(placement)
