"""Sample next tokens from logits, each row with a separate seed."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper


class Sampler:
    """Draw one token per row and call.

    Args: ``values`` holds ``temperature`` (0 is greedy), ``top_p``, ``top_k`` (0 or -1 is off) and
    ``repetition_penalty``; the draws of a row depend only on its seed and its logits.
    """

    def __init__(self, values: dict[str, float], seeds: Sequence[int], device: torch.device) -> None:
        self._temperature = values["temperature"]
        self._filters: list[LogitsProcessor] = []
        if values["top_k"] > 0:
            self._filters.append(TopKLogitsWarper(int(values["top_k"])))
        if values["top_p"] < 1:
            self._filters.append(TopPLogitsWarper(values["top_p"]))
        self._penalty = values["repetition_penalty"]
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B,) and their log-probabilities (B,) under the sampled distribution.

        Args: logits are (B, V) float32 and may be overwritten; ``seen`` (B, T) are the tokens so far, -1 for padding.
        """
        if self._penalty != 1.0:
            logits = self._penalise(logits, seen)
        if self._temperature > 0:
            logits = logits / self._temperature
            for keep_likely in self._filters:
                logits = keep_likely(seen, logits)
        log_probs = logits.log_softmax(dim=-1)
        token = self._draw(log_probs) if self._temperature > 0 else logits.argmax(dim=-1)
        return token, log_probs.gather(-1, token[:, None])[:, 0]

    def _draw(self, log_probs: Tensor) -> Tensor:
        """Sample by the exponential race: the arg max of p / Exp(1) has distribution p."""
        noise = torch.empty_like(log_probs)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return (log_probs - noise.log()).argmax(dim=-1)

    def _penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Divide positive and multiply negative logits of seen tokens.

        Source: CTRL (arXiv:1909.05858), section 4.1.
        """
        hit = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
        hit.scatter_(1, torch.where(seen < 0, logits.shape[1], seen), True)
        penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
        return torch.where(hit[:, :-1], penalised, logits)
