"""Import path of the established verl interface for ``FusedLinearForPPO``."""

from verl.compat.fused_linear import FusedLinearForPPO

__all__ = ["FusedLinearForPPO"]
