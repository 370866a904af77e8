"""A step from scalars of the rows gives what the plain step gives."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.algos.aggregate import agg_loss
from verl.algos.config import AlgoConfig
from verl.algos.kl import FixedKLController
from verl.algos.mismatch import calculate_debug_metrics
from verl.algos.names import ADV_ESTIMATORS
from verl.protocol.lazy import LazyTensor, by_reference, digest_of, fetched, is_lazy, lazy_columns, take_touched
from verl.trainer.ppo import columns, shaping
from verl.trainer.ppo.lengths import lengths_of
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_timing_metrics
from verl.trainer.ppo.phases import RolloutInvariantError, check_rollout
from verl.trainer.ppo.records import length_histogram
from verl.utils.observe.digest import tensor_digest


class Group:
    """Workers that share a process with the test: parts of the rows go through each one after the other."""

    def __init__(self, size: int = 3) -> None:
        self.world_size = size

    def execute_with_func_generator(self, program: Any, data: DataProto) -> DataProto:
        """Run the program on each part, as ``Worker.execute_with_func_generator`` does behind its dispatch."""
        outputs = [program(None, fetched(part)) for part in data.chunk(self.world_size)]
        return DataProto.concat([by_reference(output, put=copy.deepcopy, block_bytes=100) for output in outputs])


def rollout(seed: int, empty_row: bool = False) -> tuple[DataProto, DataProto]:
    """Return requests and a batch after generation and inference, of 8 rows in 4 groups."""
    generator = torch.Generator().manual_seed(seed)
    rows, prompt, width = 8, 4, 6
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    if empty_row:
        lengths[5] = 0
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).long()
    responses = torch.randint(5, 99, (rows, width), generator=generator) * mask
    prompts = torch.randint(5, 99, (rows, prompt), generator=generator)
    padding = torch.randint(0, 3, (rows, 1), generator=generator)
    attended = (torch.arange(prompt) >= padding).long()
    old = -torch.rand(rows, width, generator=generator)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], -1),
        "attention_mask": torch.cat([attended, mask], -1),
        "response_mask": mask,
        "rollout_log_probs": old + 0.1 * torch.randn(rows, width, generator=generator).clamp(max=0),
    }
    later = {
        "old_log_probs": old,
        "ref_log_prob": -torch.rand(rows, width, generator=generator),
        "values": torch.randn(rows, width, generator=generator),
        "entropys": torch.rand(rows, width, generator=generator),
        "token_level_scores": torch.zeros(rows, width).scatter_(
            1, (lengths - 1).clamp(min=0).unsqueeze(-1), torch.randn(rows, 1, generator=generator)
        ),
    }
    uid = np.array([f"p{row // 2}" for row in range(rows)], dtype=object)
    asked = DataProto.from_dict({"input_ids": prompts, "attention_mask": attended}, {"uid": uid})
    batch = DataProto.from_dict(tensors, {"uid": uid}, {"pad_token_id": 0, "eos_token_id": 1})
    batch.batch["reward_baselines"] = torch.randn(rows, generator=generator)
    for name, value in later.items():
        batch.batch[name] = value
    return asked, batch


def stored(group: Group, asked: DataProto, batch: DataProto) -> DataProto:
    lazy = by_reference(batch, put=copy.deepcopy, block_bytes=300)
    columns.describe_rollout(group, asked, lazy, 1, single_turn=True)
    return lazy


def close(found: dict[str, float], expected: dict[str, float], relative: float = 2e-6) -> None:
    """Sums in another order and precision: fp32 sums of 40 numbers of order 1 differ by some 1e-7."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=relative, abs=5e-7), name


