"""All requests have a seed where several ranks sample them: vLLM would draw one on each rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.rollout import tiny
from verl.utils.numerics.seeding import RequestSeeds
from verl.workers.rollout.vllm_rollout.requests import VLLMRequestForm
from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout

pytest.importorskip("vllm")


def form_of(ranks: int, drawn: list[int]) -> VLLMRequestForm:
    def draw() -> int:
        drawn.append(7)
        return 7

    config = tiny.rollout_config("vllm", tensor_model_parallel_size=ranks)
    return VLLMRequestForm(config, SimpleNamespace(eos_token_id=tiny.EOS), 64, tiny.VOCABULARY, draw)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("asked", "seed", "draws"),
    [({"seed": 5}, 5, 0), ({"seed": None}, 7, 1), ({}, 7, 1), ({"seed": -1}, 7, 1), ({"seed": 0}, 0, 0)],
)
def test_requests(ranks: int, asked: dict[str, Any], seed: int, draws: int) -> None:
    drawn: list[int] = []
    assert form_of(ranks, drawn).params(tiny.request({"temperature": 1.0, **asked})).seed == seed
    assert len(drawn) == draws


@pytest.mark.parametrize(("ranks", "seed"), [(1, None), (2, 0)])
def test_the_most_likely_tokens_take_no_drawn_seed(ranks: int, seed: int | None) -> None:
    """A seed that is drawn for them would change those of the requests after them."""
    drawn: list[int] = []
    params = form_of(ranks, drawn).params(tiny.request({"temperature": 0.0, "seed": -1}))
    assert params.seed == seed and drawn == []
    assert params.sampling_type.name == "GREEDY"  # no generator is made, so nothing else than without a seed happens


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches(ranks: int) -> None:
    rollout: Any = vLLMRollout.__new__(vLLMRollout)
    rollout.config = tiny.rollout_config("vllm", tensor_model_parallel_size=ranks)
    rollout.seeds = RequestSeeds(1)

    def seeds(**meta: Any) -> list[int | None]:
        prompts = tiny.prompts_batch(3, **meta)
        prompts.batch["sampling_seed"] = torch.tensor([5, -1, 0])
        return [params.seed for params in rollout._sampling_params(prompts)]

    first, second = seeds(), seeds()
    assert (first[0], first[2]) == (second[0], second[2]) == (5, 0)
    assert first[1] is not None and second[1] is not None and first[1] != second[1]
    rollout.seeds = RequestSeeds(1)
    assert seeds() == first  # all ranks draw the same
    assert seeds(do_sample=False) == ([None] * 3 if ranks == 1 else [0] * 3)
