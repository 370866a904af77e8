"""Single requests to a vLLM engine and their results, the same for the engine of a worker and for a server."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.errors import WrongInput
from verl.workers.rollout.base import eos_token_ids
from verl.workers.rollout.server import ABORTED, SamplingParams, TokenOutput
from verl.workers.rollout.vllm_rollout.media import Request, media_of

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm import SamplingParams as EngineParams

    from verl.workers.config import HFModelConfig, RolloutConfig


class RequestForm:
    """Turns what a caller sends into what vLLM takes.

    Args: ``max_model_len`` and ``vocab_size`` are those of the engine; ``draw_seed`` gives a seed to a request that
        has none.
    """

    def __init__(
        self,
        config: "RolloutConfig",
        model_config: "HFModelConfig",
        max_model_len: int,
        vocab_size: int,
        draw_seed: Callable[[], int],
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._draw_seed = draw_seed
        self._end_token_ids = [] if config.ignore_eos else eos_token_ids(model_config.eos_token_id)

    def request(
        self,
        prompt_ids: Sequence[int],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return vLLM's request; ``image_data`` is the established form of ``multi_modal_data={"image": ...}``.

        Raises: WrongInput for an empty prompt, and for a token that the model does not have.
        """
        request: Request = {"prompt_token_ids": self._checked_prompt(prompt_ids, request_id)}
        media = dict(multi_modal_data or {}) | ({"image": list(image_data)} if image_data else {})
        return request | media_of(media) if media else request

    def _checked_prompt(self, prompt_ids: Sequence[int], request_id: str) -> list[int]:
        """Return the prompt as a list; vLLM takes unknown tokens for zeros."""
        ids = list(prompt_ids)
        if not ids:
            raise WrongInput(f"request {request_id}: the prompt is empty: send at least one token")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise WrongInput(
                f"request {request_id}: the prompt has token {wrong}; the model's are 0 to {self._vocab_size - 1}"
            )
        return ids

    def params(self, given: SamplingParams, prompt_length: int) -> "EngineParams":
        """Return vLLM's parameters of a request.

        Raises: WrongInput for an option that the engine does not have or cannot serve.
        """
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        room = self._max_model_len - prompt_length
        if room < 1:
            raise WrongInput(
                f"the prompt has {prompt_length} tokens and the engine's context {prompt_length + room}: lower the "
                "length of the prompt, or raise actor_rollout_ref.rollout.max_model_len"
            )
        values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, **given}
        if values.get("stop") and self._config.skip_tokenizer_init:
            raise WrongInput(
                f"stop={values['stop']!r}: the engine needs its tokenizer for stop strings: set "
                "actor_rollout_ref.rollout.skip_tokenizer_init=false, or send stop_token_ids"
            )
        wanted = values.pop("logprobs", None)
        own_ends = [] if values.pop("ignore_eos", False) else self._end_token_ids
        ends = own_ends + list(values.pop("stop_token_ids", None) or [])
        values["max_tokens"] = min(room, values.get("max_tokens") or room)
        values["top_k"] = max(0, int(values["top_k"]))
        if values.get("seed") in (None, NO_SEED):
            values["seed"] = self._draw_seed() if values["temperature"] else greedy_seed(self._config)
        fixed: dict[str, Any] = {
            "n": 1,
            "ignore_eos": True,  # the model's folder must not name the end tokens
            "stop_token_ids": ends,
            "detokenize": bool(values.get("stop")),
            "logprobs": 0 if wanted or (wanted is None and self._config.calculate_log_probs) else None,
            "flat_logprobs": True,
            "skip_clone": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        taken = sorted(name for name in fixed.keys() & values.keys() if values[name] != fixed[name])
        if taken:
            expected = "a request has one response, whose form the server decides: leave it out"
            raise WrongInput(f"sampling parameters {dict(given)}: {', '.join(taken)}: {expected}")
        try:
            return EngineParams(**values | fixed)
        except refusals() as error:
            raise WrongInput(f"sampling parameters {dict(given)}: {error}") from error

    def not_started(self, params: "EngineParams") -> TokenOutput:
        """Return the result of a request that was aborted before it reached the engine."""
        return TokenOutput([], [] if params.logprobs is not None else None, ABORTED)


NO_SEED = -1
"""Taken by vLLM for no seed: it then draws one, and each rank of a tensor-parallel group its own."""


def greedy_seed(config: "RolloutConfig") -> int | None:
    """Return the seed of a request for the most likely tokens, which nothing is drawn by.

    Several ranks get one: for a request without a seed vLLM draws one on each of them.
    """
    return 0 if config.tensor_model_parallel_size > 1 else None


def refusals() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a request that it refuses."""
    from vllm import exceptions

    return TypeError, ValueError, exceptions.VLLMClientError


def token_output(
    output: "RequestOutput",
    request: Request,
    params: "EngineParams",
    arrived: float,
    started: float,
    version: int | None = None,
) -> TokenOutput:
    """Return the result of a request that the engine has ended just now.

    Args: ``arrived`` and ``started`` are when the server and the engine got it, in monotonic seconds. The engine knows
        better when it began, if ``rollout.disable_log_stats`` is false. ``version`` is that of the weights that sampled
        all tokens, if it is known; vLLM tells it since 0.32.
    """
    sample = output.outputs[0]
    ended = time.monotonic()
    stats = output.metrics
    if stats is not None and stats.scheduled_ts:
        started = max(arrived, ended - (stats.last_token_ts - stats.scheduled_ts))
    spans = getattr(sample, "weight_versions", None)
    untold = [] if version is None or not sample.token_ids else [(version, len(sample.token_ids))]
    return TokenOutput(
        token_ids=list(sample.token_ids),
        log_probs=flat_log_probs(sample) if params.logprobs is not None else None,
        finish_reason=sample.finish_reason,
        versions=untold if spans is None else [(int(span.version), span.end - span.start) for span in spans],
        num_cached_tokens=output.num_cached_tokens or 0,
        expanded_prompt_ids=list(output.prompt_token_ids or []) if "multi_modal_data" in request else None,
        queue_s=started - arrived,
        sample_s=ended - started,
    )


def flat_log_probs(output: "CompletionOutput") -> list[float]:
    """Return the log-probabilities of the sampled tokens; ``flat_logprobs`` makes them one list."""
    found: Any = output.logprobs
    return [] if found is None else found.logprobs  # None for a response without tokens