@pytest.mark.parametrize("empty_row", [False, True])
@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_a_step_from_scalars_equals_the_plain_step(name: str, empty_row: bool) -> None:
    group = Group()
    asked, plain = rollout(seed=3, empty_row=empty_row)
    lazy = stored(group, asked, plain.select())
    take_touched()
    assert columns.stays_with_workers(lazy)
    assert not columns.stays_with_workers(plain)
    order = torch.tensor([3, 2, 0, 1, 7, 6, 4, 5])
    for data in (plain, lazy):
        data.reorder(order)
    if empty_row and name == "grpo_passk":
        pytest.skip("a single sample that is left has no second best: both refuse it in the same call")
    expected = agg_loss(plain.batch["entropys"], plain.batch["response_mask"], "seq-mean-token-mean").item()
    found = columns.log_prob_metrics(group, lazy, lazy.batch["entropys"], "seq-mean-token-mean", None)
    assert found.pop("actor/entropy") == expected  # the same sums of rows
    close(found, calculate_debug_metrics(plain), 1e-12)
    algorithm = AlgoConfig(
        adv_estimator=name, gamma=0.9, lam=0.8, kl_penalty="low_var_kl", rollout_is=True, rollout_is_threshold=1.05
    )
    results = [
        shaping.apply_kl_penalty(plain, FixedKLController(0.3), "low_var_kl")[1],
        shaping.apply_kl_penalty(lazy, FixedKLController(0.3), "low_var_kl", group)[1],
    ]
    assert results[0] == results[1]
    for level in ("sequence", "token"):
        chosen = AlgoConfig(**{**algorithm, "rollout_is_level": level})
        for data in (plain, lazy):
            data.batch.pop("rollout_is_weights", None)
        plain, expected = shaping.add_rollout_weights(plain, chosen)
        lazy, found = columns.add_rollout_weights(group, lazy, chosen)
        close(found, expected, 1e-12)
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": True})
    plain = shaping.compute_advantage(plain, name, gamma=0.9, lam=0.8, config=config)
    lazy = columns.add_advantages(group, lazy, algorithm, config, name)
    tokens = columns.token_metrics(group, lazy, use_critic=True)
    close(compute_data_metrics(lazy, token_metrics=tokens), compute_data_metrics(plain), 2e-5)
    assert compute_timing_metrics(lazy, {"adv": 1.0, "gen": 2.0}) == compute_timing_metrics(
        plain, {"adv": 1.0, "gen": 2.0}
    )
    assert length_histogram(lazy) == length_histogram(plain)
    assert not take_touched(), "the driver has read a column"
    assert set(lazy_columns(lazy)) == {key for key, value in plain.batch.items() if value.dim() == 2}
    for key in lazy_columns(lazy):
        assert digest_of(lazy.batch[key]) == tensor_digest(plain.batch[key]), key
        backwards = list(range(len(plain)))[::-1]
        assert digest_of(lazy.batch[key], backwards) == tensor_digest(plain.batch[key][backwards])


def test_percentiles_of_many_tokens_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(30, 400, generator=generator) < 0.7).long()
    old = torch.randn(30, 400, generator=generator)
    rollout_log_probs = old + torch.randn(30, 400, generator=generator) * 0.3
    old[0, :20] = rollout_log_probs[0, :20]  # ties
    data = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout_log_probs, "response_mask": mask})
    data.non_tensor_batch[columns.SAMPLED] = mask.sum(-1).numpy()
    found = columns._token_percentiles(Group(4), data, ["old_log_probs", "rollout_log_probs", "response_mask"])
    ratios = (old - rollout_log_probs)[mask.bool()].double().exp()
    expected = torch.quantile(ratios, torch.tensor([0.25, 0.5, 0.75, 0.95, 0.99], dtype=torch.float64))
    assert found == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "row", "column", "value"),
    [("responses", 2, 0, 1), ("response_mask", 4, 0, 0), ("input_ids", 6, 1, 7), ("rollout_log_probs", 1, 0, 1.0)],
)
def test_a_wrong_rollout_is_refused_with_the_words_of_the_plain_check(
    name: str, row: int, column: int, value: float
) -> None:
    asked, batch = rollout(seed=1)
    batch.batch[name][row, column] = value
    with pytest.raises(RolloutInvariantError) as plain:
        check_rollout(asked, batch, 1)
    with pytest.raises(RolloutInvariantError) as lazy:
        stored(Group(), asked, batch)
    assert str(lazy.value) == str(plain.value)


def test_lengths_of_a_batch_that_is_not_described() -> None:
    _, batch = rollout(seed=1)
    lazy = by_reference(batch, put=copy.deepcopy)
    assert is_lazy(lazy)
    assert isinstance(lazy.batch["attention_mask"], LazyTensor)
    for found, expected in zip(lengths_of(lazy), lengths_of(batch), strict=True):
        assert found.tolist() == expected.tolist()


def test_a_response_mask_is_cleared_where_it_lies() -> None:
    group = Group()
    asked, plain = rollout(seed=3)
    lazy = stored(group, asked, plain.select())
    rows = torch.arange(len(plain)) % 3 == 1
    columns.clear_response_mask(group, lazy, rows)
    assert is_lazy(lazy) and lazy.non_tensor_batch[columns.SAMPLED][1] == 0
    expected = plain.batch["response_mask"].masked_fill(rows.unsqueeze(-1), 0)
    assert torch.equal(fetched(lazy.select(["response_mask"])).batch["response_mask"], expected)
