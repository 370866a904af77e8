"""Turn trajectories into the rows of a batch, as training reads them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto, tensors_of
from verl.utils.py_functional import object_array
from verl.utils.vision.positions import continued
from verl.workers.rollout.base import DROPPED_KEYS, pad_rows


def rows_of(
    outputs: Sequence[AgentLoopOutput], requests: DataProto, response_length: int, pad_token_id: int
) -> DataProto:
    """Return a row for each trajectory, in the order of the requests.

    Args: ``requests`` holds ``input_ids``, ``attention_mask``, ``position_ids`` (B, P), left-padded, and the columns
        that are carried on. A response is cut at ``response_length``.
    Returns: ``prompts`` (B, P), ``responses``, ``response_mask`` (B, R), ``input_ids``, ``attention_mask``,
        ``position_ids`` (B, L), ``rollout_log_probs`` (B, R) and ``rm_scores`` (B, R) if all have them, and
        ``__num_turns__``. ``response_mask`` is 1 on exactly the sampled tokens.
    Raises: ValueError naming the row for a prompt that is longer than P, a changed prompt with images, or lists of
        different lengths.
    """
    for row, output in enumerate(outputs):
        _check(row, output)
    given = tensors_of(requests)
    prompts, prompt_mask, positions = _prompts(outputs, given, pad_token_id)
    responses = [output.response_ids[:response_length] for output in outputs]
    lengths = torch.tensor([len(response) for response in responses])
    attended = (torch.arange(response_length) < lengths[:, None]).to(prompt_mask.dtype)
    tokens = torch.from_numpy(pad_rows(responses, response_length, pad_token_id, np.int64))
    masks = pad_rows([output.response_mask[:response_length] for output in outputs], response_length, 0, np.int64)
    tensors = {
        "prompts": prompts,
        "responses": tokens,
        "input_ids": torch.cat([prompts, tokens], dim=1),
        "attention_mask": torch.cat([prompt_mask, attended], dim=1),
        "position_ids": torch.cat([positions, continued(positions, response_length)], dim=-1),
        "response_mask": torch.from_numpy(masks).to(prompt_mask.dtype),
    }
    if all(output.response_logprobs is not None for output in outputs):
        log_probs = [(output.response_logprobs or [])[:response_length] for output in outputs]
        padded = torch.from_numpy(pad_rows(log_probs, response_length, 0.0, np.float32))
        tensors["rollout_log_probs"] = padded * tensors["response_mask"]
    if all(output.reward_score is not None for output in outputs):
        tensors["rm_scores"] = _scores(outputs, lengths, response_length)
    carried: dict[str, Any] = {k: v for k, v in requests.non_tensor_batch.items() if k not in DROPPED_KEYS}
    carried["__num_turns__"] = np.array([output.num_turns for output in outputs], dtype=np.int32)
    for name in sorted({name for output in outputs for name in output.extra_fields}):
        carried[name] = object_array([output.extra_fields.get(name) for output in outputs])
    return DataProto.from_dict(tensors=tensors, non_tensors=carried)


def _check(row: int, output: AgentLoopOutput) -> None:
    lengths = {"response_ids": len(output.response_ids), "response_mask": len(output.response_mask)}
    if output.response_logprobs is not None:
        lengths["response_logprobs"] = len(output.response_logprobs)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"trajectory {row}: its lists must have one length, got {lengths}")


def _prompts(outputs: Sequence[AgentLoopOutput], given: Any, pad_token_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, mask and positions of the prompts (B, P), those of the requests unless a loop changed them."""
    tokens, mask, positions = (given[name].clone() for name in ("input_ids", "attention_mask", "position_ids"))
    width = tokens.shape[1]
    for row, output in enumerate(outputs):
        asked = tokens[row][mask[row].bool()].tolist()
        prompt = output.prompt_ids
        if prompt == asked:
            continue
        if positions.dim() == 3:
            raise ValueError(
                f"trajectory {row}: its prompt has {len(prompt)} tokens and that of the data set {len(asked)}, with "
                "their images: an agent loop must not change a prompt with images, and engine and data set must have "
                "the same mm_processor_kwargs (actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs)"
            )
        if len(prompt) > width:
            raise ValueError(
                f"trajectory {row}: its prompt has {len(prompt)} tokens, data.max_prompt_length is {width}: raise it"
            )
        tokens[row] = torch.tensor([pad_token_id] * (width - len(prompt)) + prompt)
        mask[row] = (torch.arange(width) >= width - len(prompt)).to(mask.dtype)
        positions[row] = (mask[row].cumsum(0) - 1).clamp(min=0)
    return tokens, mask, positions


def _scores(outputs: Sequence[AgentLoopOutput], lengths: Tensor, width: int) -> Tensor:
    """Return the scores (B, R), each at the last token of its response."""
    scores = torch.zeros(len(outputs), width)
    values = torch.tensor([float(output.reward_score or 0.0) for output in outputs])
    scores[torch.arange(len(outputs)), (lengths - 1).clamp(min=0)] = values
    return scores
