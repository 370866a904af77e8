"""Single requests to an SGLang engine, checked before it sees them, and their results.

A token that the model lacks, and some parameters, would end SGLang's scheduler with all of its requests.
"""

import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import WrongInput
from verl.workers.rollout.base import eos_token_ids
from verl.workers.rollout.server import ABORTED, GenerationRequest, TokenOutput, room_for_response
from verl.workers.rollout.sglang_rollout.media import MediaForm, Prompt

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Our names of parameters and SGLang's."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that constrain what is sampled; SGLang compiles each before its request starts."""
_NEED_TOKENIZER = ("stop", "stop_regex", "min_new_tokens", *GRAMMARS)
_OURS = (
    *("n", "beam_width", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"),
    *("is_normalized", "ebnf_full_assistant"),
)
"""Parameters that a caller must not set: a prompt has only one response in verl, and SGLang sets the others itself."""


@dataclass(frozen=True)
class Unexpanded:
    """A prompt with one token for each of its images and videos, and the media by kind."""

    token_ids: list[int]
    media: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class EngineParams:
    """SGLang's parameters of a request, and whether it returns log-probabilities."""

    values: dict[str, Any]
    log_probs: bool


class SGLangRequestForm:
    """Converts a request to SGLang's form; see ``RequestForm``.

    Args: ``context_length`` is the limit of prompt and response; ``vocab_size`` is that of the engine; ``draw_seed``
        gives a seed to a request that has none; ``media`` is None for a model that reads text only.
    """

    def __init__(
        self,
        config: "RolloutConfig",
        model_config: "HFModelConfig",
        context_length: int,
        vocab_size: int,
        draw_seed: Callable[[], int],
        media: MediaForm | None = None,
    ) -> None:
        from sglang.srt.sampling.sampling_params import SamplingParams as Known

        self._config = config
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._draw_seed = draw_seed
        self._media = media
        self._end_token_ids = [] if config.ignore_eos else eos_token_ids(model_config.eos_token_id)
        self._known_class: Any = Known
        self._known = [name for name in inspect.signature(Known).parameters if name not in _OURS]

    def prompt(self, request: GenerationRequest) -> Unexpanded:
        """Return the prompt before its images and videos are processed.

        Raises: WrongInput for an empty prompt, for a token that the model does not have, and for images and videos that
            the model does not take.
        """
        ids = request.token_ids(self._vocab_size)
        media = request.media
        if media and self._media is None:
            raise WrongInput(
                f"request {request.request_id}: the prompt has images or videos, and the model of "
                "actor_rollout_ref.model.path reads text only"
            )
        return Unexpanded(ids, media)

    def expanded(self, prompt: Unexpanded) -> Prompt:
        """Return the prompt in the engine's form; this runs the image and video processor.

        Raises: WrongInput for images or videos that do not fit the prompt.
        """
        if not prompt.media:
            return Prompt(prompt.token_ids)
        assert self._media is not None, "prompt refuses images and videos without it"
        return self._media.expand(prompt.token_ids, prompt.media)

    def fitted(self, params: EngineParams, prompt_length: int) -> dict[str, Any]:
        """Return SGLang's parameters for a prompt that has all tokens of its images and videos.

        Raises: WrongInput if it leaves no room for a token.
        """
        room = room_for_response(prompt_length, self._context_length)
        return params.values | {"max_new_tokens": min(params.values["max_new_tokens"], room)}

    def params(self, request: GenerationRequest) -> EngineParams:
        """Return SGLang's parameters of a request.

        Raises: WrongInput for an option that the engine does not have or cannot serve.
        """
        room = room_for_response(len(request.prompt_ids), self._context_length)
        given = dict(request.sampling_params)
        try:
            return self._checked(dict(given), room)
        except (TypeError, ValueError, OverflowError) as error:
            raise WrongInput(f"sampling parameters {given}: {error}") from error

    def _checked(self, given: dict[str, Any], room: int) -> EngineParams:
        wanted = given.pop("logprobs", None)
        values: dict[str, Any] = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        unknown = sorted(values.keys() - set(self._known))
        if unknown:
            raise WrongInput(f"SGLang has no option {', '.join(unknown)} for a request")
        for name in _NEED_TOKENIZER:
            if values.get(name) and self._config.skip_tokenizer_init:
                raise WrongInput(
                    f"{name}={values[name]!r} needs the engine's tokenizer: set actor_rollout_ref.rollout."
                    "skip_tokenizer_init=false, or, for stop strings, send stop_token_ids"
                )
        _check_types(values)
        values["max_new_tokens"] = min(room, int(values.get("max_new_tokens") or room))
        values["top_k"] = int(values.get("top_k", -1)) or -1  # 0 is off, too
        if values["top_k"] == 1:  # SGLang takes both for the same
            values["temperature"] = 0.0
        usual = [] if values.pop("ignore_eos", False) else self._end_token_ids
        ends = [int(token) for token in (*usual, *values.pop("stop_token_ids", ()))]
        values["stop_token_ids"] = [token for token in ends if 0 <= token < self._vocab_size]
        values["ignore_eos"] = True  # the model's folder must not name the end tokens
        if values.get("temperature", 1.0) and values.get("sampling_seed") is None:
            values["sampling_seed"] = self._draw_seed()
        self._known_class(**values).verify(self._vocab_size)
        return EngineParams(values, self._config.calculate_log_probs if wanted is None else bool(wanted))

    def not_started(self, params: EngineParams) -> TokenOutput:
        """Return the result of a request that was aborted before it reached the engine."""
        return TokenOutput([], [] if params.log_probs else None, ABORTED)


def _check_types(values: dict[str, Any]) -> None:
    """Refuse values that SGLang does not check itself, and at which its processes would die.

    Raises: TypeError and ValueError naming the parameter.
    """
    for name in GRAMMARS:
        if not isinstance(values.get(name, ""), str):
            raise TypeError(f"{name} must be a text, got {type(values[name]).__name__}")
    for name in ("stop", "stop_regex"):
        given = values.get(name, [])
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name} must be a text or a list of texts, got {given!r}")
        for text in texts if name == "stop_regex" else ():
            try:
                re.compile(text)
            except re.error as error:
                raise ValueError(f"stop_regex={text!r}: {error}") from error
    for name in ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
        if not isinstance(values.get(name, True), bool):
            raise TypeError(f"{name} must be true or false, got {values[name]!r}")
    if "logit_bias" in values:
        bias = {str(int(token)): float(value) for token, value in dict(values["logit_bias"]).items()}
        if not all(map(math.isfinite, bias.values())):  # SGLang would sample token 0
            raise ValueError(f"logit_bias={values['logit_bias']}: each value must be a finite number")
        values["logit_bias"] = bias


def token_output(
    result: Mapping[str, Any], prompt: Prompt, params: EngineParams, arrived: float, started: float
) -> TokenOutput:
    """Return the result of a request that the engine has ended just now.

    Args: ``arrived`` and ``started`` are when the server and the engine got it, in monotonic seconds.
    """
    tokens = list(result.get("output_ids") or ())
    meta = result["meta_info"]
    return TokenOutput(
        token_ids=tokens,
        log_probs=[entry[0] for entry in meta.get("output_token_logprobs") or ()] if params.log_probs else None,
        finish_reason=(meta["finish_reason"] or {}).get("type"),
        versions=_versions(meta, len(tokens)),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        expanded_prompt_ids=None if prompt.media is None else prompt.token_ids,
        queue_s=started - arrived,
        sample_s=time.monotonic() - started,
    )


def _versions(meta: Mapping[str, Any], count: int) -> list[tuple[int, int]]:
    """Return which version of the weights sampled how many tokens; SGLang lists them only if there are several."""
    if not count:
        return []
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    return [(int(span["version"]), span["end"] - span["start"]) for span in spans if span["end"] > span["start"]]
