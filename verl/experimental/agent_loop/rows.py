"""Convert trajectories to the rows of a training batch."""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.later_images import LATER_INPUTS, WholeTrajectories
from verl.experimental.agent_loop.segments import EARLIER_COLUMN, earlier_column
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto, tensors_of
from verl.utils.py_functional import object_array
from verl.utils.torch_functional import at_last_sampled
from verl.workers.rollout.base import DROPPED_COLUMN, DROPPED_KEYS, PaddedPrompts

logger = logging.getLogger(__name__)

TENSORS = frozenset(
    ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_log_probs")
) | {"rm_scores"}
"""Tensors of rows, which no column of a loop may hide."""


def rows_of(
    given_outputs: Sequence[AgentLoopOutput | None],
    requests: DataProto,
    response_length: int,
    pad_token_id: int,
    whole: WholeTrajectories | None = None,
    own_inputs: bool = False,
) -> DataProto:
    """Return a row for each trajectory, in the order of the requests.

    A row without a trajectory (None) has an empty response: it fills the batch, and nothing is learnt from it.

    Args: ``requests`` holds ``input_ids``, ``attention_mask``, ``position_ids`` (B, P), left-padded, and the columns
        that are carried on. A response is cut at ``response_length``. ``whole`` allows loops to change prompts with
        images, and to add images; ``own_inputs`` computes the ``multi_modal_inputs`` of all rows.
    Returns: ``prompts`` (B, P), ``responses``, ``response_mask`` (B, R), ``input_ids``, ``attention_mask``,
        ``position_ids`` (B, L), ``rollout_log_probs`` (B, R) and ``rm_scores`` (B, R) if all have them, and
        ``__num_turns__``. ``response_mask`` is 1 on exactly the sampled tokens. ``__dropped__`` says which rows have no
        trajectory, if any has none. ``LATER_INPUTS`` holds the ``multi_modal_inputs`` of rows whose prompt or images a
        loop has changed, if there are any. ``EARLIER_COLUMN`` holds the segments before the row, if any has some.
    Raises: ValueError naming the row for a prompt that is longer than P, a changed prompt with images, or lists of
        different lengths, for a mask that is neither 0 nor 1, and for numbers that are not finite.
    """
    given = tensors_of(requests)
    outputs = [output or _nothing(given, row) for row, output in enumerate(given_outputs)]
    for row, checked in enumerate(given_outputs):
        if checked is not None:
            check_output(row, checked, given["input_ids"].shape[1])
    width = response_length
    log_probs = [output.response_logprobs for output in outputs if output.response_logprobs is not None]
    made = [output for output in given_outputs if output is not None]
    _warn_of_some("response_logprobs", [output.response_logprobs is not None for output in made])
    _warn_of_some("reward_score", [output.reward_score is not None for output in made])
    prompts, changed = _prompts(outputs, given, pad_token_id, whole is not None)
    tensors = prompts.with_responses(
        [output.response_ids[:width] for output in outputs],
        width,
        pad_token_id,
        [output.response_mask[:width] for output in outputs],
        [each[:width] for each in log_probs] if len(log_probs) == len(outputs) else None,
    )
    if all(output.reward_score is not None for output in outputs):
        values = torch.tensor([float(output.reward_score or 0.0) for output in outputs])
        tensors["rm_scores"] = at_last_sampled(values, tensors["response_mask"])
    carried: dict[str, Any] = {k: v for k, v in requests.non_tensor_batch.items() if k not in DROPPED_KEYS}
    carried["__num_turns__"] = np.array([output.num_turns for output in outputs], dtype=np.int32)
    for name in sorted({name for output in outputs for name in output.extra_fields}):
        carried[name] = object_array([output.extra_fields.get(name) for output in outputs])
    if whole is not None and given["position_ids"].dim() == 3:
        changed = set(range(len(outputs))) if own_inputs else changed
        inputs = whole.complete(tensors, outputs, changed)
        if any(each is not None for each in inputs):
            carried[LATER_INPUTS] = object_array(inputs)
    before = [(row, segment) for row, output in enumerate(outputs) for segment in output.earlier]
    if before:
        # Scores are added later, because a segment without a score gets the score of its trajectory.
        segments = [segment.model_copy(update={"reward_score": None}) for _, segment in before]
        asked = requests.select_idxs([row for row, _ in before])
        rows = rows_of(segments, asked, width, pad_token_id, whole, own_inputs=True)
        carried[EARLIER_COLUMN] = earlier_column(outputs, rows)
    if None in given_outputs:
        carried[DROPPED_COLUMN] = np.array([output is None for output in given_outputs])
    return DataProto.from_dict(tensors=tensors, non_tensors=carried)


def _num_made(part: DataProto) -> int:
    """Return how many rows have a trajectory."""
    dropped = part.non_tensor_batch.get(DROPPED_COLUMN)
    return len(part) if dropped is None else int((~dropped.astype(bool)).sum())


def _warn_of_some(field: str, present: Sequence[bool]) -> None:
    """Warn if only some trajectories have a field that is used only if all of them have it."""
    if any(present) and not all(present):
        logger.warning(
            "%d of %d trajectories have no %s, so it is not used for the others either: an agent loop must return it "
            "always or never",
            *(present.count(False), len(present), field),
        )


def _nothing(given: Mapping[str, Tensor], row: int) -> AgentLoopOutput:
    prompt = given["input_ids"][row][given["attention_mask"][row].bool()].tolist()
    return AgentLoopOutput(prompt_ids=prompt, response_ids=[], response_mask=[], response_logprobs=[], reward_score=0.0)


