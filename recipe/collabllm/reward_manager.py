"""The reward manager ``collabllm``: the score of a turn is the mean score of its continued conversations."""

import asyncio
import importlib
import pkgutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedTokenizerBase

from verl.base_config import config_error, nearest, parse_node
from verl.errors import WrongInput
from verl.interactions.base import Message
from verl.utils.unavailable import is_unavailable
from verl.workers.rewards import scoring
from verl.workers.rewards.managers import AbstractRewardManager, register
from verl.workers.rewards.scoring import RawScorer, RewardOutput, Sample, Score
from verl.workers.rewards.signature import ScorerCall

from . import metrics as metrics_package
from .collabllm_agent_loop import CONVERSATIONS, NUM_PROMPT_MESSAGES
from .judge import Judge, JudgeConfig

if TYPE_CHECKING:
    from verl.protocol import DataProto

KWARGS = "reward_model.reward_kwargs"


@register("collabllm")
class CollabLLMRewardManager(AbstractRewardManager):
    """Scores a response by the weighted sum of its metrics, each averaged over the conversations that continue it.

    Args:
        compute_score: returns the metrics of one conversation, as ``conversation_level_reward_func`` of
            ``reward_function.py`` does.
        metric_weights: maps each metric, the name of a module in ``metrics``, to its weight.
        llm_judge_kwargs: options of the judge; see ``JudgeConfig``.
        unfinished_score: score of a turn that was cut off, and so has no conversations.

    Raises: WrongInput naming the key.
    """

    scorer_call: ClassVar[ScorerCall] = ScorerCall(
        ("data_source", "messages", "ground_truth", "extra_info", "metrics", "judge", "tokenizer", NUM_PROMPT_MESSAGES)
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        metric_weights: Mapping[str, float] | None = None,
        llm_judge_kwargs: Mapping[str, Any] | None = None,
        unfinished_score: float = -1.0,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        known = [module.name for module in pkgutil.iter_modules(metrics_package.__path__)]
        if not metric_weights:
            raise WrongInput(f"{KWARGS}.metric_weights is empty: give a weight to one of {', '.join(known)}")
        for name in metric_weights:
            if name not in known:
                near = f"the nearest: {', '.join(nearest(name, known)) or 'none'}"
                expected = f"is no metric: write one of {', '.join(known)} ({near})"
                raise WrongInput(f"{KWARGS}.metric_weights.{name}: {expected}")
        node, violations = parse_node(dict(llm_judge_kwargs or {}), JudgeConfig, f"{KWARGS}.llm_judge_kwargs")
        if violations:
            raise config_error(violations)
        self.metric_weights = dict(metric_weights)
        self.judge = Judge(node)
        self.unfinished_score = unfinished_score

    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score a batch that the agent loop ``collabllm_agent`` has generated."""
        return self.score_batch(data, return_dict, partial(self._scores, data.non_tensor_batch))

    def _scores(self, columns: Mapping[str, Any], samples: list[Sample]) -> list[Score]:
        if CONVERSATIONS not in columns:
            raise WrongInput(
                "reward_model.reward_manager=collabllm scores conversations, but the rows have none: give them "
                "agent_name=collabllm_agent, or set actor_rollout_ref.rollout.agent.default_agent_loop"
            )
        return asyncio.run(self._score_all(columns, samples))

    async def _score_all(self, columns: Mapping[str, Any], samples: Sequence[Sample]) -> list[Score]:
        end = time.monotonic() + self.limits.batch_timeout_s
        rows = [(columns[CONVERSATIONS][each.index], columns[NUM_PROMPT_MESSAGES][each.index]) for each in samples]
        return await asyncio.gather(
            *(self._score_within(sample, *row, end) for sample, row in zip(samples, rows, strict=True))
        )

    async def _score_within(
        self, sample: Sample, conversations: Sequence[Sequence[Message]], num_prompt_messages: int, end: float
    ) -> Score:
        left_s = end - time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, self.limits.timeout_s)):
                result = await self._score(sample, conversations, num_prompt_messages)
        except TimeoutError:
            return scoring.timed_out(sample, self.limits, of_batch=left_s < self.limits.timeout_s)
        except Exception as error:  # a judge or a metric may raise anything; only this response fails
            kind = scoring.kind_of(is_unavailable(error))
            return scoring.failed(sample, kind, f"{type(error).__name__}: {error}", self.limits)
        return scoring.settled(result, sample, self.limits)

    async def _score(
        self, sample: Sample, conversations: Sequence[Sequence[Message]], num_prompt_messages: int
    ) -> dict[str, float]:
        """Return the score of a response and the means of its metrics."""
        metrics = list(self.metric_weights)
        if not conversations:
            return {"score": self.unfinished_score, **dict.fromkeys(metrics, 0.0), "unfinished": 1.0}
        judged = await asyncio.gather(
            *(
                self.compute_score(
                    data_source=sample.data_source,
                    messages=messages,
                    ground_truth=sample.ground_truth,
                    extra_info=sample.extra_info,
                    metrics=metrics,
                    judge=self.judge,
                    tokenizer=self.tokenizer,
                    num_prompt_messages=num_prompt_messages,
                )
                for messages in conversations
            )
        )
        means = {name: sum(each[name] for each in judged) / len(judged) for name in metrics}
        score = sum(weight * means[name] for name, weight in self.metric_weights.items())
        return {"score": score, **means, "unfinished": 0.0}


async def measure(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    metrics: Sequence[str],
    **kwargs: Any,
) -> dict[str, float]:
    """Return the metrics of one conversation by name, computed concurrently."""
    modules = [importlib.import_module(f"{metrics_package.__name__}.{name}") for name in metrics]
    values = await asyncio.gather(
        *(module.compute_score(data_source, messages, ground_truth, extra_info, **kwargs) for module in modules)
    )
    return dict(zip(metrics, values, strict=True))
