"""vLLM and SGLang next to each other: after synced updates both score the same tokens as transformers does."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.rollout import tiny
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.sglang_rollout import sglang_rollout
from verl.workers.rollout.sglang_rollout.sglang_server import HybridSGLangServer
from verl.workers.sharding_manager import build_sharding_manager

pytestmark = pytest.mark.full

CONTEXT, RESPONSE_LENGTH, ROWS = 64, 51, 100
"""200 responses of 51 tokens, half of them by each engine; with their prompts more than 10,000 tokens are scored."""
MEAN, MAXIMUM = 1e-5, 1e-4
"""Of log-probabilities of about 7, after two layers in fp32."""
STEP = 1e-3
"""The change of each weight in the update that an engine misses."""


class ScoringServer(HybridSGLangServer):
    """The actor of the engine, which returns log-probabilities of prompts, too."""

    async def score(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the log-probability of each token but the first."""
        asked = asyncio.gather(
            *(
                self._engine._engine.async_generate(
                    input_ids=row, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
                )
                for row in rows
            )
        )
        results = await self._ask(asked, "log-probabilities of prompts")
        return [[entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]] for result in results]


def scores_of_sglang(rollout: Any, rows: list[list[int]]) -> list[list[float]]:
    import ray

    asyncio.run(rollout.resume(["kv_cache"]))  # it waits between two phases
    return ray.get(rollout.server.score.remote(rows))


def scores_of_vllm(rollout: Any, rows: list[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = rollout._llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
        for output, row in zip(outputs, rows, strict=True)
    ]


SCORES = {"vllm": scores_of_vllm, "sglang": scores_of_sglang}


@dataclass
class Engines:
    """A model that trains, and an engine of each kind that follows it."""

    model: Any
    rollouts: dict[str, BaseRollout]
    managers: dict[str, Any]

    def update(self, size: float, seed: int) -> None:
        """Change every weight, as a step of training does."""
        tiny.disturb(self.model, size, seed)
        for rollout in self.managers.values():
            rollout.engine.weights_version += 1

    def sync(self, *names: str) -> None:
        """Send the weights to these engines as the trainer does, or to all that are behind."""
        for name in names or [name for name, manager in self.managers.items() if manager.is_behind]:
            with self.managers[name] as manager:
                assert manager.last_sync["checksum_ok"] == 1 and manager.last_sync["buckets"] > 1


@pytest.fixture(scope="module")
def engines(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    for name in SCORES:
        pytest.importorskip(name)
    model = tiny.build_model()
    rollouts: dict[str, BaseRollout] = {}
    settings = {"max_model_len": CONTEXT, "response_length": RESPONSE_LENGTH, "ignore_eos": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_rollout, "HybridSGLangServer", ScoringServer)
        for name in SCORES:
            rollouts[name] = tiny.start_rollout(name, model, tmp_path_factory.mktemp(name), **settings)
    managers = {name: build_sharding_manager(tiny.TrainerStandIn(model), rollout) for name, rollout in rollouts.items()}
    for manager in managers.values():
        manager.bucket_bytes = 1 << 18
    yield Engines(model, rollouts, managers)
    for rollout in rollouts.values():
        rollout.shutdown()


@torch.no_grad()
def scores_of_transformers(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Row by row: nothing is padded."""
    found = []
    for row in rows:
        log_probs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(-1, torch.tensor(row[1:])[:, None])[:, 0])
    return found


def gaps(found: list[list[float]], expected: list[Tensor]) -> Tensor:
    """Return the differences of all tokens."""
    return torch.cat([(torch.tensor(one) - other).abs() for one, other in zip(found, expected, strict=True)])


def check_agreement(what: str, gap: Tensor, tokens: int) -> None:
    """Raise AssertionError where an engine and transformers differ by more than rounding."""
    print(f"{what}: {len(gap):,} tokens, mean {gap.mean():.1e}, maximum {gap.max():.1e}")
    assert len(gap) >= tokens
    assert gap.mean() < MEAN and gap.max() < MAXIMUM


def sampled(rollout: BaseRollout, model: Any, seed: int) -> tuple[list[list[int]], Tensor]:
    """Return prompts with responses, and how far the log-probabilities that came with these are from transformers'."""
    prompts = tiny.prompts_batch(ROWS // 4, seed=seed, repeat=4)
    changes = {"response_length": RESPONSE_LENGTH, "max_model_len": CONTEXT, "ignore_eos": True, "temperature": 1.0}
    with tiny.settings(rollout, **changes):
        output = rollout.generate_sequences(prompts)
    asked = [list(prompt) for prompt in prompts.non_tensor_batch["raw_prompt_ids"]]
    responses = tiny.sampled_tokens(output)
    rows = [prompt + response for prompt, response in zip(asked, responses, strict=True)]
    expected = scores_of_transformers(model, rows)
    of_responses = [scores[len(prompt) - 1 :] for prompt, scores in zip(asked, expected, strict=True)]
    return rows, gaps(output.batch["rollout_log_probs"].tolist(), of_responses)


def test_both_score_the_same_tokens_as_transformers_after_three_updates(engines: Engines) -> None:
    """Each engine also samples half of these tokens, after each update."""
    rows: list[list[int]] = []
    for step in range(3):
        engines.update(0.03, seed=step)
        engines.sync()
        found = {name: sampled(rollout, engines.model, seed=step) for name, rollout in engines.rollouts.items()}
        for name, (_, gap) in found.items():
            check_agreement(f"{name} samples after update {step + 1}", gap, tokens=5_000)
        rows = [row for own, _ in found.values() for row in own]
    assert len({tuple(row) for row in rows}) == 2 * ROWS
    expected = scores_of_transformers(engines.model, rows)
    for name, scores in SCORES.items():
        check_agreement(f"{name} scores", gaps(scores(engines.rollouts[name], rows), expected), tokens=10_000)


@pytest.mark.parametrize("left", SCORES)
def test_an_engine_left_unsynced_fails(engines: Engines, left: str) -> None:
    """By a change of the weights that is a hundredth of their size."""
    engines.sync()
    engines.update(STEP, seed=9)
    (other,) = SCORES.keys() - {left}
    engines.sync(other)
    rows = torch.randint(3, tiny.VOCABULARY, (160, CONTEXT - 1), generator=torch.Generator().manual_seed(0)).tolist()
    expected = scores_of_transformers(engines.model, rows)
    found = {name: gaps(scores(engines.rollouts[name], rows), expected) for name, scores in SCORES.items()}
    check_agreement(f"{other}, synced", found[other], tokens=9_000)
    with pytest.raises(AssertionError):
        check_agreement(f"{left}, not synced", found[left], tokens=9_000)
    engines.sync(left)
    gap = gaps(SCORES[left](engines.rollouts[left], rows), expected)
    check_agreement(f"{left}, synced later", gap, tokens=9_000)
