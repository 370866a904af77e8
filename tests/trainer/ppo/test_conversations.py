"""Conversations in dumps, samples and metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.tiny_model import byte_tokenizer
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, ToolCall, Trajectory, turn_columns
from verl.protocol import DataProto
from verl.trainer.ppo.conversations import conversations, readable, turn_metrics
from verl.trainer.ppo.records import dump_generations, sample_rows, scored_columns
from verl.trainer.ppo.validation import ValidationSamples, summarise
from verl.workers.rollout.server import TokenOutput

TOKENIZER = byte_tokenizer()
WIDTH = 40


def row(*turns: Any) -> tuple[list[int], list[int], list[dict[str, Any]]]:
    trajectory = Trajectory([1], limit=WIDTH)
    for turn in turns:
        if isinstance(turn, str):
            trajectory.sampled(TokenOutput(TOKENIZER.encode(f"{turn}<|end|>")))
        else:
            text = "".join(f"<|tool|>{call.text}<|end|>" for call in turn)
            trajectory.add("tool", TOKENIZER.encode(f"{text}<|assistant|>"), calls=turn)
    output = trajectory.output()
    return output.response_ids, output.response_mask, turn_columns(output.turns)


@pytest.fixture
def batch() -> DataProto:
    rows = [
        row(
            "add",
            [ToolCall("add", "{}", "ok", 0.5, 1.0, "7"), ToolCall("ad", "{}", "unknown_tool", 0.0, None, "?")],
            "7",
        ),
        row("wait", [ToolCall("add", "{}", "timeout", 2.5, None, "late")]),
        row("7"),
    ]
    padded = torch.tensor([ids + [TOKENIZER.pad_token_id] * (WIDTH - len(ids)) for ids, _, _ in rows])
    mask = torch.tensor([mask + [0] * (WIDTH - len(mask)) for _, mask, _ in rows])
    attended = torch.tensor([[1] * (1 + len(ids)) + [0] * (WIDTH - len(ids)) for ids, _, _ in rows])
    tensors = {"prompts": padded[:, :1], "responses": padded, "response_mask": mask, "attention_mask": attended}
    scores = torch.zeros(3, WIDTH)
    scores[0, 0] = 1.0
    columns = {
        TURNS_COLUMN: np.fromiter([turns for _, _, turns in rows], dtype=object, count=3),
        "reward_model": np.array([{"ground_truth": "7"}] * 3, dtype=object),
        "uid": np.array(["a", "b", "c"], dtype=object),
        "data_source": np.array(["sums"] * 3, dtype=object),
        "__num_turns__": np.array([4, 3, 2]),
    }
    return DataProto.from_dict(tensors | {"token_level_scores": scores}, columns)


def test_turns_have_texts_calls_and_sizes(batch: DataProto) -> None:
    first, second, third = conversations(batch, TOKENIZER)
    assert [(turn["role"], turn["text"], turn["tokens"]) for turn in first] == [
        ("assistant", "add", 4),
        ("tool", "7\n?", 7),
        ("assistant", "7", 2),
    ]
    assert first[1]["calls"][1]["outcome"] == "unknown_tool"
    assert readable(second) == "[assistant] wait\n[tool] late" and readable(third) == "[assistant] 7"
    batch.non_tensor_batch[TURNS_COLUMN][2] = None  # of a loop that keeps none
    assert conversations(batch, TOKENIZER)[2] is None
    del batch.non_tensor_batch[TURNS_COLUMN]
    assert conversations(batch, TOKENIZER) is None and turn_metrics(batch) == {}


def test_metrics_of_calls_and_tokens(batch: DataProto) -> None:
    assert turn_metrics(batch) == {
        "tool_calls/count": 3,
        "tool_calls/failed": 2,
        "tool_calls/timeout": 1,
        "tool_calls/bad_arguments": 0,
        "tool_time/mean": 1.0,
        "tool_time/max": 2.5,
        "tokens/model": 4 + 2 + 5 + 2,
        "tokens/tool": 7 + 7,
        "tokens/user": 0,
    }
    assert turn_metrics(batch[2:])["tool_calls/count"] == 0 and "tool_time/mean" not in turn_metrics(batch[2:])


def test_dumps_samples_and_validation_show_the_turns(batch: DataProto, tmp_path: Path) -> None:
    columns = scored_columns(batch, TOKENIZER, {}, [2, 0, 1])
    extras = columns.pop("reward_extra_infos_dict")
    path = dump_generations(str(tmp_path), 1, *columns.values(), extras)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["turns"]) for line in lines] == [1, 3, 2]
    assert lines[1]["turns"][1]["calls"][0]["name"] == "add"
    sampled = {each["uid"]: each for each in sample_rows(batch, TOKENIZER, 3, None)}
    assert [turn["role"] for turn in sampled["a"]["turns"]] == ["assistant", "tool", "assistant"]
    assert sampled["b"]["turns"][1] == {"role": "tool", "text": "late", "tokens": 7, "seconds": 0.0} | {
        "calls": [{"name": "add", "arguments": "{}", "outcome": "timeout", "seconds": 2.5, "reward": None}]
    }
    assert "turns" not in sampled["c"]  # one turn says no more than the response
    shown = {uid: each["response"] for uid, each in sampled.items()}
    assert shown == {"a": "[assistant] add\n[tool] 7\n?\n[assistant] 7", "b": "[assistant] wait\n[tool] late", "c": "7"}
    samples = ValidationSamples()
    samples.add(batch, [1.0, 0.0, 0.0], {}, TOKENIZER)
    assert samples.shown == [shown[uid] for uid in "abc"]
    assert [len(talk) for talk in samples.columns["turns"]] == [3, 2, 1]
    assert summarise(samples)["val-aux/num_turns/mean"] == 3.0
