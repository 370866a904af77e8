"""AdamW, its schedule, the gradient norm and clipping for sharded and plain parameters."""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

if TYPE_CHECKING:
    from verl.workers.config import FSDPOptimizerConfig


def build_optimizer(parameters: list[Tensor], config: "FSDPOptimizerConfig") -> torch.optim.AdamW:
    """Return AdamW over the parameters that train.

    Raises: ValueError when none does.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model trains: unfreeze some, or set fsdp_config.forward_only=True")
    return torch.optim.AdamW(
        trained, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay, fused=True
    )


def build_scheduler(optimizer: torch.optim.Optimizer, config: "FSDPOptimizerConfig") -> LambdaLR:
    """Return the schedule; ``lr_warmup_steps`` of 0 or less leaves the warm-up to the ratio.

    Raises: ValueError when the schedule needs a length that was not given.
    """
    total = config.total_training_steps if config.total_training_steps is not None else -1
    warmup = config.lr_warmup_steps if config.lr_warmup_steps is not None else -1
    if warmup <= 0:
        if config.lr_warmup_steps_ratio > 0 and total <= 0:
            raise ValueError(f"optim.lr_warmup_steps_ratio > 0 needs optim.total_training_steps > 0, got {total}")
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if total <= 0:
        raise ValueError(f"optim.lr_scheduler_type=cosine needs optim.total_training_steps > 0, got {total}")
    return get_cosine_schedule_with_warmup(
        optimizer, warmup, total, min_lr_ratio=config.min_lr_ratio or 0.0, num_cycles=config.num_cycles
    )


def local_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Return this rank's shard of every gradient that is there."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def gradient_norm(gradients: list[Tensor], shard_group: ProcessGroup | None, device: torch.device) -> float:
    """Return the norm of the whole gradient, in fp32; replicas count once. Collective over the shards."""
    squared = torch.zeros((), dtype=torch.float32, device=device)
    kept = [g for g in gradients if g.numel()]
    if kept:
        norms = torch.stack(torch._foreach_norm(kept, 2.0, dtype=torch.float32))
        squared += norms.square().sum().to(device)
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(squared, group=shard_group)
    return math.sqrt(value) if (value := squared.item()) >= 0 and math.isfinite(value) else math.nan


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients in place so that their norm is at most ``limit``."""
    if norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    """Move moments to ``device``; the scalar step counts stay where AdamW put them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device, non_blocking=True)
