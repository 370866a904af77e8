"""A generative reward model: it answers a question about each response, and its answer holds the score."""

import logging
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.errors import RewardError
from verl.protocol import DataProto
from verl.utils.chat_template import check_awaits_turn, render_chat
from verl.utils.import_utils import load_extern_type
from verl.utils.json_types import Json
from verl.utils.numerics.seeding import derive_seed
from verl.utils.process.time_limit import TimeLimitExceeded, call_within, error_text
from verl.workers.rewards.chat_rendering import Message, raw_prompts, response_texts
from verl.workers.rewards.scoring import RawScore, describe_failure_score

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RewardModelConfig
    from verl.workers.rollout import BaseRollout

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 500


@dataclass
class Judge:
    """Score responses: ``preprocess`` writes the question, ``rollout`` the answer, ``postprocess`` reads the score.

    If a function raises or returns no finite number, the response gets ``failure_score`` and counts as a failure; the
    first failure is logged. Where no score of failures is written it gets NaN, for which the trainer puts the lowest
    score of its data source in the batch.

    Args: ``source`` is the policy's tokenizer, ``ends`` are the tokens at which its responses end.
    """

    config: "RewardModelConfig"
    model_config: "HFModelConfig"
    rollout: "BaseRollout"
    source: PreTrainedTokenizerBase
    ends: set[int]

    def __post_init__(self) -> None:
        node = self.config.data_processor_config
        self.preprocess: Callable[..., str | list[Message]] = load_extern_type(node.path, node.preprocess_fn_name)
        self.postprocess: Callable[[str], RawScore] = load_extern_type(node.path, node.postprocess_fn_name)
        written = self.config.scoring.failure_score
        self.failure_score = math.nan if written is None else written
        self.tokenizer: PreTrainedTokenizerBase = self.model_config.tokenizer
        self._has_shown_a_failure = False
        self._last_failure = ""

    def __call__(self, data: DataProto) -> tuple[Tensor, dict[str, float]]:
        """Return scores (B,), and the shares of rows with a failure, a cut question, and an unfinished answer.

        Raises: RewardError when more rows fail than ``reward_model.scoring.max_failed_ratio`` allows.
        """
        questions = self._questions(data)
        rows = [row for row, ids in enumerate(questions) if ids]
        longest = self.config.prompt_length
        num_cut = sum(len(questions[row]) > longest for row in rows)
        scores = torch.full((len(questions),), self.failure_score)
        failed = len(questions) - len(rows)
        unfinished = 0
        if rows:
            # Cut the beginning, because the end tells the model to answer.
            answers, unfinished = self._generate([questions[row][-longest:] for row in rows], data)
            for row, answer in zip(rows, answers, strict=True):
                value = self._score(row, answer)
                failed += value is None
                scores[row] = self.failure_score if value is None else value
        limit = self.config.scoring.max_failed_ratio
        if limit is not None and failed > limit * len(questions):
            raise RewardError(
                f"the reward model could not score {failed} of {len(questions)} responses, more than "
                f"reward_model.scoring.max_failed_ratio={limit:g}; the last one: {self._last_failure}"
            )
        return scores, {
            "reward_model/failed_ratio": failed / len(questions),
            "reward_model/truncated_ratio": num_cut / len(questions),
            "reward_model/unfinished_ratio": unfinished / len(questions),
        }

    def _questions(self, data: DataProto) -> list[list[int]]:
        """Return the tokens of the question about each response; an empty list if ``preprocess`` fails."""
        truths = data.non_tensor_batch.get("reward_model", [None] * len(data))
        rows = zip(raw_prompts(data), response_texts(data, self.source, self.ends), truths, strict=True)
        questions: list[list[int]] = []
        for row, (messages, response, truth) in enumerate(rows):
            asked = next((each["content"] for each in reversed(messages) if each.get("role") == "user"), "")
            question = self._of_user("preprocess", row, response, partial(self._question, asked, response, truth))
            questions.append(question or [])
        return questions

    def _question(self, asked: str, response: str, truth: Mapping[str, Json] | None) -> list[int]:
        known = (truth or {}).get("ground_truth")
        given = {"rollout_question": asked, "rollout_response": response, "ground_truth": known}
        text = call_within(self.config.scoring.timeout_s, partial(self.preprocess, **given))
        chat = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        check_awaits_turn(chat)
        rendered = render_chat(self.tokenizer, chat, {"add_generation_prompt": True, "tokenize": False})
        tokens: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return tokens

    def _generate(self, prompts: list[list[int]], data: DataProto) -> tuple[list[str], int]:
        """Return the answers and the number of unfinished ones."""
        width = max(map(len, prompts))
        mask = torch.arange(width).flip(0) < torch.tensor([len(ids) for ids in prompts]).unsqueeze(1)
        eos = self.model_config.eos_token_id
        pad = self.model_config.pad_token_id
        ids = torch.full(mask.shape, pad)
        ids[mask] = torch.tensor([token for row in prompts for token in row])
        step = data.meta_info.get("global_steps") or 0
        seeds = [derive_seed(1, "judge", step, *map(str, row)) for row in prompts]  # a function of the question alone
        batch = DataProto.from_dict(
            tensors={
                "input_ids": ids,
                "attention_mask": mask.long(),
                "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
                "sampling_seed": torch.tensor(seeds),
            },
            meta_info={"eos_token_id": eos, "pad_token_id": pad, "global_steps": step},
        )
        output = self.rollout.generate_sequences(batch).batch
        assert output is not None
        sampled = output["response_mask"].bool()
        answers = [row[kept].tolist() for row, kept in zip(output["responses"], sampled, strict=True)]
        ends = {eos} if isinstance(eos, int) else set(eos)
        unfinished = sum(not row or row[-1] not in ends for row in answers)
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True), unfinished

    def _score(self, row: int, answer: str) -> float | None:
        return self._of_user("postprocess", row, answer, partial(self._value, answer))

    def _value(self, answer: str) -> float:
        value = call_within(self.config.scoring.timeout_s, partial(self.postprocess, answer))
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
        raise ValueError(f"it returned {value!r}, which is not a finite number")

    def _of_user(self, function: str, row: int, text: str, call: Callable[[], T]) -> T | None:
        """Run a call of the user's function; if the call fails, log the failure and return None."""
        try:
            return call()
        except (Exception, TimeLimitExceeded) as error:  # user code may raise anything
            self._log_failure(row, function, text, error)
            return None

    def _log_failure(self, row: int, function: str, text: str, error: BaseException) -> None:
        self._last_failure = f"{function} in row {row}: {error_text(error)}"
        level = logging.DEBUG if self._has_shown_a_failure else logging.WARNING
        self._has_shown_a_failure = True
        message = (
            "%s of reward_model.data_processor_config failed for row %d, which gets %s; further failures are only "
            "counted (reward_model/failed_ratio). The text: %r"
        )
        given = describe_failure_score(self.config.scoring)
        logger.log(level, message, function, row, given, text[:_SHOWN_CHARS], exc_info=error)
