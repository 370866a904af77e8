"""How an engine runs one pass over a batch, and what it computes in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

EntropyMode = Literal["none", "value", "grad"]
"""Whether entropies are computed, and whether a loss differentiates them."""


@dataclass(frozen=True)
class PassSpec:
    """The options of one forward, or forward and backward, pass.

    Args:
        use_dynamic_bsz: cut micro-batches by tokens (``max_token_len``) instead of rows (``micro_batch_size``).
        micro_batch_size: rows of one forward; None runs the whole batch at once.
        max_token_len: most tokens that one rank holds in one forward.
        temperature: divides the logits.
        entropy: ``value`` returns entropies, ``grad`` also differentiates them.
        full_kl: return the exact divergence from the reference at each token; see ``BaseEngine.set_reference``.
        after_first_forward: called between the first forward of the pass and its backward; tests inject faults there.

    Raises: ValueError when ``use_dynamic_bsz`` has no token limit.
    """

    use_dynamic_bsz: bool = False
    micro_batch_size: int | None = None
    max_token_len: int | None = None
    temperature: float = 1.0
    entropy: EntropyMode = "none"
    full_kl: bool = False
    after_first_forward: Callable[[], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.use_dynamic_bsz and not self.max_token_len:
            raise ValueError(
                f"use_dynamic_bsz=True needs max_token_len_per_gpu of 1 or more, got {self.max_token_len}: "
                "set it, or cut by rows with use_dynamic_bsz=False"
            )

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Read the established keys of ``DataProto.meta_info``. This is the only place that reads them.

        Engines name the cut ``micro_batch_size_per_gpu`` and ``max_token_len_per_gpu``, actors and critics around
        a module (``DataParallelPPOActor``) ``micro_batch_size`` and ``max_token_len``.
        """
        entropy: EntropyMode = "none"
        if meta.get("calculate_entropy", False):
            entropy = "grad" if meta.get("entropy_needs_grad", True) else "value"
        return cls(
            use_dynamic_bsz=bool(meta.get("use_dynamic_bsz", False)),
            micro_batch_size=meta.get("micro_batch_size_per_gpu") or meta.get("micro_batch_size"),
            max_token_len=meta.get("max_token_len_per_gpu") or meta.get("max_token_len"),
            temperature=float(meta.get("temperature", 1.0)),
            entropy=entropy,
            full_kl=bool(meta.get("calculate_full_kl", False)),
        )

    @property
    def entropy_mode(self) -> EntropyMode:
        """The entropy to compute now: without autograd, ``grad`` is ``value``."""
        return "value" if self.entropy == "grad" and not torch.is_grad_enabled() else self.entropy
