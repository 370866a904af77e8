"""AdamW of Megatron-Core and its schedule."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from verl.utils.megatron import cpu_support

if TYPE_CHECKING:
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig


def build_optimizer(
    chunks: list[Any], config: "McoreOptimizerConfig", engine_config: "McoreEngineConfig", dtype: torch.dtype
) -> Any:
    """Return AdamW over the parameters of all chunks. Biases and norms are not decayed.

    Raises: ValueError for a key that Megatron-Core does not have.
    """
    values: dict[str, Any] = {
        "optimizer": config.optimizer,
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "clip_grad": config.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": engine_config.use_distributed_optimizer,
    } | dict(config.override_optimizer_config)
    unknown = sorted(values.keys() - OptimizerConfig.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(
            f"optim.override_optimizer_config has unknown keys {unknown}: write fields of megatron-core's "
            "OptimizerConfig"
        )
    with cpu_support.cuda_type_names():
        return get_megatron_optimizer(OptimizerConfig(**values), chunks, use_gloo_process_groups=False)


def build_scheduler(optimizer: Any, config: "McoreOptimizerConfig") -> OptimizerParamScheduler:
    """Return the schedule, which also applies the weight decay of each group; ``lr_warmup_steps`` of 0 or less leaves
    the warm-up to the ratio.

    Raises: ValueError when the schedule needs a length that was not given, or the warm-up is longer than it.
    """
    total = config.total_training_steps if config.total_training_steps is not None else -1
    warmup = config.lr_warmup_steps if config.lr_warmup_steps is not None else -1
    if warmup <= 0:
        if config.lr_warmup_steps_ratio > 0 and total <= 0:
            raise ValueError(f"optim.lr_warmup_steps_ratio > 0 needs optim.total_training_steps > 0, got {total}")
        warmup = int(config.lr_warmup_steps_ratio * max(total, 0))
    length = config.lr_decay_steps if config.lr_decay_steps is not None else total
    if config.lr_decay_style != "constant":
        if length <= 0:
            raise ValueError(
                f"optim.lr_decay_style={config.lr_decay_style} needs optim.total_training_steps or "
                "optim.lr_decay_steps above 0"
            )
        if warmup >= length:
            raise ValueError(f"the warm-up of {warmup} steps must be shorter than the schedule of {length}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OptimizerParamScheduler(
            optimizer,
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(length, warmup + 1),
            lr_decay_style=config.lr_decay_style.replace("inverse_square_root", "inverse-square-root"),
            start_wd=config.weight_decay if config.weight_decay_incr_style == "constant" else 0.0,
            end_wd=config.weight_decay,
            wd_incr_steps=max(length, 1),
            wd_incr_style=config.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=config.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=not config.use_checkpoint_opt_param_scheduler,
            wsd_decay_steps=config.lr_wsd_decay_steps,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )
