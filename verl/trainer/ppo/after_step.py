"""What follows the phases of a step: validation, checkpoint, metrics; and the end of a run whose data end first."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.phase import phase
from verl.trainer.ppo.checkpoint import FOLDER_PREFIX, finish_checkpoint, run_folder
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.profiling import dump_memory
from verl.trainer.ppo.traces import trace_batch
from verl.trainer.run.clock import CLOCK
from verl.utils.checkpoint import should_save_ckpt_esi

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def validate_before_training(trainer: "RayPPOTrainer") -> bool:
    """Validate the starting weights where that is asked for; returns whether that was all."""
    options = trainer.config.trainer
    if not (options.val_before_train or options.val_only):
        return False
    with phase("validate", step=trainer.global_steps):
        metrics = trainer._validate()
    CLOCK.mark("validation")
    if metrics:  # none where the rows are judged by a reward model, and know no ground truth
        trainer.output.log(metrics, trainer.global_steps)
    return bool(options.val_only)


def validate_after_step(trainer: "RayPPOTrainer", metrics: dict[str, Any], timing: dict[str, float]) -> None:
    """Validate where it is the turn of this step."""
    frequency = trainer.config.trainer.test_freq
    if frequency > 0 and (trainer.is_last_step or trainer.global_steps % frequency == 0):
        with trainer._timed("testing", timing):
            metrics.update(trainer._validate())


def save_after_step(trainer: "RayPPOTrainer", timing: dict[str, float]) -> None:
    """Write a checkpoint where it is the turn of this step, or the capacity is about to expire."""
    options = trainer.config.trainer
    if options.save_freq <= 0:
        return
    finish_checkpoint(trainer, wait=trainer.is_last_step)
    expiring = should_save_ckpt_esi(trainer.max_steps_duration, redundant_time=options.esi_redundant_time)
    if expiring:
        logger.warning("the rented capacity is about to expire: saving step %d early", trainer.global_steps)
    if expiring or trainer.is_last_step or trainer.global_steps % options.save_freq == 0:
        with trainer._timed("save_checkpoint", timing):
            trainer._save_checkpoint()


def finish_step(
    trainer: "RayPPOTrainer", batch: "DataProto", metrics: dict[str, Any], timing: dict[str, float]
) -> None:
    """Compute and publish the metrics of the step, and let sampler and data set learn from it."""
    step = trainer.global_steps
    trainer.trail.ask_workers(trainer)
    metrics["training/global_step"] = step
    metrics["training/epoch"] = trainer.epoch
    metrics.update(compute_data_metrics(batch=batch, use_critic=trainer.use_critic))
    metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing))
    ranks = trainer.resource_pool_manager.get_n_gpus()
    metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=ranks))
    CLOCK.mark("first_step")
    metrics.update(CLOCK.report())
    sampler = trainer.train_dataloader.sampler
    if hasattr(sampler, "update"):
        sampler.update(batch=batch)
    trace_batch(trainer, batch, batch.batch["token_level_scores"].sum(-1))
    details = trainer.trail.finish(trainer, batch, metrics)
    trainer.output.step(metrics, step, details)
    dump_memory(trainer)
    if not trainer.is_last_step and hasattr(trainer.train_dataset, "on_batch_end"):
        trainer.train_dataset.on_batch_end(batch=batch)


def end_early(trainer: "RayPPOTrainer", reason: Exception) -> None:
    """Validate and save the last whole step, where the data end before the number of steps that they allowed for.

    Raises: ``reason`` where there is no whole step.
    """
    trainer.global_steps -= 1  # the one that could not be filled
    if not trainer.global_steps:
        raise reason
    planned, trainer.total_training_steps = trainer.total_training_steps, trainer.global_steps
    step, options = trainer.global_steps, trainer.config.trainer
    logger.warning("the run ends after step %d of at most %d: %s", step, planned, reason)
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = {}
    if options.test_freq > 0 and step % options.test_freq:
        validate_after_step(trainer, metrics, timing)
    if not Path(run_folder(trainer.config), f"{FOLDER_PREFIX}{step}").exists():
        save_after_step(trainer, timing)
    finish_checkpoint(trainer)
    trainer.output.log(metrics | {f"timing_s/{name}": seconds for name, seconds in timing.items()}, step)