def joined(parts: Sequence[DataProto]) -> DataProto:
    """Join the rows of several workers, whose columns may differ: a value that a worker does not know is None.

    Scores and log-probabilities are kept if all workers have them.
    """
    names = sorted({name for part in parts for name in part.non_tensor_batch})
    for name, field in (("rollout_log_probs", "response_logprobs"), ("rm_scores", "reward_score")):
        _warn_of_some(field, [name in tensors_of(part).keys() for part in parts for _ in range(_num_made(part))])
    shared = set.intersection(*(set(map(str, tensors_of(part).keys())) for part in parts))
    for part in parts:
        for name in names:
            if name not in part.non_tensor_batch:
                unknown = (
                    np.zeros(len(part), dtype=bool) if name == DROPPED_COLUMN else object_array([None] * len(part))
                )
                part.non_tensor_batch[name] = unknown
        for name in set(map(str, tensors_of(part).keys())) - shared:
            tensors_of(part).pop(name)
    return DataProto.concat(parts)


def check_sampled(row: int, output: AgentLoopOutput, response_length: int) -> None:
    """Check that a trajectory has at least one sampled token, to which its score can be assigned.

    Raises: ValueError naming the row.
    """
    if not any(any(each.response_mask[:response_length]) for each in (*output.earlier, output)):
        raise ValueError(
            f"trajectory {row}: none of its {len(output.response_ids)} response tokens is sampled (response_mask is "
            "0), so there is nothing to train or to score"
        )


def check_output(row: int, output: AgentLoopOutput, prompt_length: int, vocab_size: int | None = None) -> None:
    """Check that a trajectory with all its segments can be a row.

    Raises: ValueError naming the row for lists of different lengths, a mask that is neither 0 nor 1, numbers that are
        not finite, a prompt without a token or with more than ``prompt_length``, tokens that the model does not have,
        and ``extra_fields`` whose columns are those of the batch itself.
    """
    for segment in (*output.earlier, output):
        _check(row, segment, vocab_size)
        if len(segment.prompt_ids) > prompt_length:
            raise ValueError(
                f"trajectory {row}: its prompt has {len(segment.prompt_ids)} tokens, data.max_prompt_length is "
                f"{prompt_length}: raise it"
            )


def _check(row: int, output: AgentLoopOutput, vocab_size: int | None) -> None:
    if not output.prompt_ids:
        raise ValueError(f"trajectory {row}: its prompt is empty: prompt_ids must have at least one token")
    for name in ("prompt_ids", "response_ids"):
        tokens = getattr(output, name)
        most = vocab_size if vocab_size is not None else math.inf
        if tokens and not (min(tokens) >= 0 and max(tokens) < most):
            wrong_token = next(token for token in tokens if not 0 <= token < most)
            known = "" if vocab_size is None else f"; the model's are 0 to {vocab_size - 1}"
            raise ValueError(f"trajectory {row}: {name} has the token {wrong_token}{known}")
    for name in output.extra_fields:
        if name in TENSORS or (name != TURNS_COLUMN and name.startswith("__") and name.endswith("__")):
            raise ValueError(f"trajectory {row}: extra_fields has {name!r}, a column of the batch: choose another name")
    lengths = {"response_ids": len(output.response_ids), "response_mask": len(output.response_mask)}
    if output.response_logprobs is not None:
        lengths["response_logprobs"] = len(output.response_logprobs)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"trajectory {row}: its lists must have one length, got {lengths}")
    wrong = set(output.response_mask) - {0, 1}
    if wrong:
        raise ValueError(f"trajectory {row}: response_mask must be 1 for sampled tokens, 0 for others; it has {wrong}")
    # The sum is finite only if all numbers are; this check takes a quarter of the time of checking each number.
    if not math.isfinite(sum(itertools.compress(output.response_logprobs or (), output.response_mask))):
        raise ValueError(f"trajectory {row}: response_logprobs of a sampled token is no finite number")
    if output.reward_score is not None and not math.isfinite(output.reward_score):
        raise ValueError(f"trajectory {row}: reward_score={output.reward_score}: is no finite number")


def _prompts(
    outputs: Sequence[AgentLoopOutput], given: Mapping[str, Tensor], pad_token_id: int, with_images: bool
) -> tuple[PaddedPrompts, set[int]]:
    """Return the prompts (B, P), from the requests or as a loop changed them, and the rows with a changed prompt.

    Args: ``with_images`` allows to change those with images; their positions are then still to be computed.
    """
    changed: set[int] = set()
    tokens, mask, positions = (given[name].clone() for name in ("input_ids", "attention_mask", "position_ids"))
    width = tokens.shape[1]
    for row, output in enumerate(outputs):
        asked = tokens[row][mask[row].bool()].tolist()
        prompt = output.prompt_ids
        if prompt == asked:
            continue
        changed.add(row)
        if positions.dim() == 3 and not with_images:
            raise ValueError(
                f"trajectory {row}: its prompt has {len(prompt)} tokens and that of the data set {len(asked)}, with "
                "their images: an agent loop must not change a prompt with images, and engine and data set must have "
                "the same mm_processor_kwargs (actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs)"
            )
        tokens[row] = torch.tensor([pad_token_id] * (width - len(prompt)) + prompt)
        mask[row] = (torch.arange(width) >= width - len(prompt)).to(mask.dtype)
        positions[row] = (mask[row].cumsum(0) - 1).clamp(min=0)
    return PaddedPrompts(tokens, mask, positions), changed
