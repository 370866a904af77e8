"""The contract of rollout servers: token ids in, token ids out, request by request."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl.errors import WrongInput

if TYPE_CHECKING:
    from verl.workers.rollout.weight_channel import Layout, Meeting, Received

PromptT_co = TypeVar("PromptT_co", covariant=True)
"""The prompt of a request as an engine takes it."""
ParamsT = TypeVar("ParamsT")
"""The sampling parameters of a request as an engine takes them."""

SamplingParams = Mapping[str, Any]
"""How to sample a request: ``temperature``, ``top_p``, ``top_k``, ``repetition_penalty``, ``seed``, ``max_tokens``,
``logprobs`` (whether to return log-probabilities), ``stop``, ``stop_token_ids``, and other options of the engine."""

ABORTED = "abort"
FULL = "length"
"""Why a response ended: the request was aborted, or the response reached its limit. Else it ended by itself."""


def cause_of(error: Exception) -> Exception:
    """Return the error that a server has raised, without Ray's trace in its message; an error of Ray itself stays."""
    cause = getattr(error, "cause", None)  # the cause of a RayTaskError
    return cause if isinstance(cause, Exception) else error


_MEDIA = ("image_data", "multi_modal_data")


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue.

    Attributes:
        prompt_ids: its tokens, (P,), with one token for each image or video.
        sampling_params: how to sample.
        request_id: the name by which ``abort`` knows it; several requests may share one.
        image_data: its images, as the established verl interface gives them: ``multi_modal_data={"image": ...}``.
        multi_modal_data: its images by ``image``, and its videos, each as (frames, metadata), by ``video``.
    """

    prompt_ids: Sequence[int]
    sampling_params: SamplingParams
    request_id: str
    image_data: Sequence[Any] | None = None
    multi_modal_data: Mapping[str, Any] | None = None

    @property
    def media(self) -> dict[str, Sequence[Any]]:
        """The images and videos by kind, without kinds that have none."""
        media = dict(self.multi_modal_data or {}) | ({"image": list(self.image_data)} if self.image_data else {})
        return {kind: items for kind, items in media.items() if items}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` in the established verl interface, without media that are empty.

        A user's server might not take both forms of images.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if name not in _MEDIA or value}

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the prompt as a list; an engine treats unknown tokens as zeros, or dies.

        Raises: WrongInput for an empty prompt, and for a token that the model does not have.
        """
        ids = [int(token) for token in self.prompt_ids]
        if not ids:
            raise WrongInput(f"request {self.request_id}: the prompt is empty: send at least one token")
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise WrongInput(
                f"request {self.request_id}: the prompt has token {wrong}; the model's are 0 to {vocab_size - 1}"
            )
        return ids


def room_for_response(prompt_length: int, context_length: int) -> int:
    """Return how many tokens may follow a prompt.

    Raises: WrongInput if there is no room for one.
    """
    room = context_length - prompt_length
    if room < 1:
        raise WrongInput(
            f"the prompt has {prompt_length} tokens and the engine's context {context_length}: lower the length of "
            "the prompt, or raise actor_rollout_ref.rollout.max_model_len"
        )
    return room


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


class RolloutServer(ABC):
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
        """Continue a prompt: the form of ``answer`` in the established verl interface."""
        return await self.answer(
            GenerationRequest(prompt_ids, sampling_params, request_id, image_data, multi_modal_data)
        )

    @abstractmethod
    async def answer(self, request: GenerationRequest) -> TokenOutput:
        """Continue a prompt.

        A response depends on prompt, ``sampling_params`` and weights. Cancelling the call aborts the request.

        Raises: RuntimeError without usable weights; ValueError for a prompt that leaves no room for a token;
            ServerError if the engine is gone.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request: its caller gets the tokens so far, with ``finish_reason`` ``abort``.

        Returns whether the server knows the request.
        """

    @abstractmethod
    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return what the engine does: ``running``, ``waiting``, ``version``, and what else it tells.

        Raises: ServerError if the engine is gone or does not answer before the deadline.
        """


class ServedEngine(Protocol):
    """An engine in separate processes, as the server that owns it sees it; the server has the deadlines."""

    workers: int
    """How many processes hold a part of the model."""

    @property
    def pids(self) -> list[int]:
        """The processes of the engine."""

    def death(self) -> str | None:
        """Return why the engine is gone, None while it lives; an engine may also raise one of the server's deaths."""

    def stop(self) -> None:
        """End all processes of the engine."""

    async def abort(self, key: str) -> bool:
        """End a request; return whether the engine has it, or had it."""

    async def pause(self) -> None:
        """Stop between two steps, and keep all requests."""

    async def resume(self) -> None:
        """Go on."""

    async def ping(self) -> None:
        """Wait for an answer of the processes that hold the model."""

    async def set_version(self, version: int) -> None:
        """Set the version of the weights that the engine has loaded by itself."""

    async def connect(self, meeting: "Meeting") -> None:
        """Join the process group that broadcasts weights; ``meeting`` has the fields of ``Rendezvous``."""

    async def begin_update(self) -> None:
        """Open the model for new weights."""

    async def load(self, layout: "Layout", path: str | None) -> None:
        """Load a bucket from shared memory, or from the group that ``connect`` has joined."""

    async def finish_update(self, version: int) -> "Received":
        """Complete the update, read the weights back, and drop cached results of older weights.

        Returns the ``checksums`` of the tensors that arrived, on all workers alike, and how many were ``unverified``.
        Raises: RuntimeError naming tensors that are missing or differ.
        """

    async def abort_update(self) -> None:
        """Drop the tensors received so far; the next update may begin."""


class RequestForm(Protocol[PromptT_co, ParamsT]):
    """Converts a request to the engine's own form of prompt and sampling parameters."""

    def prompt(self, request: GenerationRequest) -> PromptT_co:
        """Return the prompt with its images and videos.

        Raises: WrongInput for tokens that the model does not have, and for media that it cannot take.
        """

    def params(self, request: GenerationRequest) -> ParamsT:
        """Return the sampling parameters.

        Raises: WrongInput for an option that the engine does not have or cannot serve.
        """

    def not_started(self, params: ParamsT) -> TokenOutput:
        """Return the result of a request that was aborted before it reached the engine."""
