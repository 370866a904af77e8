"""Trajectories of several segments: a loop that rewrites its history starts a new segment with a new prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
from torch import Tensor

from verl.experimental.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.later_images import LATER_INPUTS
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto, tensors_of
from verl.utils.py_functional import object_array

EARLIER_COLUMN = "__earlier_segments__"
"""The column that holds the segments before the last one as ``EarlierSegments``; None for rows without any."""


class EarlierSegments(TypedDict):
    """The earlier segments of a trajectory, as batch rows.

    ``tensors`` (S, ...) and ``columns`` (S values each) replace those of the last segment. ``scores`` are those that
    the loop gave to segments; None for a segment without one.
    """

    tensors: dict[str, Tensor]
    columns: dict[str, list[Any]]
    scores: list[float | None]


def last_segment(
    outputs: AgentLoopOutput | Sequence[AgentLoopOutput],
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> AgentLoopOutput:
    """Return the last segment of a trajectory, which holds the others as ``earlier``.

    A segment without a sampled token is left out, unless no segment has one. The column ``segments`` counts those that
    are left, and ``cut_segments`` those whose end does not fit their row.

    Args: ``prompt_length`` and ``response_length`` are the widths of a row, None for no limit. The part of a later
        prompt beyond the first prompt goes to the start of the response.
    Raises: ValueError for an empty list; TypeError for anything but an AgentLoopOutput.
    """
    if isinstance(outputs, AgentLoopOutput):
        return outputs
    given = outputs if isinstance(outputs, list | tuple) else [outputs]
    wrong = next((type(each).__name__ for each in given if not isinstance(each, AgentLoopOutput)), None)
    if wrong is not None:
        where = " in its list" if given is outputs else ""
        raise TypeError(f"run returned {wrong}{where}: it must return an AgentLoopOutput, or a list of them")
    if not outputs:
        raise ValueError("the agent loop returned an empty list: return at least one AgentLoopOutput")
    if len(outputs) == 1:
        return outputs[0].model_copy(update={"extra_fields": {**outputs[0].extra_fields, "segments": 1}})
    fitted = [_fitted(output, prompt_length) for output in outputs]
    kept = [output for output in fitted if any(output.response_mask[:response_length])] or fitted[-1:]
    counts = {
        "segments": len(kept),
        "cut_segments": sum(len(each.response_ids[response_length:]) > 0 for each in fitted) if response_length else 0,
    }
    update = {
        "earlier": kept[:-1],
        "reward_score": outputs[-1].reward_score,
        "extra_fields": {**kept[-1].extra_fields, **counts},
        "metrics": AgentLoopMetrics(
            generate_sequences=sum(output.metrics.generate_sequences for output in outputs),
            tool_calls=sum(output.metrics.tool_calls for output in outputs),
        ),
    }
    return kept[-1].model_copy(update=update)


def _fitted(output: AgentLoopOutput, prompt_length: int | None) -> AgentLoopOutput:
    """Move the end of an overlong prompt to the start of the response, masked out of the loss."""
    rest = [] if prompt_length is None else output.prompt_ids[prompt_length:]
    if not rest:
        return output
    size = len(rest)
    extras = dict(output.extra_fields)
    if extras.get(TURNS_COLUMN) is not None:
        extras[TURNS_COLUMN] = [
            {**turn, "start": turn["start"] + size, "end": turn["end"] + size} for turn in extras[TURNS_COLUMN]
        ]
    log_probs = output.response_logprobs
    update = {
        "prompt_ids": output.prompt_ids[:prompt_length],
        "response_ids": [*rest, *output.response_ids],
        "response_mask": [0] * size + list(output.response_mask),
        "response_logprobs": None if log_probs is None else [0.0] * size + list(log_probs),
        "turns": [replace(turn, start=turn.start + size, end=turn.end + size) for turn in output.turns],
        "extra_fields": extras,
    }
    return output.model_copy(update=update)


def earlier_column(outputs: Sequence[AgentLoopOutput], rows: DataProto) -> np.ndarray:
    """Return ``EARLIER_COLUMN`` of trajectories.

    Args: ``rows`` are those of all their earlier segments, in turn.
    """
    tensors = {str(name): value for name, value in tensors_of(rows).items()}
    names = {name for output in outputs for each in output.earlier for name in each.extra_fields} | {LATER_INPUTS}
    columns = {name: rows.non_tensor_batch[name] for name in names & rows.non_tensor_batch.keys()}
    column: list[EarlierSegments | None] = []
    first = 0
    for output in outputs:
        part = slice(first, first + len(output.earlier))
        first = part.stop
        column.append(
            EarlierSegments(
                tensors={name: value[part].clone() for name, value in tensors.items()},
                columns={name: list(values[part]) for name, values in columns.items()},
                scores=[each.reward_score for each in output.earlier],
            )
            if output.earlier
            else None
        )
    return object_array(column)
