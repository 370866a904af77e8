"""Mini-batches and micro-batches of one rank, and the options of its passes.

Batch sizes in the configuration are global and count prompts; a rank works on its shard and counts rows.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from verl.errors import ContractError, WrongInput
from verl.protocol import OLD_LOG_PROBS_VERSION, tensors_of
from verl.workers.engine.passes import PassSpec

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.config import ActorConfig, CriticConfig


NUM_TRAJECTORIES = "num_trajectories"
"""Key of ``meta_info``, see ``BatchInfo``."""


@dataclass(frozen=True)
class BatchInfo:
    """Information about a batch from its ``meta_info``, apart from the options of a pass (``PassSpec.from_meta``).

    Args:
        step: the global step.
        token_counts: tokens of every row of the global batch.
        image_lengths: patches of every image of the global batch.
        without_adapter: infer with the base model of a LoRA policy.
        num_trajectories: trajectories of the global batch, if some have several rows.
        old_log_probs_version: the version of the weights that computed ``old_log_probs``.
    """

    step: int | None = None
    token_counts: Sequence[int] = ()
    image_lengths: Sequence[int] = ()
    without_adapter: bool = False
    num_trajectories: int | None = None
    old_log_probs_version: int | None = None

    @classmethod
    def of(cls, data: "DataProto") -> Self:
        """Read the keys of the established verl interface in ``meta_info``."""
        meta = data.meta_info
        return cls(
            step=meta.get("global_steps"),
            token_counts=meta.get("global_token_num") or (),
            image_lengths=meta.get("images_seqlens", ()),
            without_adapter=bool(meta.get("is_lora", False)),
            num_trajectories=meta.get(NUM_TRAJECTORIES),
            old_log_probs_version=meta.get(OLD_LOG_PROBS_VERSION),
        )


def mini_batches_of(
    data: "DataProto", config: "ActorConfig | CriticConfig", rows: int, step: int = 0
) -> Iterator["DataProto"]:
    """Return the mini-batches of all epochs, of ``rows`` each, shuffled by the seed of the node plus the step."""
    seed = step + (config.data_loader_seed or 0)
    return data.make_iterator(rows, config.ppo_epochs, seed, dataloader_kwargs={"shuffle": config.shuffle})


def rows_of_step(data: "DataProto", rows_per_step: int, dp_size: int) -> int:
    """Return the rows of this rank in one optimizer step.

    Args: ``rows_per_step`` are those of a batch with one row per trajectory. If some have several, a pass over the
        batch takes as many steps as it would with one row each.
    Raises: ValueError, which is also an AssertionError, when the rows do not divide by that.
    """
    trajectories = BatchInfo.of(data).num_trajectories
    if trajectories is None:
        return rows_per_step
    steps = max(1, trajectories // (rows_per_step * dp_size))
    if len(data) % steps:
        raise ContractError(f"{len(data)} rows of {trajectories} trajectories do not divide into {steps} mini-batches")
    return len(data) // steps


def per_rank_mini_batch(key: str, mini_batch_size: int, rollout_n: int, dp_size: int) -> int:
    """Return the rows of one rank in one optimizer step.

    Raises: ValueError when the global mini-batch does not divide over the ranks.
    """
    rows = mini_batch_size * rollout_n
    if rows < dp_size or rows % dp_size:
        raise WrongInput(
            f"{key}={mini_batch_size} prompts x {rollout_n} samples = {rows} sequences must be a positive multiple of "
            f"the {dp_size} data-parallel ranks"
        )
    return rows // dp_size


def per_rank_micro_batch(per_gpu: int | None, global_size: int | None, dp_size: int) -> int | None:
    """Return the rows of one forward: the per-device key, or the deprecated global one divided over the ranks."""
    if per_gpu is not None:
        return per_gpu
    return None if global_size is None else max(1, global_size // dp_size)


def training_spec(config: "ActorConfig | CriticConfig", dp_size: int = 1) -> PassSpec:
    """Return how an actor's or critic's node cuts a mini-batch."""
    micro_batch_size = per_rank_micro_batch(config.ppo_micro_batch_size_per_gpu, config.ppo_micro_batch_size, dp_size)
    return PassSpec(config.use_dynamic_bsz, micro_batch_size, config.ppo_max_token_len_per_gpu)


def policy_update_spec(spec: PassSpec, config: "ActorConfig", data: "DataProto", temperature: float) -> PassSpec:
    """Return the options of a policy update, which is cut as ``spec`` says.

    Without ``old_log_probs``, or with those of the rollout, no log-probability pass came before the update. The update
    then returns the entropy in place of that pass.
    """
    is_first = config.use_rollout_log_probs or "old_log_probs" not in tensors_of(data).keys()
    return dataclasses.replace(
        spec,
        temperature=temperature,
        entropy="grad" if config.entropy_coeff else "value" if is_first else "none",
        full_kl=config.uses_full_kl,
    )
