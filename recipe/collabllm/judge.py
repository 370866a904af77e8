"""A judge of conversations: a model on an OpenAI-compatible server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.base_config import BaseConfig, setting
from verl.interactions.base import Message, text_of
from verl.utils import envs
from verl.utils.chat_endpoint import ChatEndpoint
from verl.utils.concurrency import ConcurrencyLimit

API_KEY_VARIABLE = "OPENAI_API_KEY"
_SHOWN_CHARS = 200


class JudgeError(RuntimeError):
    """The judge gave no verdict."""


@dataclass
class JudgeConfig(BaseConfig):
    """The node ``reward_model.reward_kwargs.llm_judge_kwargs``."""

    _is_closed: ClassVar[bool] = True

    model: str = setting("gpt-4o-mini", "name of the judging model", empty=False)
    base_url: str = setting("https://api.openai.com/v1", "address of the judge's server")
    max_tokens: int = setting(2048, "maximum number of tokens in a verdict", at_least=1)
    temperature: float = setting(0.0, "sampling temperature", at_least=0)
    timeout_s: float = setting(300.0, "time limit of a verdict, all attempts included", above=0)
    num_retries: int = setting(3, "attempts per verdict", at_least=1)
    retry_delay_s: float = setting(1.0, "delay before the second attempt, doubled before each further one", at_least=0)
    max_concurrency: int = setting(32, "maximum number of concurrent requests", at_least=1)


class Judge:
    """Asks a model for verdicts, which are JSON objects; the API key is the variable ``OPENAI_API_KEY``."""

    def __init__(self, config: JudgeConfig) -> None:
        self.endpoint = ChatEndpoint(
            config.base_url,
            config.model,
            envs.read(API_KEY_VARIABLE, "") or "",
            {"max_tokens": config.max_tokens, "temperature": config.temperature},
            config.timeout_s,
            config.num_retries,
            config.retry_delay_s,
        )
        self._limit = ConcurrencyLimit(config.max_concurrency)

    async def verdict(self, question: str, key: str) -> Any:
        """Ask a question, and return the value of ``key`` in the last JSON object of the answer that has this key.

        Raises: JudgeError for an answer without such an object, EndpointError if the server does not answer.
        """
        async with self._limit.slot():
            answer = await self.endpoint.answer([{"role": "user", "content": question}])
        found = [each for each in _objects(answer) if key in each]
        if not found:
            raise JudgeError(f"the judge wrote no JSON object with {key!r}; its answer ends {answer[-_SHOWN_CHARS:]!r}")
        return found[-1][key]

    async def number(self, question: str, key: str, least: float, most: float) -> float:
        """Ask a question, and return the number under ``key`` in the answer.

        Raises: JudgeError if the number is missing or not between ``least`` and ``most``, EndpointError.
        """
        value = await self.verdict(question, key)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not least <= number <= most:
            raise JudgeError(f"the judge wrote {key}={value!r}, which is not a number between {least:g} and {most:g}")
        return number


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that a text contains, in order."""
    found: list[dict[str, Any]] = []
    place = text.find("{")
    decoder = json.JSONDecoder(strict=False)
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
            found.append(value)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found


def shown(messages: Sequence[Message]) -> str:
    """Return a conversation as text for the judge's prompt."""
    return "\n\n".join(f"[{message['role']}]\n{text_of(message)}" for message in messages)


def task_of(extra_info: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """Return the whole task of a row; without one, the first message of the user."""
    task = (extra_info.get("interaction_kwargs") or {}).get("single_turn_prompt")
    return task or next((text_of(message) for message in messages if message["role"] == "user"), "")
