"""Trajectories of several segments: what an agent loop returns, and the row that carries them."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout import tiny
from verl.experimental.agent_loop.base import AgentLoopMetrics, AgentLoopOutput, Turn
from verl.experimental.agent_loop.rows import joined, rows_of
from verl.experimental.agent_loop.segments import EARLIER_COLUMN, last_segment
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, turn_columns


def segment(prompt: list[int], response: list[int], mask: list[int] | None = None, **fields: Any) -> AgentLoopOutput:
    mask = [1] * len(response) if mask is None else mask
    log_probs = [-0.5 * each for each in mask]
    return AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=mask, response_logprobs=log_probs, **fields
    )


def test_the_last_segment_holds_the_others() -> None:
    seconds = AgentLoopMetrics(generate_sequences=1.5, tool_calls=0.5)
    parts = [segment([5], [1], metrics=seconds), segment([6], [2], [0]), segment([7], [3, 4], metrics=seconds)]
    last = last_segment(parts)
    assert last.response_ids == [3, 4] and [each.response_ids for each in last.earlier] == [[1]]
    assert last.extra_fields == {"segments": 2, "cut_segments": 0}, "nothing was sampled in the second one"
    assert last.metrics == AgentLoopMetrics(generate_sequences=3.0, tool_calls=1.0)
    assert last_segment(parts[0]) is parts[0]
    assert last_segment(parts[:1]).extra_fields == {"segments": 1} and not last_segment(parts[:1]).earlier
    assert last_segment([parts[0], parts[1]]).response_ids == [1], "the last one in which the model has said something"
    assert last_segment([parts[1], parts[1]]).extra_fields["segments"] == 1
    with pytest.raises(ValueError, match="empty list"):
        last_segment([])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "run returned NoneType: it must return an AgentLoopOutput"),
        ({"prompt_ids": [1]}, "run returned dict: it must"),
        ((segment([1], [2]), 0.5), "run returned float in its list: it must"),
        ([], "returned an empty list"),
    ],
)
def test_what_is_no_output_is_named(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        last_segment(given)


def test_a_later_prompt_that_is_too_long_continues_in_the_response() -> None:
    turns = [Turn("assistant", 0, 2)]
    long = segment([1, 2, 3, 4, 5], [6, 7], turns=turns, extra_fields={TURNS_COLUMN: turn_columns(turns)})
    last = last_segment([segment([1], [2]), long], prompt_length=3, response_length=4)
    assert (last.prompt_ids, last.response_ids, last.response_mask) == ([1, 2, 3], [4, 5, 6, 7], [0, 0, 1, 1])
    assert last.response_logprobs == [0, 0, -0.5, -0.5] and last.extra_fields["cut_segments"] == 0
    assert (last.turns[0].start, last.extra_fields[TURNS_COLUMN][0]["end"]) == (2, 4)
    cut = last_segment([segment([1], [2]), long], prompt_length=3, response_length=3)
    assert cut.extra_fields == last.extra_fields | {"cut_segments": 1} and len(cut.earlier) == 1
    lost = last_segment([segment([1], [2]), long], prompt_length=3, response_length=2)
    assert lost.response_ids == [2] and lost.extra_fields == {"segments": 1, "cut_segments": 1}


def test_a_row_carries_the_rows_of_earlier_segments() -> None:
    asked = tiny.prompts_batch(3)
    prompts = [list(row) for row in asked.non_tensor_batch["raw_prompt_ids"]]
    first = segment(prompts[1], [7, 8], [1, 0], extra_fields={"seen": 1}, reward_score=0.25)
    parts = [first, segment([4, 5], [9], extra_fields={"seen": 2}), segment([6], [9, 9], reward_score=1.0)]
    outputs = [segment(prompts[0], [7], reward_score=0.0), last_segment(parts, tiny.PROMPT_LENGTH, 4), None]
    found = joined([rows_of(outputs[:1], asked[:1], 4, 0), rows_of(outputs[1:], asked[1:], 4, 0)])
    assert len(found) == 3 and found.batch["rm_scores"].sum(-1).tolist() == [0, 1, 0]
    assert found.batch["responses"][1].tolist() == [9, 9, 0, 0]
    none, before, dropped = found.non_tensor_batch[EARLIER_COLUMN]
    assert none is None and dropped is None and before["scores"] == [0.25, None]
    assert before["columns"] == {"seen": [1, 2]}
    tensors = before["tensors"]
    assert "rm_scores" not in tensors
    assert torch.equal(tensors["prompts"][0], asked.batch["input_ids"][1])
    assert tensors["prompts"][1].tolist()[-3:] == [0, 4, 5] and tensors["responses"][0].tolist() == [7, 8, 0, 0]
    assert tensors["response_mask"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert tensors["rollout_log_probs"].tolist() == [[-0.5, 0, 0, 0], [-0.5, 0, 0, 0]]
    single = rows_of(outputs[:1], asked[:1], 4, 0)
    assert EARLIER_COLUMN not in single.non_tensor_batch
    wrong = last_segment([segment([1], [2], [2]), segment([1], [2])])
    with pytest.raises(ValueError, match="trajectory 1: response_mask"):
        rows_of([outputs[0], wrong], asked[:2], 4, 0)
    assert isinstance(found.non_tensor_batch[EARLIER_COLUMN], np.ndarray)
