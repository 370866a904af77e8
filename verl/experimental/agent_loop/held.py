"""Requests that are interrupted between two tokens and go on later, perhaps under other weights."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from verl.utils.numerics.seeding import derive_seed
from verl.workers.rollout.server import ABORTED, FULL, GenerationRequest, TokenOutput

_CONTINUED = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos")
)
"""Sampling parameters that mean the same for a response and for its continuation."""
_AGAIN_S = 0.1
"""Pause between two aborts of a request: the first one may reach the server before the request does."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens of a first turn that was interrupted.

    Attributes: ``uid`` and ``sample`` name the trajectory; the others are as in ``GenerationRequest`` and
        ``TokenOutput``.
    """

    uid: str
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float] | None
    versions: list[tuple[int, int]]

    def moved(self, by: int) -> "KeptTokens":
        """Return the same with other numbers of the versions."""
        return replace(self, versions=[(version + by, count) for version, count in self.versions])

    def part(self, request: GenerationRequest) -> list[TokenOutput]:
        """Return the tokens as the beginning of a response; nothing if they do not begin the response to a request."""
        limit = request.sampling_params.get("max_tokens")
        if list(request.prompt_ids) != self.prompt_ids or (limit is not None and len(self.token_ids) >= limit):
            return []
        return [TokenOutput(self.token_ids, self.log_probs, ABORTED, self.versions)]


KEPT_COLUMN = "kept_tokens"
"""The column of requests that holds the ``KeptTokens`` of each row, or None."""


class Hold:
    """Interrupts the requests of training in a process, and lets them wait until they may go on.

    A request is interrupted if the engine can continue its response as that to a longer prompt. Stop strings, penalties
    and grammars depend on where the response began: a request that has some is not interrupted.
    """

    def __init__(self) -> None:
        self._is_over = asyncio.Event()
        self._is_over.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._none_can_go_on = asyncio.Event()
        self._none_can_go_on.set()
        self._under_way: dict[str, Callable[[], None] | None] = {}
        self._interrupted: set[str] = set()
        self._kept: list[KeptTokens] = []
        self._held_s = 0.0
        self._since = 0.0

    @property
    def is_on(self) -> bool:
        """Whether requests of training have to wait."""
        return not self._is_over.is_set()

    def clock(self) -> float:
        """Return monotonic seconds without those in which requests were held."""
        now = time.monotonic()
        return now - self._held_s - (now - self._since if self.is_on else 0.0)

    async def wait(self) -> None:
        """Wait until requests may go on."""
        await self._is_over.wait()

    async def begin(self, waits_for_others: bool = True) -> list[KeptTokens]:
        """Interrupt the requests of training; once no server has one, return the tokens of those that got some.

        Args: without ``waits_for_others`` the servers keep the requests that cannot be interrupted.
        """
        end = self._is_idle if waits_for_others else self._none_can_go_on
        if not self.is_on:
            self._since = time.monotonic()
        self._is_over.clear()
        while not end.is_set():
            for request_id, abort in list(self._under_way.items()):
                if abort is not None:
                    self._interrupted.add(request_id)
                    abort()
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await end.wait()
        kept = self._kept
        self._kept = []
        return kept

    def keep(self, uid: str, sample: int, parts: "Parts") -> None:
        """Note the tokens of the interrupted first turn of a trajectory, if the last part has some."""
        if parts.outputs[-1].token_ids:
            whole = parts.joined()
            tokens = list(whole.token_ids)
            prompt = [int(token) for token in parts.request.prompt_ids]  # a loop may give other numbers, not JSON
            self._kept.append(KeptTokens(uid, sample, prompt, tokens, whole.log_probs, whole.versions))

    def end(self) -> None:
        """Let the requests go on."""
        if self.is_on:
            self._held_s += time.monotonic() - self._since
        self._is_over.set()

    def sent(self, request: GenerationRequest, abort: Callable[[], None]) -> None:
        """Note a request of training that a server gets."""
        can_go_on = _can_go_on(request)
        self._under_way[request.request_id] = abort if can_go_on else None
        self._is_idle.clear()
        if can_go_on:
            self._none_can_go_on.clear()

    def answered(self, request: GenerationRequest) -> bool:
        """Note that no server has a request any more; return whether it was interrupted."""
        self._under_way.pop(request.request_id, None)
        if not self._under_way:
            self._is_idle.set()
        if not any(self._under_way.values()):
            self._none_can_go_on.set()
        is_interrupted = request.request_id in self._interrupted
        self._interrupted.discard(request.request_id)
        return is_interrupted


def _can_go_on(request: GenerationRequest) -> bool:
    """Whether another request can continue the response."""
    params = dict(request.sampling_params)
    penalty = params.pop("repetition_penalty", None)
    return penalty in (None, 1.0) and all(name in _CONTINUED for name, value in params.items() if value is not None)


@dataclass
class Parts:
    """A response in parts, each sampled after the prompt and the tokens of the parts before it.

    Attributes:
        request: the request for the whole response.
        outputs: the parts so far.
    """

    request: GenerationRequest
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def is_full(self) -> bool:
        """Whether the response has as many tokens as it may have."""
        limit = self.request.sampling_params.get("max_tokens")
        return limit is not None and len(self.token_ids) >= limit

    def rest(self) -> GenerationRequest:
        """Return the request for the rest of the response.

        The seed depends on the number of tokens so far: an engine numbers the tokens of each request from 0, and one
        seed would give the same random numbers again.
        """
        if not self.outputs:
            return self.request
        tokens = self.token_ids
        params = dict(self.request.sampling_params)
        if params.get("max_tokens") is not None:
            params["max_tokens"] -= len(tokens)
        if tokens and params.get("seed") is not None:
            params["seed"] = derive_seed(params["seed"], "token", len(tokens))
        return replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *tokens],
            sampling_params=params,
            request_id=f"{self.request.request_id}.{len(self.outputs)}",
        )

    def joined(self) -> TokenOutput:
        """Return the parts as one response, which ends as the last of them; an interrupted one ends at its limit."""
        parts = self.outputs
        last = parts[-1]
        if len(parts) == 1:
            return last
        log_probs = [part.log_probs for part in parts if part.log_probs is not None]
        versions: list[tuple[int, int]] = []
        for version, count in (pair for part in parts for pair in part.versions):
            if versions and versions[-1][0] == version:
                count += versions.pop()[1]
            versions.append((version, count))
        expanded = last.expanded_prompt_ids
        earlier = len(self.token_ids) - len(last.token_ids)
        return TokenOutput(
            self.token_ids,
            [value for values in log_probs for value in values] if len(log_probs) == len(parts) else None,
            FULL if last.finish_reason == ABORTED else last.finish_reason,
            versions,
            parts[0].num_cached_tokens,
            None if expanded is None else expanded[: len(expanded) - earlier],
            sum(part.queue_s for part in parts),
            sum(part.sample_s for part in parts),
        )
