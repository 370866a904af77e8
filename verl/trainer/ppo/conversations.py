"""The turns of a batch in readable form, for dumps, samples and metrics."""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.experimental.agent_loop.segments import EARLIER_COLUMN
from verl.experimental.agent_loop.trajectory import MODEL, TURNS_COLUMN
from verl.protocol import DataProto, tensors_of


class Call(TypedDict):
    """A tool call of ``TURNS_COLUMN``, the fields of ``ToolCall``."""

    name: str
    arguments: str
    outcome: str
    seconds: float
    reward: float | None
    text: str


class Spoken(TypedDict):
    """A turn of ``TURNS_COLUMN`` in a form for people: the tokens ``start`` to ``end`` of the response."""

    role: str
    start: int
    end: int
    text: str | None
    calls: list[Call]
    seconds: float


class ShownTurn(TypedDict):
    """A turn in readable form, with its number of tokens."""

    role: str
    text: str
    tokens: int
    seconds: float
    calls: NotRequired[list[Call]]


Conversation = list[ShownTurn]
"""The turns after the prompt."""
_READ = ("prompts", "responses", "attention_mask")
_BY_ROLE = {MODEL: "model", "tool": "tool", "user": "user"}


def conversations(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[Conversation | None] | None:
    """Return the conversation of each row, None where the loop keeps no turns; None if no row has any.

    The conversation of a trajectory has all of its segments; a turn ``segment`` shows the prompt of each further one.
    """
    columns = batch.non_tensor_batch
    if TURNS_COLUMN not in columns and EARLIER_COLUMN not in columns:
        return None
    tensors = tensors_of(batch)
    found: list[Conversation | None] = []
    for row, before in enumerate(columns.get(EARLIER_COLUMN, [None] * len(batch))):
        turns = columns[TURNS_COLUMN][row] if TURNS_COLUMN in columns else None
        own = None if turns is None else [_shown(turn, tensors["responses"][row].tolist(), tokenizer) for turn in turns]
        if before is None:
            found.append(own)
            continue
        segments = _parts(before["tensors"], before["columns"].get(TURNS_COLUMN), tokenizer)
        last = {name: tensors[name][row : row + 1] for name in _READ}
        segments += _parts(last, [turns], tokenizer)
        talk = list(segments[0][1])
        for prompt, later in segments[1:]:
            talk += [prompt, *later]
        found.append(talk)
    return found


def _parts(
    tensors: Mapping[str, Tensor], turns: Sequence[list[Spoken] | None] | None, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[ShownTurn, Conversation]]:
    """Return the prompt of each segment as a turn, and its conversation."""
    found = []
    width = tensors["prompts"].shape[1]
    for row, attended in enumerate(tensors["attention_mask"].bool()):
        prompt = tensors["prompts"][row][attended[:width]].tolist()
        response = tensors["responses"][row].tolist()
        size = int(attended[width:].sum())
        known = None if turns is None else turns[row]
        if known is None:  # the loop keeps no turns
            known = [{"role": MODEL, "start": 0, "end": size, "text": None, "calls": [], "seconds": 0.0}]
        text = str(tokenizer.decode(prompt, skip_special_tokens=True))
        start: ShownTurn = {"role": "segment", "text": text, "tokens": len(prompt), "seconds": 0.0}
        found.append((start, [_shown(turn, response, tokenizer) for turn in known]))
    return found


def _shown(turn: Spoken, response: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> ShownTurn:
    tokens = list(response[turn["start"] : turn["end"]])
    text = turn["text"]
    if turn["calls"]:
        text = "\n".join(call["text"] for call in turn["calls"])
    if text is None:
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    shown: ShownTurn = {"role": turn["role"], "text": text, "tokens": len(tokens), "seconds": turn["seconds"]}
    if turn["calls"]:
        shown["calls"] = turn["calls"]
    return shown


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
        "tool_calls/bad_arguments": outcomes.count("bad_arguments"),
    }
    if calls:
        seconds = [call["seconds"] for call in calls]
        metrics |= {"tool_time/mean": float(np.mean(seconds)), "tool_time/max": max(seconds)}
    return metrics | {f"tokens/{name}": count for name, count in tokens.items()}
