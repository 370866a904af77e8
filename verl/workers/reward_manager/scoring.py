"""What the reward managers share: rows out of a batch, scores out of what a scorer returns, and back into a tensor."""

import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

EXPECTED = "a scorer must return a number, a bool, a tuple that begins with one, or a dict with a number as 'score'"
SHOWN_CHARS = 200


class RewardError(ValueError):
    """A scorer raised, or returned what is not a score."""


@dataclass
class Sample:
    """What a scorer is told about one response."""

    index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]
    length: int
    """Number of valid response tokens."""

    def describe(self) -> str:
        """Name this sample in an error."""
        return f"data_source {self.data_source!r}, sample {self.index}, ground truth {_short(self.ground_truth)}"


@dataclass
class Score:
    """A score and what else the scorer said."""

    value: float
    extras: dict[str, Any]


def read_samples(data: "DataProto", tokenizer: PreTrainedTokenizerBase, reward_fn_key: str) -> list[Sample]:
    """Decode all prompts and responses, without padding and special tokens."""
    prompt_width = data.batch["prompts"].shape[-1]
    mask = data.batch["attention_mask"].bool().cpu()
    prompts = _valid_ids(data.batch["prompts"], mask[:, :prompt_width])
    responses = _valid_ids(data.batch["responses"], mask[:, prompt_width:])
    texts = tokenizer.batch_decode([*prompts, *responses], skip_special_tokens=True)
    columns = data.non_tensor_batch
    none = [None] * len(prompts)
    return [
        Sample(
            index=i,
            data_source=columns[reward_fn_key][i],
            prompt=texts[i],
            response=texts[len(prompts) + i],
            ground_truth=(columns["reward_model"][i] or {}).get("ground_truth"),
            extra_info={
                **(columns.get("extra_info", none)[i] or {}),
                "num_turns": columns.get("__num_turns__", none)[i],
                "rollout_reward_scores": columns.get("reward_scores", [{}] * len(prompts))[i],
            },
            length=len(responses[i]),
        )
        for i in range(len(prompts))
    ]


def read_score(result: Any, sample: Sample) -> Score:
    """Take the score out of what a scorer returned.

    Raises: RewardError naming the sample when there is none.
    """
    extras: dict[str, Any] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            raise RewardError(f"{sample.describe()}: the scorer returned a dict without 'score': {_short(result)}")
        value, extras = result["score"], {k: v for k, v in result.items() if k != "score"}
    elif isinstance(result, tuple) and result:
        value = result[0]
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{sample.describe()}: the scorer returned {_short(result)}; {EXPECTED}")
    if not math.isfinite(value):
        raise RewardError(f"{sample.describe()}: the scorer returned {_short(result)}, which is not finite")
    return Score(float(value), extras)


def call_scorer(call: Callable[[], Any], sample: Sample) -> Score:
    """Score one sample.

    Raises: RewardError naming the sample when the scorer raises or returns nonsense.
    """
    try:
        result = call()
    except Exception as error:  # user code raises anything; it goes on with the sample named
        raise RewardError(f"{sample.describe()}: the scorer raised {type(error).__name__}: {error}") from error
    return read_score(result, sample)


def place_scores(values: Sequence[float], samples: Sequence[Sample], responses: Tensor) -> Tensor:
    """Return scores (B, R), each at the last valid token of its response."""
    reward = torch.zeros(responses.shape, dtype=torch.float32)
    # a response without any token keeps its score, at the first place: the sum is what metrics read
    last = torch.tensor([max(sample.length - 1, 0) for sample in samples])
    reward[torch.arange(len(samples)), last] = torch.tensor(values, dtype=torch.float32)
    return reward


def gather_extras(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """Collect extras into lists of length B; None where a scorer did not say."""
    keys = dict.fromkeys(key for score in scores for key in score.extras)
    return {key: [score.extras.get(key) for score in scores] for key in keys}


def given_scores(data: "DataProto", return_dict: bool) -> Tensor | dict[str, Any] | None:
    """Return the scores that a reward model or an agent loop has put into the batch; None where there are none."""
    if "rm_scores" not in data.batch.keys():
        return None
    if not return_dict:
        return data.batch["rm_scores"]
    keys = data.meta_info.get("reward_extra_keys", [])
    extras = {key: list(data.non_tensor_batch[key]) for key in keys}
    return {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": extras}


def log_samples(samples: Sequence[Sample], scores: Sequence[Score], num_examine: int) -> None:
    """Log the first samples of each data source."""
    shown: Counter[str] = Counter()
    for sample, score in zip(samples, scores, strict=True):
        if shown[sample.data_source] < num_examine:
            shown[sample.data_source] += 1
            logger.info(
                "[data_source] %s\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s %s",
                sample.data_source,
                sample.prompt,
                sample.response,
                sample.ground_truth,
                score.value,
                score.extras or "",
            )


def _valid_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    flat, lengths = ids.cpu()[mask], mask.sum(-1)
    return [part.tolist() for part in flat.split(lengths.tolist())]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
