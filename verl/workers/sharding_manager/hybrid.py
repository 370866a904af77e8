"""The HybridEngine: training and generation in one process, with the weights of the training engine in the rollout."""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

from verl.errors import WrongInput
from verl.protocol import all_gather_data_proto
from verl.utils import envs
from verl.utils.device import get_device_name, get_torch_device, set_expandable_segments
from verl.utils.faults import is_skipped
from verl.utils.memory_utils import return_freed_host_memory_if_short
from verl.workers.sharding_manager.base import BaseShardingManager
from verl.workers.sharding_manager.shared_weights import SharedWeights
from verl.workers.sharding_manager.weight_sync import WeightSync

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.protocol import DataProto
    from verl.workers.engine.base import BaseEngine
    from verl.workers.rollout.base import BaseRollout

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 512 << 20


class HybridShardingManager(BaseShardingManager):
    """Give devices and current weights to the rollout on entry, and take the devices back on exit.

    Resharding: the layout of training and the tensor-parallel size of generation may differ. The training engine
    therefore streams full tensors, each gathered over the axes that shard it, and every rank sees each of them once and
    keeps the part that its rollout needs. This costs more bytes than a direct exchange of shards, but needs no table of
    pairs of layouts, and only one bucket of full tensors is alive at a time.

    Order of entry: the weights' memory is allocated before the sync, the key-value cache only afterwards, so that the
    buckets use memory that the cache takes later.

    Args: without ``engine`` there is no sync. The ``infer_tp`` axis of ``device_mesh`` holds the ranks that share a
        rollout engine; without a mesh the caller passes the same rows to each of them.
    """

    def __init__(
        self,
        engine: "BaseEngine | None",
        rollout: "BaseRollout",
        device_mesh: "DeviceMesh | None" = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.engine = engine
        self.rollout = rollout
        self.device_mesh = device_mesh
        self.bucket_bytes = bucket_bytes
        self.last_sync: dict[str, float] = {}
        self._prepared_for: int | None = None
        self._infer_group = None
        if device_mesh is not None and "infer_tp" in (device_mesh.mesh_dim_names or ()):
            group = device_mesh["infer_tp"].get_group()
            self._infer_group = group if group.size() > 1 else None
        self.shared: SharedWeights | None = None
        if rollout.config.free_cache_engine:
            complete(rollout.release())

    def share_weights(self) -> None:
        """Let trainer and rollout hold one copy of the weights; see ``SharedWeights``.

        Raises: WrongInput naming what cannot be shared; WeightSyncError if the engine computes with other weights.
        """
        if self.engine is None:
            raise WrongInput("actor_rollout_ref.rollout.share_weights=true: this worker trains no model: write false")
        self.shared = SharedWeights(self.engine, self.rollout)

    @property
    def is_behind(self) -> bool:
        """Whether the trainer has other weights than the rollout."""
        return self.engine is not None and self.engine.weights_version != self.rollout.weights_version

    @property
    def is_awake(self) -> bool:
        """Whether the rollout has the devices, or at least its weights."""
        return self._prepared_for is not None

    def _trained_version(self) -> int:
        return 0 if self.engine is None else self.engine.weights_version

    async def _sync(self, step: int | None) -> None:
        _empty_cache()
        # The engine's sleep mode maps its memory itself and cannot use segments that grow. The trainer's freed blocks
        # go first, because the engine takes its memory from the device and not from torch.
        set_expandable_segments(False)
        await self.rollout.resume(["weights"])
        self.last_sync = {}
        if self.is_behind and not is_skipped("weight_sync", rank=envs.integer("RANK", 0), step=step):
            assert self.engine is not None
            if self.shared is not None:
                self.last_sync = self.shared.sync(step)
            else:
                self.last_sync = WeightSync(self.engine, self.rollout, self.bucket_bytes, step).run()
            logger.debug("weight sync: %s", self.last_sync)
        self._prepared_for = self._trained_version()

    def sync(self, step: int | None = None) -> None:
        """Resume the rollout's weights, and sync them if they are outdated.

        The rollout stays awake for the generation that follows. ``step`` is that of the run, for messages.

        Raises: WeightSyncError on all ranks when the sync failed on any.
        """
        complete(self._sync(step))

    async def give_to_rollout(self, step: int | None = None) -> None:
        """Sync, unless that was done for the present weights, and resume the rollout's cache.

        Raises: WeightSyncError on all ranks when the sync failed on any.
        """
        # The cache is resumed last: until the buckets are gone, its memory is theirs.
        if self._prepared_for != self._trained_version():
            await self._sync(step)
        _empty_cache()
        await self.rollout.resume(["kv_cache"])

    async def give_to_trainer(self) -> None:
        """Release the rollout's memory if it is awake and ``free_cache_engine`` is set."""
        if self._prepared_for is None:
            return
        self._prepared_for = None
        # The trainer changes shared weights in place, so no request may run at the same time.
        if self.rollout.config.free_cache_engine or self.shared is not None:
            await self.rollout.release()
        _empty_cache()
        set_expandable_segments(True)

    def __enter__(self) -> "HybridShardingManager":
        """Give the devices and the current weights to the rollout.

        Raises: WeightSyncError on all ranks when the sync failed on any.
        """
        complete(self.give_to_rollout())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the devices back."""
        complete(self.give_to_trainer())

    def preprocess_data(self, data: "DataProto") -> "DataProto":
        """Give each rank of a rollout engine the rows of all of them; collective over them."""
        if self._infer_group is not None:
            all_gather_data_proto(data, self._infer_group)
        return data

    def postprocess_data(self, data: "DataProto") -> "DataProto":
        """Return this rank's rows of a batch that ``preprocess_data`` joined, the same number for each rank."""
        if self._infer_group is None:
            return data
        return data.chunk(self._infer_group.size())[self._infer_group.rank()]


def _empty_cache() -> None:
    if get_device_name() != "cpu":
        get_torch_device().empty_cache()
    else:
        return_freed_host_memory_if_short()


def complete(coroutine: Coroutine[None, None, None] | None) -> None:
    """Run a coroutine to its end; do nothing for None, the result of a plain function.

    In an actor with an asynchronous method, Ray calls every method inside an event loop. That loop cannot run another
    one, so the coroutine then runs in a thread with the same current device.
    """
    if coroutine is None:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # the usual case: no event loop runs in this thread
        # Unlike asyncio.run, a Runner with a factory keeps the event loop that this thread has.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(coroutine)
        return
    device = get_torch_device()
    with ThreadPoolExecutor(1, initializer=device.set_device, initargs=(device.current_device(),)) as thread:
        thread.submit(asyncio.run, coroutine).result()
