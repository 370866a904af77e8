"""Turn a batch of prompts into requests, and generated tokens into the batch that training reads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.torch_functional import remove_pad_token
from verl.utils.vision.positions import continued

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig

LogProbs = Sequence[Sequence[float]] | None
"""The log-probabilities of the tokens of each response, if they were asked for."""

DROPPED_KEYS = ("raw_prompt_ids", "multi_modal_data", "multi_modal_inputs")
"""Non-tensors that only generation reads; the driver keeps those that training needs."""


def prompt_token_ids(prompts: DataProto) -> list[list[int]]:
    """Return the token ids of each prompt without padding: ``raw_prompt_ids`` if present, else by the mask.

    Raises: ValueError naming the row of an empty prompt.
    """
    raw = prompts.non_tensor_batch.get("raw_prompt_ids")
    if raw is not None:
        rows = [ids.tolist() if isinstance(ids, np.ndarray | Tensor) else list(ids) for ids in raw]
    else:
        rows = padded_token_ids(prompts)
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{index}] is empty: every prompt needs at least one token")
    return rows


def padded_token_ids(prompts: DataProto) -> list[list[int]]:
    """Return the token ids of each prompt as training sees them, without padding."""
    assert prompts.batch is not None
    return remove_pad_token(prompts.batch["input_ids"], prompts.batch["attention_mask"])


def check_prompt_lengths(
    prompts: DataProto, token_ids: Sequence[Sequence[int]], context: int, response_length: int
) -> None:
    """Raise ValueError naming the first prompt that, with its images, leaves too little room for a response."""
    room = context - response_length
    assert prompts.batch is not None
    padded_lengths = prompts.batch["attention_mask"].sum(dim=1).tolist()  # ``token_ids`` holds one token per image
    for row, (ids, padded) in enumerate(zip(token_ids, padded_lengths, strict=True)):
        length = max(len(ids), padded)
        if length > room:
            raise ValueError(
                f"prompts[{row}] has {length} tokens; the engine's context leaves {room}: lower "
                "data.max_prompt_length or raise actor_rollout_ref.rollout.max_model_len"
            )


def is_greedy(prompts: DataProto, config: "RolloutConfig") -> bool:
    """Whether to take the most likely tokens; ``do_sample`` of the batch overrides the config."""
    return not prompts.meta_info.get("do_sample", config.do_sample)


def sampling_values(prompts: DataProto, config: "RolloutConfig") -> dict[str, float]:
    """Return ``temperature``, ``top_p``, ``top_k`` and ``repetition_penalty`` of a batch.

    Greedy overrides validation (``rollout.val_kwargs``), which overrides training (``rollout``).
    """
    if is_greedy(prompts, config):
        return {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    source = config.val_kwargs if prompts.meta_info.get("validate", False) else config
    values = {name: getattr(source, name) for name in ("temperature", "top_p", "top_k")}
    return values | {"repetition_penalty": config.repetition_penalty}


def sampling_seeds_of(prompts: DataProto) -> list[int]:
    """Return the seed of each row.

    Raises: ValueError without seeds: the result would then depend on earlier requests of the engine.
    """
    assert prompts.batch is not None
    if "sampling_seed" not in prompts.batch:
        raise ValueError(
            "the batch has no sampling_seed (B,): add it with "
            "verl.utils.numerics.seeding.sampling_seeds(run_seed, step, ...)"
        )
    return prompts.batch["sampling_seed"].tolist()


def eos_token_ids(value: int | Sequence[int] | None) -> list[int]:
    """Return the end-of-sequence tokens as a list."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int | np.integer) else [int(token) for token in value]


def pad_rows(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type[np.number]) -> np.ndarray:
    """Stack rows of at most ``width`` items into (len(rows), width), padded on the right with ``fill``."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    out = np.full((len(rows), width), fill, dtype=dtype)
    flat = np.fromiter((item for row in rows for item in row), dtype=dtype, count=int(lengths.sum()))
    out[np.arange(width) < lengths[:, None]] = flat
    return out


def build_output(
    prompts: DataProto, responses: Sequence[Sequence[int]], log_probs: LogProbs, response_length: int, pad_token_id: int
) -> DataProto:
    """Return the batch of prompts (B, P) and responses (B, R) that training reads.

    ``response_mask`` is 1 on exactly the sampled tokens, including an end-of-sequence token. It follows the number of
    tokens, not their values. ``rollout_log_probs`` is 0 outside the mask.
    """
    assert prompts.batch is not None
    input_ids = prompts.batch["input_ids"]
    attention_mask = prompts.batch["attention_mask"]
    position_ids = prompts.batch["position_ids"]
    tokens = torch.from_numpy(pad_rows(responses, response_length, pad_token_id, np.int64))
    lengths = torch.tensor([len(row) for row in responses])
    response_mask = (torch.arange(response_length) < lengths[:, None]).to(attention_mask.dtype)
    tensors = {
        "prompts": input_ids,
        "responses": tokens,
        "input_ids": torch.cat([input_ids, tokens], dim=1),
        "attention_mask": torch.cat([attention_mask, response_mask], dim=1),
        "position_ids": torch.cat([position_ids, continued(position_ids, response_length)], dim=-1),
        "response_mask": response_mask,
    }
    if log_probs is not None:
        tensors["rollout_log_probs"] = torch.from_numpy(pad_rows(log_probs, response_length, 0.0, np.float32))
    carried = {key: value for key, value in prompts.non_tensor_batch.items() if key not in DROPPED_KEYS}
    return DataProto.from_dict(tensors=tensors, non_tensors=carried)
