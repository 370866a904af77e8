"""The 3D HybridEngine: Megatron-Core training and SGLang."""

from verl.workers.sharding_manager.hybrid import HybridShardingManager


class MegatronSGLangShardingManager(HybridShardingManager):
    """Between a Megatron-Core engine of any layout and a rollout of any tensor-parallel size.

    A tensor is gathered over pipeline, expert and tensor parallel ranks just before it is loaded, so that no rank ever
    holds more of other ranks' weights than one bucket (``verl/models/mcore/gpt/export.py``).
    """
