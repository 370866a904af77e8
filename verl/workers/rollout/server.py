"""The contract of rollout servers: token ids in, token ids out, request by request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SamplingParams = Mapping[str, Any]
"""How to sample a request: ``temperature``, ``top_p``, ``top_k``, ``repetition_penalty``, ``seed``, ``max_tokens``,
``logprobs`` (whether to return log-probabilities), ``stop``, ``stop_token_ids``, and other options of the engine."""

ABORTED = "abort"
FULL = "length"
"""Why a response ended: the request was aborted, or the response reached its limit. Else it ended by itself."""


def cause_of(error: Exception) -> Exception:
    """Return the error that a server has raised, whose message does not begin with Ray's trace, or that of Ray."""
    cause = getattr(error, "cause", None)  # of a RayTaskError
    return cause if isinstance(cause, Exception) else error


@dataclass
class TokenOutput:
    """The response to a request.

    Attributes:
        token_ids: the sampled tokens, (R,).
        log_probs: their log-probabilities, (R,), if asked for.
        finish_reason: ``stop``, ``length`` or ``abort``.
        versions: (version of the weights, number of tokens that they sampled), in the order of the tokens.
        num_cached_tokens: tokens of the prompt whose keys and values were in the cache.
        expanded_prompt_ids: the prompt as the engine saw it, (P,), with all tokens of its images; None for text.
        queue_s: how long the request waited in the server before the engine began with it.
        sample_s: how long the engine then took.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    finish_reason: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    expanded_prompt_ids: list[int] | None = None
    queue_s: float = field(default=0.0, compare=False)
    sample_s: float = field(default=0.0, compare=False)

    @property
    def weight_versions(self) -> list[int]:
        """The version of the weights that sampled each token, (R,)."""
        return [version for version, count in self.versions for _ in range(count)]


class RolloutServer(Protocol):
    """An engine that answers requests in any order, whoever sends them.

    While it is paused, as during training and weight updates of a hybrid engine, requests wait.
    """

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        image_data: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        """Continue a prompt.

        A response depends on prompt, ``sampling_params`` and weights. Cancelling the call aborts the request.

        Raises: ValueError for a prompt that leaves no room for a token; ServerError if the engine is gone.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request: its caller gets the tokens so far, with ``finish_reason`` ``abort``.

        Returns whether the server knows the request.
        """

    async def health(self, timeout_s: float) -> dict[str, float]:
        """Return what the engine does: ``running``, ``waiting``, ``version``, and what else it tells.

        Raises: ServerError if the engine is gone or does not answer before the deadline.
        """
