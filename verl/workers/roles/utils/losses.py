"""Import path of the losses of the roles in the established verl interface."""

from verl.workers.roles.losses import ppo_loss, sft_loss, value_loss

__all__ = ["ppo_loss", "sft_loss", "value_loss"]
