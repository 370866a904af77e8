"""Sharding managers: they switch devices and weights between training and generation."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from verl.errors import WeightSyncError
from verl.workers.sharding_manager.base import BaseShardingManager
from verl.workers.sharding_manager.fsdp_sglang import FSDPSGLangShardingManager
from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager
from verl.workers.sharding_manager.hybrid import HybridShardingManager, complete
from verl.workers.sharding_manager.megatron_sglang import MegatronSGLangShardingManager
from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager
from verl.workers.sharding_manager.servers import ServerSync

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine
    from verl.workers.rollout.base import BaseRollout

__all__ = [
    "BaseShardingManager",
    "FSDPSGLangShardingManager",
    "FSDPVLLMShardingManager",
    "HybridShardingManager",
    "MegatronSGLangShardingManager",
    "MegatronVLLMShardingManager",
    "ServerSync",
    "WeightSyncError",
    "build_sharding_manager",
    "complete",
]


def build_sharding_manager(engine: "BaseEngine | None", rollout: "BaseRollout") -> HybridShardingManager:
    """Return the manager of a rollout and its training engine, if it has one."""
    bucket_bytes = rollout.config.update_weights_bucket_megabytes << 20
    strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
    dotted = rollout.facts.sharding_managers.get("megatron" if strategy == "megatron" else "fsdp")
    kind = HybridShardingManager if dotted is None else resolve_name(dotted)
    return kind(engine, rollout, bucket_bytes=bucket_bytes)
