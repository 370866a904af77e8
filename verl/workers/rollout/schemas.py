"""Import path of conversations that user code drives in the established verl interface."""

from verl.compat.rollout_requests import AsyncRolloutRequest, AsyncRolloutRequestStateEnum, FinishReasonTypeEnum
from verl.tools.schemas import Message
from verl.utils.chat import SanityCheckMode as TokenizationSanityCheckModeEnum

__all__ = [
    "AsyncRolloutRequest",
    "AsyncRolloutRequestStateEnum",
    "FinishReasonTypeEnum",
    "Message",
    "TokenizationSanityCheckModeEnum",
]
