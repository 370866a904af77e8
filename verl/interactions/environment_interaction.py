"""A text environment with the interface of Gymnasium: the model's messages are actions, the observations are replies.

This module does not import Gymnasium. An environment has ``reset(seed=..., options=...)``, which returns (observation,
info), and ``step(action)``, which returns (observation, reward, terminated, truncated, info); it may have ``close``.
"""

import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from verl.base_config import BaseConfig, Violation, one_line, setting
from verl.errors import WrongInput
from verl.interactions.base import Answered, BaseInteraction, Message, last_text
from verl.utils.class_files import read_options
from verl.utils.concurrency import ConcurrencyLimit, in_thread
from verl.utils.json_types import Json, JsonObject

WANTED = "write the dotted name of a class or function that makes an environment, such as gymnasium.make"
NO_ACTION = "There is no valid action in your message."

T = TypeVar("T")


@dataclass
class EnvironmentConfig(BaseConfig):
    """``config`` of the interaction."""

    _is_closed: ClassVar[bool] = True

    factory: str = setting("", "dotted name of what makes an environment, such as gymnasium.make", hint=WANTED)
    arguments: dict[str, Any] = setting({}, "arguments of the factory")
    action_pattern: str | None = setting(
        None,
        "regular expression; its last match in a message, or the first group of it, is the action",
    )
    actions: dict[str, Any] | None = setting(None, "action of the environment by text; null: the text itself")
    no_action: str = setting(NO_ACTION, "what the model reads if there is no action in its message")
    no_action_reward: float = setting(0.0, "reward of a message without an action")
    num_workers: int = setting(32, "environments of a process that work at once", at_least=1)

    def rules(self) -> Iterator[Violation]:
        """Yield the faults of the interaction's settings."""
        try:
            re.compile(self.action_pattern or "")
        except re.error as error:
            yield Violation("action_pattern", self.action_pattern, f"is no regular expression: {error}")


Stepped = tuple[Json, float, bool, bool, Mapping[str, Json]]


class TextEnvironment(Protocol):
    """The methods that an environment must have."""

    def reset(self, *, seed: Json = None, options: Json = None) -> tuple[Json, Mapping[str, Json]]:
        """Begin an episode and return (first observation, info)."""

    def step(self, action: Json) -> Stepped:
        """Take an action and return (observation, reward, terminated, truncated, info)."""


@dataclass
class _Episode:
    """An environment and the course of its episode.

    At most one thread uses the environment at a time, since an environment might not be thread-safe. If the episode is
    closed during a call, the thread that makes the call closes the environment afterwards.
    """

    environment: TextEnvironment | None = None
    total: float = 0.0
    steps: int = 0
    ended: bool = False
    is_busy: bool = False
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, call: Callable[[], T]) -> T:
        """Call a function that uses the environment."""
        with self.lock:
            self.is_busy = True
        try:
            return call()
        finally:
            with self.lock:
                self.is_busy = False
                closes = self.is_closed
            if closes:
                self._close()

    def close(self) -> None:
        """Close the environment now, or after the running call."""
        with self.lock:
            self.is_closed = True
            closes = not self.is_busy
        if closes:
            self._close()

    def _close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()


