"""When a selection looks at new log-probabilities, and what names a token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.algos.policy_loss import token_keys
from verl.protocol import DataProto
from verl.utils.numerics.seeding import sampling_seeds
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.passes import PassSpec
from verl.workers.roles.batching import OLD_LOG_PROBS_VERSION
from verl.workers.roles.losses import SELECTION, row_seeds, select_tokens

ROWS, WIDTH = 4, 6


def batch(**meta: Any) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor([[6], [2], [0], [4]])).long()
    return DataProto.from_dict(
        tensors={
            "responses": torch.randint(1, 90, (ROWS, WIDTH), generator=generator) * mask,
            "response_mask": mask,
            "old_log_probs": -torch.rand(ROWS, WIDTH, generator=generator),
            "advantages": torch.randn(ROWS, WIDTH, generator=generator),
            "sampling_seed": sampling_seeds(1, 1, ROWS, 1),
        },
        meta_info=meta,
    )


class Engine:
    """An engine whose log-probabilities are the old ones in reverse, and which counts how often it is asked."""

    weights_version = 7

    def __init__(self) -> None:
        self.asked: list[PassSpec] = []

    def infer_batch(self, data: DataProto, spec: PassSpec) -> dict[str, torch.Tensor]:
        self.asked.append(spec)
        return {"log_probs": batch().batch["old_log_probs"].flip(0)}

    def get_data_parallel_group(self) -> None:
        return None


def config(loss: str) -> FSDPActorConfig:
    return FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=loss, kl_cov_ratio=0.25)
    )


def chosen(data: DataProto, engine: Engine, draw: int = 0) -> list[list[int]]:
    select_tokens(config("kl_cov"), engine, data, draw)
    selection: list[list[int]] = data.batch[SELECTION].nonzero().tolist()
    return selection


def highest(log_probs: torch.Tensor) -> list[list[int]]:
    """The three of the twelve tokens with the highest covariance."""
    data = batch().batch
    keep = data["response_mask"].bool()
    pair = [value - value[keep].mean() for value in (log_probs, data["advantages"])]
    covariance = (pair[0] * pair[1]).masked_fill(~keep, -torch.inf)
    return sorted([index // WIDTH, index % WIDTH] for index in covariance.flatten().topk(3).indices.tolist())


def test_old_log_probs_serve_as_long_as_the_weights_stay() -> None:
    engine, old = Engine(), batch().batch["old_log_probs"]
    assert chosen(batch(**{OLD_LOG_PROBS_VERSION: 7}), engine) == highest(old) and not engine.asked
    assert chosen(batch(**{OLD_LOG_PROBS_VERSION: 6}, calculate_entropy=True), engine) == highest(old.flip(0))
    assert engine.asked[-1].entropy == "none"
    assert chosen(batch(), engine) == highest(old.flip(0)) and len(engine.asked) == 2
    on_policy = batch(**{OLD_LOG_PROBS_VERSION: 7})
    del on_policy.batch["old_log_probs"]
    assert chosen(on_policy, engine) == highest(old.flip(0)) != highest(old)


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "sapo"])
def test_other_losses_select_nothing(loss: str) -> None:
    data, engine = batch(), Engine()
    select_tokens(config(loss), engine, data)
    assert SELECTION not in data.batch.keys() and not engine.asked


def test_each_pass_draws_anew() -> None:
    """Where all covariances are the same, chance alone decides."""
    found = []
    for draw in (0, 0, 1):
        data = batch(**{OLD_LOG_PROBS_VERSION: 7})
        data.batch["advantages"] = torch.ones(ROWS, WIDTH)
        found.append(chosen(data, Engine(), draw))
    assert found[0] == found[1] != found[2]


def test_a_row_without_seed_is_named_by_its_tokens() -> None:
    data = batch()
    assert torch.equal(row_seeds(data), data.batch["sampling_seed"])
    del data.batch["sampling_seed"]
    seeds = row_seeds(data)
    assert seeds.unique().numel() == ROWS
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(row_seeds(data.select_idxs(order)), seeds[order])
    wide = SimpleNamespace(
        batch={name: torch.nn.functional.pad(data.batch[name], (0, 2)) for name in ("responses", "response_mask")}
    )
    assert torch.equal(row_seeds(wide), seeds)


def splitmix64(value: int) -> int:
    value %= 1 << 64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return value ^ (value >> 31)


def test_the_keys_of_tokens_are_those_of_splitmix64() -> None:
    seeds = torch.cat([sampling_seeds(3, 4, 5, 1), torch.tensor([-7, 0, -(1 << 63)])])
    for draw in (0, 3):
        rows = [splitmix64(seed + (draw + 1) * 0xBF58476D1CE4E5B9) for seed in seeds.tolist()]
        places = [column * 0x9E3779B97F4A7C15 for column in range(1, WIDTH + 1)]
        want = [[splitmix64(row + place) & ((1 << 63) - 1) for place in places] for row in rows]
        assert token_keys(seeds, WIDTH, draw).tolist() == want
