"""Sample next tokens from logits, each row with a separate seed."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Sampler:
    """Draw one token per row and call.

    Args: ``values`` holds ``temperature`` (0 is greedy), ``top_p``, ``top_k`` (0 or -1 is off) and
    ``repetition_penalty``; the draws of a row depend only on its seed and its logits.
    """

    def __init__(self, values: dict[str, float], seeds: Sequence[int], device: torch.device) -> None:
        self._temperature = values["temperature"]
        self._top_p = values["top_p"]
        self._top_k = int(values["top_k"])
        self._penalty = values["repetition_penalty"]
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B,) and their log-probabilities (B,) under the sampled distribution.

        Args: logits are (B, V) float32 and may be overwritten; ``seen`` (B, T) are the tokens so far, -1 for padding.
        """
        if self._penalty != 1.0:
            logits = self._penalise(logits, seen)
        if self._temperature > 0:
            logits = filter_top_p(filter_top_k(logits / self._temperature, self._top_k), self._top_p)
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


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the ``k`` largest logits of each row; 0 or -1 keeps all."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, float("-inf"))


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches ``p``, at least one."""
    if p >= 1:
        return logits
    ordered, index = logits.sort(dim=-1)
    drop = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))
