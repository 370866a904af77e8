"""Megatron-Core's AdamW and its learning rate schedule."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.utils.megatron import cpu_support
from verl.utils.numerics.lr_schedules import num_warmup_steps

cpu_support.install()

from megatron.core import optimizer as mcore_optimizer  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

if TYPE_CHECKING:
    from verl.workers.config import McoreOptimizerConfig


def init_megatron_optim_config(
    optim_config: "McoreOptimizerConfig", dtype: torch.dtype = torch.bfloat16, use_distributed_optimizer: bool = True
) -> OptimizerConfig:
    """Return Megatron-Core's configuration for an ``optim`` node and parameters in ``dtype``.

    Raises: ValueError for a key that Megatron-Core does not have.
    """
    values: dict[str, Any] = {
        "optimizer": optim_config.optimizer,
        "lr": optim_config.lr,
        "min_lr": optim_config.min_lr,
        "weight_decay": optim_config.weight_decay,
        "adam_beta1": optim_config.betas[0],
        "adam_beta2": optim_config.betas[1],
        "clip_grad": optim_config.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": use_distributed_optimizer,
    } | dict(optim_config.override_optimizer_config)
    unknown = sorted(values.keys() - OptimizerConfig.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(
            f"optim.override_optimizer_config has unknown keys {unknown}: use fields of megatron-core's OptimizerConfig"
        )
    return OptimizerConfig(**values)


def get_megatron_optimizer(model: list[nn.Module], config: OptimizerConfig) -> MegatronOptimizer:
    """Return AdamW over the parameters of all chunks, wrapped in ``DistributedDataParallel``.

    Biases and norms have no weight decay.
    """
    with cpu_support.cuda_type_names():
        optimizer = mcore_optimizer.get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW | torch.optim.Adam):
            _start_state(each.optimizer)
            if isinstance(each, DistributedOptimizer):
                _restore_steps(each)
        if isinstance(each, DistributedOptimizer):
            _save_without_gaps(each)
    return optimizer


def _start_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create: a checkpoint can only be loaded into existing state."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def _restore_steps(optimizer: DistributedOptimizer) -> None:
    """Patch the loading of checkpoints to keep one step counter per parameter.

    Megatron-Core gives all parameters the same counter tensor, which torch's Adam then increments once per parameter.
    Megatron-Core also expects the counter among the tensors of a parameter. Needed from 0.9 on; remove it when loading
    supports torch's Adam.
    """
    original = optimizer._set_main_param_and_optimizer_states

    def restore(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor], **more: Any) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        original(parameter, {**tensors, "step": state["step"]}, **more)

    optimizer._set_main_param_and_optimizer_states = restore


def _save_without_gaps(optimizer: DistributedOptimizer) -> None:
    """Patch the saving of checkpoints to cut each parameter's state at the right position.

    Megatron-Core gathers the state without the padding between the buckets of a buffer, but cuts it at positions that
    include the padding. After a padded bucket, parameters would get the states and values of their neighbours, and the
    last ones zeros. A buffer has several buckets with ``overlap_grad_reduce`` and with a tied head over pipeline
    stages. Needed in 0.16; remove it when ``sharded_param_state_fully_reshardable`` counts like
    ``get_parameter_state_dp_zero``.
    """
    original = optimizer.sharded_param_state_fully_reshardable

    def sharded(*args: Any, **kwargs: Any) -> Any:
        buffers = list(optimizer.buffers)
        counted = [buffer.param_index_map for buffer in buffers]
        try:
            for buffer in buffers:
                buffer.param_index_map = _places_without_padding(buffer)
            return original(*args, **kwargs)
        finally:
            for buffer, places in zip(buffers, counted, strict=True):
                buffer.param_index_map = places

    optimizer.sharded_param_state_fully_reshardable = sharded


def _places_without_padding(buffer: _ParamAndGradBuffer) -> dict[nn.Parameter, tuple[int, int, int]]:
    """Return start, end and bucket of each parameter in a buffer, without the padding between buckets."""
    gaps = {}
    unpadded = 0
    for bucket in buffer.buckets:
        gaps[bucket.bucket_id] = bucket.offset - unpadded
        unpadded += bucket.numel_unpadded
    places = buffer.param_index_map.items()
    return {parameter: (start - gaps[at], end - gaps[at], at) for parameter, (start, end, at) in places}


def get_megatron_last_lr(optimizer: MegatronOptimizer) -> float:
    """Return the learning rate of the next step."""
    return optimizer.param_groups[0]["lr"]


def get_megatron_optimizer_param_scheduler(
    optimizer: MegatronOptimizer, config: "McoreOptimizerConfig"
) -> OptimizerParamScheduler:
    """Return the schedule, which also applies the weight decay of each group.

    Raises: ValueError when the schedule needs a length that is missing, or when the warm-up is longer than it.
    """
    total = config.total_training_steps if config.total_training_steps is not None else -1
    warmup = num_warmup_steps(config.lr_warmup_steps, config.lr_warmup_steps_ratio, total)
    length = config.lr_decay_steps if config.lr_decay_steps is not None else total
    if config.lr_decay_style != "constant":
        if length <= 0:
            raise ValueError(
                f"optim.lr_decay_style={config.lr_decay_style} needs optim.total_training_steps or "
                "optim.lr_decay_steps above 0"
            )
        if warmup >= length:
            raise ValueError(f"the warm-up of {warmup} steps must be shorter than the schedule of {length}")
        if config.lr_decay_style == "WSD" and (config.lr_wsd_decay_steps or 0) > length - warmup:
            raise ValueError(
                f"optim.lr_wsd_decay_steps={config.lr_wsd_decay_steps} must be at most {length - warmup}, the number "
                "of steps after the warm-up"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OptimizerParamScheduler(
            optimizer,
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=warmup,
            # Megatron-Core asserts a length above the warm-up, also for a constant rate, which has no length.
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
