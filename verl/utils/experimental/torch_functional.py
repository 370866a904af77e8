"""Established path of ``FusedLinearForPPO``."""

from verl.compat.fused_linear import FusedLinearForPPO

__all__ = ["FusedLinearForPPO"]
