"""Dispatch by the layout of Megatron-Core: the named modes are the mesh form, on real groups and by the arithmetic."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import ray
from ray.util.placement_group import remove_placement_group

from tests.single_controller.workers import LayoutWorker
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, get_predefined_dispatch_fn
from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.megatron.ranks import place_of

COMPUTE, PP_AS_DP = Dispatch.MEGATRON_COMPUTE, Dispatch.MEGATRON_PP_AS_DP
COMPUTE_PROTO, PP_AS_DP_PROTO = Dispatch.MEGATRON_COMPUTE_PROTO, Dispatch.MEGATRON_PP_AS_DP_PROTO


def sizes_of(tp: int, pp: int, cp: int = 1) -> dict[str, int]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}


class Told(WorkerGroup):
    """A group whose workers say that they stand in a layout."""

    def __init__(self, world_size: int, sizes: dict[str, int]) -> None:
        super().__init__(None)
        self.places = [place_of(rank, world_size, sizes) for rank in range(world_size)]

    @property
    def world_size(self) -> int:
        return len(self.places)

    def _is_worker_alive(self, worker: Any) -> bool:
        return True

    def get_megatron_rank_info(self) -> list[DistRankInfo]:
        return [DistRankInfo(p.tp_rank, p.dp_rank, p.pp_rank, p.cp_rank) for p in self.places]

    def get_megatron_global_info(self) -> list[DistGlobalInfo]:
        return [DistGlobalInfo(p.tp_size, p.dp_size, p.pp_size, p.cp_size) for p in self.places]


@pytest.mark.parametrize(
    ("world", "sizes"), [(16, sizes_of(2, 2, 2)), (8, sizes_of(2, 4)), (6, sizes_of(1, 3)), (2, sizes_of(2, 1))]
)
def test_arithmetic_of_the_modes(world: int, sizes: dict[str, int]) -> None:
    group, tp, dp = Told(world, sizes), sizes["tensor_model_parallel_size"], place_of(0, world, sizes).dp_size
    by_rank = [place.dp_rank for place in group.places]
    split = get_predefined_dispatch_fn(COMPUTE)
    (parts,), _ = split["dispatch_fn"](group, [f"part {i}" for i in range(dp)])
    assert parts == [f"part {rank}" for rank in by_rank]
    assert split["collect_fn"](group, by_rank) == list(range(dp))
    shares = get_predefined_dispatch_fn(PP_AS_DP)
    (parts,), _ = shares["dispatch_fn"](group, list(range(world // tp)))
    assert parts == [rank // tp for rank in range(world)]  # as generation groups of neighbours
    assert shares["collect_fn"](group, parts) == list(range(world // tp))
    with pytest.raises(ValueError, match=f"a list or tuple of {dp} parts"):
        split["dispatch_fn"](group, [0] * (dp + 1))


@pytest.fixture(params=[(2, sizes_of(1, 2)), pytest.param((4, sizes_of(2, 2)), marks=pytest.mark.full)])
def workers(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[RayWorkerGroup]:
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    world, sizes = request.param
    pool = RayResourcePool([world], max_colocate_count=1)
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(ray.remote(LayoutWorker), sizes), device_name="cpu", call_timeout_s=600
    )
    yield group
    group.kill()
    for placement in pool.pgs or []:
        remove_placement_group(placement)


def test_the_modes_are_the_mesh_form_on_real_groups(workers: Any) -> None:
    assert all("call init_model first" in message for message in workers.ask_too_early())
    workers.make_layout()
    data = DataProto.from_dict({"x": torch.arange(8)})
    for named, mesh in (("by_layout", "by_mesh"), ("generate_by_layout", "generate_by_mesh")):
        ours, other = (getattr(workers, name)(data).batch for name in (named, mesh))
        assert ours["x"].tolist() == other["x"].tolist() == list(range(8))
        assert ours["rank"].tolist() == other["rank"].tolist()
    last = workers.world_size - workers.get_megatron_global_info()[0].tp_size
    assert set(workers.by_layout(data).batch["rank"].tolist()) == {last}  # the first of the last stage
    assert workers.parts_by_layout(["all of it"]) == [(last, "all of it")]
