"""From global batch sizes in prompts to what one rank cuts."""

import pytest
import torch

from verl.protocol import DataProto
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.passes import PassSpec
from verl.workers.roles.batching import per_rank_micro_batch, per_rank_mini_batch, rows_of_step, training_spec


@pytest.mark.parametrize(
    ("prompts", "samples", "ranks", "rows"), [(16, 8, 1, 128), (16, 8, 4, 32), (1, 4, 2, 2), (3, 2, 6, 1)]
)
def test_a_mini_batch_is_in_prompts_and_shared_by_the_ranks(prompts: int, samples: int, ranks: int, rows: int) -> None:
    assert per_rank_mini_batch("critic.ppo_mini_batch_size", prompts, samples, ranks) == rows


@pytest.mark.parametrize(("prompts", "samples", "ranks"), [(3, 1, 2), (1, 1, 2), (5, 2, 4)])
def test_a_mini_batch_that_does_not_divide_is_named(prompts: int, samples: int, ranks: int) -> None:
    message = f"critic.ppo_mini_batch_size={prompts}.* {prompts * samples} sequences .*{ranks} data-parallel ranks"
    with pytest.raises(ValueError, match=message):
        per_rank_mini_batch("critic.ppo_mini_batch_size", prompts, samples, ranks)


@pytest.mark.parametrize(
    ("per_gpu", "whole", "ranks", "rows"), [(4, None, 2, 4), (4, 16, 2, 4), (None, 16, 2, 8), (None, 1, 2, 1)]
)
def test_a_micro_batch_of_one_device(per_gpu: int | None, whole: int | None, ranks: int, rows: int) -> None:
    assert per_rank_micro_batch(per_gpu, whole, ranks) == rows


def test_without_a_micro_batch_size_there_is_none() -> None:
    assert per_rank_micro_batch(None, None, 2) is None
    config = FSDPActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=512)
    assert training_spec(config, 2) == PassSpec(use_dynamic_bsz=True, micro_batch_size=None, max_token_len=512)


def test_the_established_keys_make_a_spec() -> None:
    meta = {"micro_batch_size_per_gpu": 2, "temperature": 0.7, "calculate_entropy": True, "other": 1}
    assert PassSpec.from_meta(meta) == PassSpec(micro_batch_size=2, temperature=0.7, entropy="grad")
    assert PassSpec.from_meta(meta | {"entropy_needs_grad": False}).entropy == "value"
    assert PassSpec.from_meta({"use_dynamic_bsz": True, "max_token_len": 8}) == PassSpec(True, None, 8)
    assert PassSpec.from_meta({"calculate_full_kl": True}).full_kl
    with pytest.raises(ValueError, match="max_token_len_per_gpu of 1 or more, got None"):
        PassSpec.from_meta({"use_dynamic_bsz": True})


def test_more_rows_make_the_same_number_of_optimizer_steps() -> None:
    """16 trajectories on 2 ranks, 4 of them in a step of a rank: 2 steps, whatever the number of rows."""
    batch = DataProto.from_dict({"x": torch.zeros(8)})
    assert rows_of_step(batch, 4, 2) == 4
    batch = DataProto.from_dict({"x": torch.zeros(14)}, meta_info={"num_trajectories": 16})
    assert rows_of_step(batch, 4, 2) == 7
    with pytest.raises(ValueError, match="13 rows of 16 trajectories do not divide into 2 mini-batches"):
        rows_of_step(batch[:13], 4, 2)
