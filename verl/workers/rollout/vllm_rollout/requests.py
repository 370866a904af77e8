"""Single requests to a vLLM engine and their results, the same for the engine of a worker and for a server."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.errors import WrongInput
from verl.workers.rollout.base import eos_token_ids
from verl.workers.rollout.server import ABORTED, GenerationRequest, TokenOutput, room_for_response
from verl.workers.rollout.vllm_rollout.media import Request, media_of

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm import SamplingParams as EngineParams

    from verl.workers.config import HFModelConfig, RolloutConfig


class VLLMRequestForm:
    """Converts a request to vLLM's form; see ``RequestForm``.

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

    def prompt(self, request: GenerationRequest) -> Request:
        """Return vLLM's prompt.

        Raises: WrongInput for an empty prompt, and for a token that the model does not have.
        """
        prompt: Request = {"prompt_token_ids": request.token_ids(self._vocab_size)}
        media = request.media
        return prompt | media_of(media) if media else prompt

    def params(self, request: GenerationRequest) -> "EngineParams":
        """Return vLLM's parameters of a request.

        Raises: WrongInput for an option that the engine does not have or cannot serve.
        """
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        room = room_for_response(len(request.prompt_ids), self._max_model_len)
        given = dict(request.sampling_params)
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
            raise WrongInput(f"sampling parameters {given}: {', '.join(taken)}: {expected}")
        try:
            return EngineParams(**values | fixed)
        except refusals() as error:
            raise WrongInput(f"sampling parameters {given}: {error}") from error

    def not_started(self, params: "EngineParams") -> TokenOutput:
        """Return the result of a request that was aborted before it reached the engine."""
        return TokenOutput([], [] if params.logprobs is not None else None, ABORTED)


NO_SEED = -1
"""The seed that vLLM treats as no seed: each rank of a tensor-parallel group then draws its own seed."""


def greedy_seed(config: "RolloutConfig") -> int | None:
    """Return the seed of a greedy request, which has no effect on its tokens.

    Several ranks get one: for a request without a seed vLLM draws one on each of them.
    """
    return 0 if config.tensor_model_parallel_size > 1 else None


def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions by which vLLM refuses a request."""
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
