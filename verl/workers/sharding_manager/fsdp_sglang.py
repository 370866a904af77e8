"""The HybridEngine for FSDP training and SGLang."""

from verl.workers.sharding_manager.hybrid import HybridShardingManager


class FSDPSGLangShardingManager(HybridShardingManager):
    """Between an FSDP engine, whose shards are gathered tensor by tensor, and a rollout of any size."""
