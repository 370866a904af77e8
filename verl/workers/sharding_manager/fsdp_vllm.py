"""The HybridEngine for FSDP training and generation in the same process."""

import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verl.utils import envs
from verl.utils.device import get_device_name, get_torch_device, set_expandable_segments
from verl.utils.faults import is_skipped
from verl.workers.sharding_manager.base import BaseShardingManager
from verl.workers.sharding_manager.weight_sync import WeightSync

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.workers.engine.base import BaseEngine
    from verl.workers.rollout.base import BaseRollout

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 512 << 20


class FSDPVLLMShardingManager(BaseShardingManager):
    """Hands devices and current weights to the rollout on entry, and takes the devices back on exit.

    The data-parallel size of training and the tensor-parallel size of generation may differ: every rank sees every
    full tensor once, and its engine keeps the part that it needs.

    Args: without an engine nothing is synced; ``device_mesh`` is accepted for the established signature.
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
        self.step: int | None = None
        self.last_sync: dict[str, float] = {}
        if rollout.config.free_cache_engine:
            _complete(rollout.release())

    def __enter__(self) -> "FSDPVLLMShardingManager":
        """Resume the rollout's weights, sync them if they are not current, then resume its cache.

        Raises: WeightSyncError on all ranks when the sync failed on any.
        """
        _empty_cache()
        set_expandable_segments(False)
        _complete(self.rollout.resume(["weights"]))
        self.last_sync = {}
        due = self.engine is not None and self.engine.weights_version != self.rollout.weights_version
        if due and not is_skipped("weight_sync", rank=envs.integer("RANK", 0), step=self.step):
            self.last_sync = WeightSync(self.engine, self.rollout, self.bucket_bytes, self.step).run()
            logger.debug("weight sync: %s", self.last_sync)
        _empty_cache()
        _complete(self.rollout.resume(["kv_cache"]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the rollout's memory where ``free_cache_engine`` asks for it."""
        if self.rollout.config.free_cache_engine:
            _complete(self.rollout.release())
        _empty_cache()
        set_expandable_segments(True)


def _empty_cache() -> None:
    if get_device_name() != "cpu":
        get_torch_device().empty_cache()


def _complete(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine of a rollout in this thread to its end, whether or not an event loop runs here.

    An engine in this process never awaits anything; a remote one would, and needs a loop.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("this rollout awaits a server: use it with an asynchronous manager")
