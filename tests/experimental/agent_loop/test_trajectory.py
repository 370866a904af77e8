"""Trajectories: what is appended, what does not fit, and what the engine saw otherwise."""

import pytest

from verl.experimental.agent_loop.trajectory import ToolCall, Trajectory, turn_seed
from verl.workers.rollout.server import TokenOutput

IMAGE = 9  # the tokenizer writes it once, the engine four times


def test_turns_of_a_conversation() -> None:
    trajectory = Trajectory([1, 2], limit=8)
    turn = trajectory.sampled(TokenOutput([3, 4], [-0.1, -0.2], "stop", [(5, 1), (6, 1)]), seconds=0.5)
    assert (turn.role, turn.start, turn.end, turn.seconds, turn.finish_reason) == ("assistant", 0, 2, 0.5, "stop")
    assert turn.versions == [(5, 1), (6, 1)] and trajectory.room == 6
    call = ToolCall("add", "{}", seconds=0.25, text="7")
    assert trajectory.add("tool", [5, 6, 7], seconds=0.25, calls=[call], text="7")
    assert not trajectory.add("user", [8] * 4)
    assert trajectory.room == 3 and trajectory.token_ids == [1, 2, 3, 4, 5, 6, 7]
    trajectory.sampled(TokenOutput([8, 8, 8], [-1.0, -2.0, -3.0], "length"))
    assert trajectory.room == 0
    output = trajectory.output(reward_score=1.0, extra_fields={"turn_scores": []})
    assert output.prompt_ids == [1, 2] and output.response_ids == [3, 4, 5, 6, 7, 8, 8, 8]
    assert output.response_mask == [1, 1, 0, 0, 0, 1, 1, 1]
    assert output.response_logprobs == [-0.1, -0.2, 0, 0, 0, -1.0, -2.0, -3.0]
    assert [(turn.role, turn.start, turn.end) for turn in output.turns] == [
        ("assistant", 0, 2),
        ("tool", 2, 5),
        ("assistant", 5, 8),
    ]
    assert output.turns[1].calls == [call] and output.num_turns == 4 and output.reward_score == 1.0
    assert (output.metrics.generate_sequences, output.metrics.tool_calls) == (0.5, 0.25)
    assert output.multi_modal_data is None


def test_a_turn_without_log_probabilities_leaves_none() -> None:
    trajectory = Trajectory([1], limit=4)
    trajectory.sampled(TokenOutput([2], [-0.5]))
    trajectory.sampled(TokenOutput([3]))
    trajectory.sampled(TokenOutput([4], [-0.5]))
    assert trajectory.output().response_logprobs is None


def test_outputs_that_do_not_belong_to_the_trajectory() -> None:
    trajectory = Trajectory([1], limit=2)
    with pytest.raises(ValueError, match="3 tokens were sampled, the response has room for 2"):
        trajectory.sampled(TokenOutput([2, 3, 4]))
    with pytest.raises(ValueError, match="2 tokens were sampled, with 1 log-probabilities"):
        trajectory.sampled(TokenOutput([2, 3], [-0.5]))
    assert trajectory.token_ids == [1] and not trajectory.turns


def test_images_have_all_their_tokens_in_the_rows_and_one_in_the_request() -> None:
    trajectory = Trajectory([1, IMAGE], limit=20, multi_modal_data={"image": ["first"]})
    trajectory.sampled(TokenOutput([2], [-0.5], expanded_prompt_ids=[1, *[IMAGE] * 4]))
    assert trajectory.add("tool", [3, IMAGE, 4], images=["second"], expanded_ids=[3, *[IMAGE] * 4, 4])
    assert trajectory.token_ids == [1, IMAGE, 2, 3, IMAGE, 4] and trajectory.room == 20 - 7
    whole = [1, *[IMAGE] * 4, 2, 3, *[IMAGE] * 4, 4]
    trajectory.sampled(TokenOutput([5], [-0.5], expanded_prompt_ids=whole))
    output = trajectory.output()
    assert output.prompt_ids == whole[:5] and output.response_ids == [*whole[5:], 5]
    assert output.response_mask == [1, 0, 0, 0, 0, 0, 0, 1]
    assert output.multi_modal_data == {"image": ["first", "second"]}
    with pytest.raises(ValueError, match="1 images come without the tokens"):
        trajectory.add("tool", [3, IMAGE], images=["third"])
    with pytest.raises(ValueError, match="the engine made 4 tokens of the prompt and its images"):
        trajectory.sampled(TokenOutput([5], [-0.5], expanded_prompt_ids=[*whole[1:], 5]))


def test_each_turn_has_its_seed() -> None:
    seeds = [turn_seed(seed, turn) for seed in (0, 7) for turn in range(50)]
    assert turn_seed(7, 0) == 7 and len(set(seeds)) == len(seeds)
    assert turn_seed(7, 3) == turn_seed(7, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
