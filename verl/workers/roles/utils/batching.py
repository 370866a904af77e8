"""From the batch sizes of the configuration, which are global and in prompts, to what one rank cuts its shard into."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cut:
    """How a rank cuts a batch: the keys that an engine reads from ``meta_info``."""

    use_dynamic_bsz: bool
    micro_batch_size_per_gpu: int | None
    max_token_len_per_gpu: int

    def as_meta(self) -> dict[str, Any]:
        """Return the keys as ``meta_info`` holds them."""
        return {
            "use_dynamic_bsz": self.use_dynamic_bsz,
            "micro_batch_size_per_gpu": self.micro_batch_size_per_gpu,
            "max_token_len_per_gpu": self.max_token_len_per_gpu,
        }


def per_rank_mini_batch(key: str, mini_batch_size: int, rollout_n: int, dp_size: int) -> int:
    """Return the rows of one rank in one optimizer step.

    Raises: ValueError when the global mini-batch does not divide over the ranks.
    """
    rows = mini_batch_size * rollout_n
    if rows < dp_size or rows % dp_size:
        raise ValueError(
            f"{key}={mini_batch_size} prompts x {rollout_n} samples = {rows} sequences must be a positive multiple of "
            f"the {dp_size} data-parallel ranks"
        )
    return rows // dp_size


def per_rank_micro_batch(per_gpu: int | None, global_size: int | None, dp_size: int) -> int | None:
    """Return the rows of one forward: the per-device key, or the deprecated global one divided over the ranks."""
    if per_gpu is not None:
        return per_gpu
    return None if global_size is None else max(1, global_size // dp_size)
