"""Established path of the merger of FSDP checkpoints; see ``verl.model_merger.fsdp``."""

from verl.model_merger.base_model_merger import BaseModelMerger


class FSDPModelMerger(BaseModelMerger):
    """Merges a checkpoint that FSDP wrote."""

    backend = "fsdp"
