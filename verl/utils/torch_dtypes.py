"""The ways in which a floating-point precision is written."""

from typing import Any

import torch

_SPELLINGS: dict[torch.dtype, tuple[Any, ...]] = {
    torch.float16: (16, "16", "fp16", "float16", "half", torch.float16),
    torch.float32: (32, "32", "fp32", "float32", "float", torch.float32),
    torch.bfloat16: ("bf16", "bfloat16", torch.bfloat16),
}
_SHORT = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}


class PrecisionError(ValueError, RuntimeError):
    """A precision is written in no known way."""


class PrecisionType:
    """From every spelling of a precision to its dtype and short name."""

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        """Return the dtype.

        Raises: PrecisionError, a ValueError and RuntimeError, listing what can be written.
        """
        for dtype, spellings in _SPELLINGS.items():
            if precision in spellings and not isinstance(precision, bool):
                return dtype
        known = [str(spelling) for spellings in _SPELLINGS.values() for spelling in spellings]
        raise PrecisionError(f"precision {precision!r} must be one of {', '.join(known)}")

    @classmethod
    def to_str(cls, precision: Any) -> str:
        """Return ``fp16``, ``fp32`` or ``bf16``."""
        return _SHORT[cls.to_dtype(precision)]

    @staticmethod
    def is_fp16(precision: Any) -> bool:
        """Whether it is written as half precision."""
        return precision in _SPELLINGS[torch.float16]

    @staticmethod
    def is_fp32(precision: Any) -> bool:
        """Whether it is written as single precision."""
        return precision in _SPELLINGS[torch.float32]

    @staticmethod
    def is_bf16(precision: Any) -> bool:
        """Whether it is written as bfloat16."""
        return precision in _SPELLINGS[torch.bfloat16]
