"""Workers that the tests of the single controller run."""

import asyncio
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_dp_compute_data_proto,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.megatron import MegatronWorker
from verl.utils import envs
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group_ray
from verl.utils.megatron.ranks import place_of


def times_rank(worker: Worker, data: DataProto) -> DataProto:
    """Be the function that a driver sends."""
    return DataProto.from_dict({"x": data.batch["x"] * (worker.rank + 1)})


class EchoWorker(Worker):
    """One method per dispatch mode."""

    def __init__(self, offset: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offset = offset
        self._register_dispatch_collect_info("split", dp_rank=self.rank, is_collect=True)
        # Both ranks get the whole batch, and only the last answers: a tensor-parallel pair.
        self._register_dispatch_collect_info("pair", dp_rank=0, is_collect=self.rank == self.world_size - 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, Any]:
        """Return what the environment says."""
        names = [
            *self.env_keys(),
            "WG_PREFIX",
            "WG_BACKEND",
            "RAY_LOCAL_WORLD_SIZE",
            "REDIS_STORE_SERVER_HOST",
            "EXTRA",
        ]
        return {"rank": self.rank, "pid": os.getpid(), "env": {name: envs.read(name) for name in names}}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any, key: Any = None) -> Any:
        """Return the arguments and the rank."""
        return self.rank, value, key

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo_all(self, value: Any) -> Any:
        """Return the argument and the rank."""
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def echo_zero(self, value: Any) -> Any:
        """Return the arguments and the rank."""
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def double(self, value: int) -> int:
        """Return twice the argument."""
        return 2 * value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        """Write into what was received, and return it."""
        data.batch["x"] += self.offset + 1
        if other is not None:
            data.batch["x"] += other.batch["x"]
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto) -> DataProto:
        """Do the same without the driver waiting."""
        data.batch["x"] += self.offset + 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        """Return the number of rows that came here."""
        return len(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("split"))
    def add_rank(self, data: DataProto) -> DataProto:
        """Add 100 times the rank."""
        return DataProto.from_dict({"x": data.batch["x"] + 100 * self.rank}, meta_info={"metrics": {"rows": len(data)}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pair"))
    def add_rank_pair(self, data: DataProto) -> DataProto:
        """Write in place: the peer, who shares the object, must not see it."""
        before = data.batch["x"].clone()
        data.batch["x"] += 100 * (self.rank + 1)
        time.sleep(0.05)
        assert torch.equal(data.batch["x"], before + 100 * (self.rank + 1))
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pair"), blocking=False)
    def fail_pair(self, data: DataProto) -> DataProto:
        """Raise on the rank whose output nobody takes, while its peer goes on."""
        if self.rank == 0:
            raise KeyError("no such image")
        time.sleep(3600)
        return data

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, value: int) -> int:
        """Be called on the actor itself."""
        return value + self.offset

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        """Raise on one rank."""
        if self.rank == rank:
            raise KeyError("no such row")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sibling_offset(self, name: str) -> int:
        """Read from another role of the same process."""
        sibling: Any = self.get_fused_worker_by_name(name)
        return int(sibling.offset)


class AsyncWorker(Worker):
    """A role with coroutine methods."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: asyncio.Event | None = None

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def hold(self) -> bool:
        """Wait for ``let_go``."""
        self.opened = self.opened or asyncio.Event()
        return await self.opened.wait()

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def let_go(self) -> None:
        """Let all go who wait."""
        assert self.opened is not None
        self.opened.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def answer(self, value: int) -> int:
        """Return the argument plus the rank, asynchronously."""
        return value + self.rank


def _spread_batch(group: Any, data: DataProto, *options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    size = group.world_size
    return (data.chunk(size), *([option] * size for option in options)), {}


_WITH_OPTIONS = {"dispatch_fn": _spread_batch, "collect_fn": collect_dp_compute_data_proto}


class FaultyWorker(Worker):
    """A role in a gloo group that can die or hang, at a time that the driver chooses."""

    def __init__(self) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_all(self, count: int = 1, pause_s: float = 0.0, marker: str = "") -> float:
        """Sum the ranks, several times; the marker proves that the collective has been entered."""
        total = torch.zeros(1)
        for number in range(count):
            total = torch.tensor([float(self.rank)])
            dist.all_reduce(total)
            if marker and number == 1:
                with open(f"{marker}.{self.rank}", "w") as file:
                    file.write("entered")
            time.sleep(pause_s)
        return total.item()

    @register(dispatch_mode=_WITH_OPTIONS, blocking=False)
    def sleep_later(self, data: DataProto, seconds: float, marker: str) -> DataProto:
        """Sleep while the driver goes on, and return the batch."""
        with open(f"{marker}.{self.rank}", "w") as file:
            file.write("entered")
        time.sleep(seconds)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_one(self, rank: int, peers_wait: bool = False) -> None:
        """Stop one process, which neither answers nor dies; the others may wait for it in a collective."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        if peers_wait:
            dist.all_reduce(torch.zeros(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        """Leave the process group."""
        destroy_global_process_group()


class BrokenWorker(Worker):
    """A role that cannot be constructed."""

    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError("no model at /nowhere")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def anything(self) -> None:
        """Never run."""


class LayoutWorker(MegatronWorker):
    """The same method in the named modes of Megatron-Core and in the mesh form."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        place = place_of(self.rank, self.world_size, sizes)
        self._register_dispatch_collect_info("actor", place.dp_rank, place.holds_outputs)
        tp_size = place.tp_size
        self._register_dispatch_collect_info("rollout", self.rank // tp_size, self.rank % tp_size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_too_early(self) -> str:
        """Return what the worker says of its place before there is a layout; raised, it would end the group."""
        try:
            return str(self.get_megatron_rank_info())
        except RuntimeError as error:
            return str(error)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_layout(self) -> None:
        """Make the groups of Megatron-Core."""
        import verl.workers.engine.megatron  # noqa: F401  (prepares Megatron-Core for the CPU)
        from verl.workers.config import McoreEngineConfig
        from verl.workers.engine.megatron.layout import make_layout

        initialize_global_process_group_ray(timeout_second=120)
        make_layout(McoreEngineConfig(**self.sizes))

    def _answer(self, data: DataProto) -> DataProto:
        rank = torch.full_like(data.batch["x"], self.rank)
        return DataProto.from_dict({"x": data.batch["x"], "rank": rank})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def by_layout(self, data: DataProto) -> DataProto:
        """Return the rows and who had them."""
        return self._answer(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def by_mesh(self, data: DataProto) -> DataProto:
        """Return the rows and who had them."""
        return self._answer(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def generate_by_layout(self, data: DataProto) -> DataProto:
        """Return the rows and who had them."""
        return self._answer(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_by_mesh(self, data: DataProto) -> DataProto:
        """Return the rows and who had them."""
        return self._answer(data)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def parts_by_layout(self, part: Any) -> Any:
        """Return the part and who had it."""
        return self.rank, part
