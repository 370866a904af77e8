"""Established import path of ``AsyncRolloutRequest``, a conversation that user code drives."""

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
