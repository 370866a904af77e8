"""The HybridEngine for FSDP training and vLLM."""

from verl.workers.sharding_manager.hybrid import HybridShardingManager


class FSDPVLLMShardingManager(HybridShardingManager):
    """Between an FSDP engine, whose shards are gathered tensor by tensor, and a rollout of any size."""
