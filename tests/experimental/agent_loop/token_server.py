"""A rollout server without an engine: it says what a test wants, and keeps what it was asked."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.workers.rollout.server import TokenOutput

Tokenizer = Any  # of transformers


class Remote:
    """A method as Ray offers it, without a process in between."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class TokenServer:
    """Answers a prompt by ``says(text of the prompt)``, with the end-of-turn token; an exception is raised.

    Log-probabilities are -0.25 times the number of the token, so that each token has its own. A text ``...`` at the
    beginning of an answer lets the request wait until it is cancelled.
    """

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str | Exception]) -> None:
        self.tokenizer = tokenizer
        self.says = says
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []
        self.media: list[Mapping[str, Any] | None] = []
        self.cancelled: list[str] = []
        self.generate = Remote(self._generate)
        self.abort = Remote(self._abort)

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        prompt = list(prompt_ids)
        self.asked.append((request_id, prompt, dict(sampling_params)))
        self.media.append(multi_modal_data)
        text = self.says(self.tokenizer.decode(prompt))
        if isinstance(text, Exception):
            raise text
        if text.startswith("..."):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(request_id)
                raise
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        kept = tokens[: sampling_params["max_tokens"]]
        log_probs = [-0.25 * number for number in range(1, len(kept) + 1)]
        return TokenOutput(
            token_ids=kept,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            finish_reason="stop" if kept == tokens else "length",
            versions=[(3, len(kept))],
            num_cached_tokens=1,
        )

    async def _abort(self, request_id: str) -> bool:
        return True
