"""The versions of the weights that sampled a response, also from a vLLM that does not tell them."""

from types import SimpleNamespace
from typing import Any

import pytest

from verl.workers.rollout.vllm_rollout.requests import token_output


def output(tokens: int, **told: Any) -> Any:
    sample = SimpleNamespace(token_ids=[5] * tokens, logprobs=None, finish_reason="length", **told)
    return SimpleNamespace(outputs=[sample], metrics=None, num_cached_tokens=0, prompt_token_ids=[1])


@pytest.mark.parametrize(
    ("answer", "version", "expected"),
    [
        (output(3), 7, [(7, 3)]),  # vLLM 0.28 to 0.31: the caller knows that no other weights have sampled
        (output(3), None, []),  # it does not: the weights changed meanwhile
        (output(0), 7, []),
        (output(3, weight_versions=[SimpleNamespace(version="6", start=0, end=1)]), 7, [(6, 1)]),
        (output(0, weight_versions=[]), 7, []),
        (output(2, weight_versions=None), 7, [(7, 2)]),
    ],
)
def test_versions(answer: Any, version: int | None, expected: list[tuple[int, int]]) -> None:
    params: Any = SimpleNamespace(logprobs=None)
    assert token_output(answer, {}, params, 0.0, 1.0, version).versions == expected