class EnvironmentInteraction(BaseInteraction):
    """Steps an environment by the model's messages.

    Rows of the data set give ``seed`` and ``options`` of ``reset`` in ``interaction_kwargs``, and ``observation``, the
    first observation, which their prompt contains (``reset_text``).
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self.options = read_options(self, config, EnvironmentConfig)
        self._make = functools.partial(load_factory(self.options.factory), **self.options.arguments)
        pattern = self.options.action_pattern
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self._limit = ConcurrencyLimit(self.options.num_workers)
        self._episodes: dict[str, _Episode] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Json) -> str:
        """Make an environment and reset it with ``seed`` and ``options``.

        Raises: WrongInput if the first observation is not ``observation``, which the prompt of the row contains.
        """
        instance_id = await super().start_interaction(instance_id)
        episode = self._episodes[instance_id] = _Episode()

        def begin() -> str:
            episode.environment = self._make()
            return reset_text(episode.environment, kwargs.get("seed"), kwargs.get("options"))

        text = await self._run(functools.partial(episode.work, begin))
        expected = kwargs.get("observation")
        if expected is not None and text != expected:
            raise WrongInput(
                f"interaction {self.name}, seed {kwargs.get('seed')}: the environment's first observation is "
                f"{one_line(text)!r}, but the data set's row has interaction_kwargs.observation="
                f"{one_line(str(expected))!r}: regenerate the data set with this environment"
            )
        return instance_id

    async def generate_response(self, instance_id: str, messages: Sequence[Message], **kwargs: Json) -> Answered:
        """Act by the last message of the model; the conversation ends with the episode."""
        episode = self._episodes[instance_id]
        if episode.ended:
            return True, "", 0.0, {"steps": episode.steps}
        action = self._action(last_text(messages, "assistant") or "")
        if action is None:
            reward = self.options.no_action_reward
            episode.total += reward
            return False, self.options.no_action, reward, {"steps": episode.steps}
        environment = episode.environment
        assert environment is not None
        step = functools.partial(environment.step, action)
        stepped = await self._run(functools.partial(episode.work, step))
        if not isinstance(stepped, tuple) or len(stepped) != 5:
            raise RuntimeError(
                f"{type(environment).__name__}.step returned {one_line(str(stepped))}: "
                "it must return a tuple (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, facts = stepped
        episode.steps += 1
        episode.total += float(reward)
        episode.ended = bool(terminated or truncated)
        found = {"steps": episode.steps, "truncated": bool(truncated), **facts}
        return episode.ended, _text(environment, observation), float(reward), found

    async def calculate_score(self, instance_id: str, **kwargs: Json) -> float:
        """Return the sum of the rewards so far."""
        return self._episodes[instance_id].total

    async def finalize_interaction(self, instance_id: str, **kwargs: Json) -> None:
        """Close the environment, after a running step has ended."""
        episode = self._episodes.pop(instance_id, None)
        if episode is not None:
            await self._run(episode.close)

    async def _run(self, work: Callable[[], T]) -> T:
        """Call a function in a thread; a cancelled caller frees its slot, although the thread goes on."""
        async with self._limit.slot():
            return await in_thread(work, f"environment-{self.name}")

    def _action(self, message: str) -> Json:
        """Return the action in a message; None if there is none."""
        text = message.strip()
        if self._pattern is not None:
            found = list(self._pattern.finditer(message))
            if not found:
                return None
            text = (found[-1][1] if self._pattern.groups else found[-1][0]) or ""
            text = text.strip()
        return text if self.options.actions is None else self.options.actions.get(text)


def reset_text(environment: TextEnvironment, seed: Json = None, options: Json = None) -> str:
    """Reset an environment and return its first observation, for the prompt of a row.

    Raises: RuntimeError if ``reset`` does not return (observation, info).
    """
    found = environment.reset(seed=seed, options=options)
    if not isinstance(found, tuple) or len(found) != 2:
        raise RuntimeError(
            f"{type(environment).__name__}.reset returned {one_line(str(found))}: "
            "it must return a tuple (observation, info)"
        )
    return _text(environment, found[0])


def _text(environment: TextEnvironment, observation: Json) -> str:
    if isinstance(observation, str | int | float):
        return str(observation)
    raise RuntimeError(
        f"{type(environment).__name__} observes {type(observation).__name__}: wrap it so that it observes text"
    )


def load_factory(name: str) -> Callable[..., T]:
    """Import the object of a dotted name.

    Raises: WrongInput if the object cannot be called.
    """
    if "." not in name.strip("."):
        raise WrongInput(f"config.factory={name!r}: {WANTED}")
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise WrongInput(f"config.factory={name}: {error}: {WANTED}, or install its package") from error
    if not callable(found):
        raise WrongInput(f"config.factory={name}: cannot be called: {WANTED}")
    factory: Callable[..., T] = found
    return factory
