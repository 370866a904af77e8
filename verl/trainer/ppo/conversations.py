"""The turns of a batch as people read them: in dumps, samples and metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.experimental.agent_loop.trajectory import MODEL, TURNS_COLUMN
from verl.protocol import DataProto, tensors_of

Conversation = list[dict[str, Any]]
"""The turns after the prompt: role, text, number of tokens, seconds, and tool calls."""
_BY_ROLE = {MODEL: "model", "tool": "tool", "user": "user"}


def conversations(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[Conversation | None] | None:
    """Return the conversation of each row, None where the loop keeps no turns; None if no row has any."""
    if TURNS_COLUMN not in batch.non_tensor_batch:
        return None
    responses = tensors_of(batch)["responses"]
    column = batch.non_tensor_batch[TURNS_COLUMN]
    return [
        None if turns is None else [_shown(turn, responses[row].tolist(), tokenizer) for turn in turns]
        for row, turns in enumerate(column)
    ]


def _shown(turn: Mapping[str, Any], response: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    tokens = list(response[turn["start"] : turn["end"]])
    text = turn["text"]
    if turn["calls"]:
        text = "\n".join(call["text"] for call in turn["calls"])
    if text is None:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    shown = {"role": turn["role"], "text": text, "tokens": len(tokens), "seconds": turn["seconds"]}
    return shown | ({"calls": turn["calls"]} if turn["calls"] else {})


def readable(conversation: Conversation) -> str:
    """Return a conversation as text, each turn after its role in brackets."""
    return "\n".join(f"[{turn['role']}] {turn['text']}" for turn in conversation)


def turn_metrics(batch: DataProto) -> dict[str, float]:
    """Count the tool calls of a step and its tokens by who wrote them, and time the calls."""
    if TURNS_COLUMN not in batch.non_tensor_batch:
        return {}
    turns = [turn for row in batch.non_tensor_batch[TURNS_COLUMN] for turn in row or ()]
    calls = [call for turn in turns for call in turn["calls"]]
    tokens = dict.fromkeys(_BY_ROLE.values(), 0)
    for turn in turns:
        tokens[_BY_ROLE.get(turn["role"], turn["role"])] += turn["end"] - turn["start"]
    outcomes = [call["outcome"] for call in calls]
    metrics: dict[str, float] = {
        "tool_calls/count": len(calls),
        "tool_calls/failed": sum(outcome != "ok" for outcome in outcomes),
        "tool_calls/timeout": outcomes.count("timeout"),
    }
    if calls:
        seconds = [call["seconds"] for call in calls]
        metrics |= {"tool_time/mean": float(np.mean(seconds)), "tool_time/max": max(seconds)}
    return metrics | {f"tokens/{name}": count for name, count in tokens.items()}
