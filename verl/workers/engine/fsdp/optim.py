"""AdamW and its schedule."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.numerics.lr_schedules import num_warmup_steps
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

if TYPE_CHECKING:
    from verl.workers.config import FSDPOptimizerConfig


def build_optimizer(parameters: Sequence[Tensor], config: "FSDPOptimizerConfig") -> torch.optim.AdamW:
    """Return AdamW over the parameters that train.

    Raises: ValueError when no parameter trains.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model trains: unfreeze some, or set fsdp_config.forward_only=True")
    return torch.optim.AdamW(
        trained, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay, fused=True
    )


def build_scheduler(optimizer: torch.optim.Optimizer, config: "FSDPOptimizerConfig") -> LambdaLR:
    """Return the schedule.

    Raises: ValueError when the schedule needs a length that was not given.
    """
    total = config.total_training_steps if config.total_training_steps is not None else -1
    warmup = num_warmup_steps(config.lr_warmup_steps, config.lr_warmup_steps_ratio, total)
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if total <= 0:
        raise ValueError(f"optim.lr_scheduler_type=cosine needs optim.total_training_steps > 0, got {total}")
    return get_cosine_schedule_with_warmup(
        optimizer, warmup, total, min_lr_ratio=config.min_lr_ratio or 0.0, num_cycles=config.num_cycles
    )
