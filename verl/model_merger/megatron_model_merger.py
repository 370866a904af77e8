"""Established path of the merger of Megatron checkpoints; see ``verl.model_merger.megatron``."""

from verl.model_merger.base_model_merger import BaseModelMerger


class MegatronModelMerger(BaseModelMerger):
    """Merges a checkpoint that Megatron-Core wrote."""

    backend = "megatron"
