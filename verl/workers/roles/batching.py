"""From the batch sizes of the configuration, which are global and in prompts, to what one rank cuts its shard into."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig, CriticConfig


@dataclass(frozen=True)
class Cut:
    """How a rank cuts a batch: the keys that an engine reads from ``meta_info``."""

    use_dynamic_bsz: bool
    micro_batch_size_per_gpu: int | None
    max_token_len_per_gpu: int

    @classmethod
    def for_training(cls, config: "ActorConfig | CriticConfig", dp_size: int = 1) -> Self:
        """Return how a mini-batch is cut, by the keys of an actor's or critic's node."""
        micro_batch_size = per_rank_micro_batch(
            config.ppo_micro_batch_size_per_gpu, config.ppo_micro_batch_size, dp_size
        )
        return cls(config.use_dynamic_bsz, micro_batch_size, config.ppo_max_token_len_per_gpu)

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


def policy_update_meta(config: "ActorConfig", data: "DataProto", cut: Cut, temperature: float) -> dict[str, Any]:
    """Return what an engine needs to know of a policy update.

    Without ``old_log_probs`` the update is on-policy, and what the skipped pass would have told is measured in it.
    """
    assert data.batch is not None
    on_policy = "old_log_probs" not in data.batch.keys()
    return cut.as_meta() | {
        "temperature": temperature,
        "calculate_entropy": on_policy or bool(config.entropy_coeff),
        "entropy_needs_grad": bool(config.entropy_coeff),
        "calculate_full_kl": config.uses_full_kl,
    }


def temperature_of(data: "DataProto") -> float:
    """Return the temperature at which the responses were sampled.

    Raises: ValueError when the batch does not say it.
    """
    if "temperature" not in data.meta_info:
        raise ValueError("the batch's meta_info lacks temperature: write that of the rollout, or 1.0")
    return float(data.meta_info["temperature"])


def given_cut(data: "DataProto") -> Cut:
    """Return how the caller of a bare actor or critic has asked for its batch to be cut.

    Raises: ValueError naming the key of ``meta_info`` that is missing.
    """
    meta = data.meta_info
    dynamic = bool(meta.get("use_dynamic_bsz", False))
    needed = "max_token_len" if dynamic else "micro_batch_size"
    if not meta.get(needed):
        raise ValueError(f"the batch's meta_info lacks {needed}: with use_dynamic_bsz={dynamic} it says how to cut")
    return Cut(dynamic, meta.get("micro_batch_size"), meta.get("max_token_len", 0))


def with_meta(data: "DataProto", **meta: Any) -> "DataProto":
    """Return the same rows under more ``meta_info``."""
    return type(data)(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info={**data.meta_info, **meta})
