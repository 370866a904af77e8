"""Spellings of floating-point precisions."""

import torch

from verl.errors import PrecisionError

Precision = int | str | torch.dtype

_SPELLINGS: dict[torch.dtype, tuple[Precision, ...]] = {
    torch.float16: (16, "16", "fp16", "float16", "half", torch.float16),
    torch.float32: (32, "32", "fp32", "float32", "float", torch.float32),
    torch.bfloat16: ("bf16", "bfloat16", torch.bfloat16),
}
_SHORT = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}


class PrecisionType:
    """Conversion from any spelling of a precision to its dtype and short name."""

    @staticmethod
    def to_dtype(precision: Precision) -> torch.dtype:
        """Return the dtype.

        Raises: PrecisionError, a ValueError and RuntimeError, listing the known spellings.
        """
        for dtype, spellings in _SPELLINGS.items():
            if precision in spellings and not isinstance(precision, bool):
                return dtype
        known = [str(spelling) for spellings in _SPELLINGS.values() for spelling in spellings]
        raise PrecisionError(f"precision {precision!r} must be one of {', '.join(known)}")

    @classmethod
    def to_str(cls, precision: Precision) -> str:
        """Return ``fp16``, ``fp32`` or ``bf16``."""
        return _SHORT[cls.to_dtype(precision)]

    @staticmethod
    def is_fp16(precision: Precision) -> bool:
        """Whether this is a spelling of half precision."""
        return precision in _SPELLINGS[torch.float16]

    @staticmethod
    def is_fp32(precision: Precision) -> bool:
        """Whether this is a spelling of single precision."""
        return precision in _SPELLINGS[torch.float32]

    @staticmethod
    def is_bf16(precision: Precision) -> bool:
        """Whether this is a spelling of bfloat16."""
        return precision in _SPELLINGS[torch.bfloat16]


def smaller_dtype(held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the wanted floating-point dtype if it takes fewer bytes than the one that is held, else that one."""
    if wanted is None or not held.is_floating_point or wanted.itemsize >= held.itemsize:
        return held
    return wanted
