"""Settings that forbid generating while the trainer trains, and the keys that asynchronous training completes."""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.base_config import ConfigError, Violation, as_yaml
from verl.trainer.config.async_training import COLOCATE_ASYNC, DECIDED, ONE_STEP_OFF, AsyncTrainingConfig
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.written import is_written

_ROLE = "actor_rollout_ref"


def async_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield settings that forbid generating while the trainer trains."""
    options = run.async_training
    if options.replay is not None and not options.is_async:
        yield Violation("async_training.replay", options.replay, "needs the async_training.mode of its run: write both")
    if not options.is_async:
        return
    if options.replay is not None and not Path(options.replay).is_file():
        expected = "is no file: name the ledger.sqlite in the folder of the run that is to be replayed"
        yield Violation("async_training.replay", options.replay, expected)
    yield from _turn_rules(run) if options.takes_turns else _overlap_rules(run)
    if options.mode == ONE_STEP_OFF:
        yield from _one_step_off_rules(run)
    else:
        yield from _fully_async_rules(run)
    if run.trainer.lazy_columns:
        expected = "is not supported: the ledger holds the columns of tokens: write false"
        yield Violation.unsupported("trainer.lazy_columns", True, expected)
    if run.actor_rollout_ref.rollout.skip_rollout:
        expected = (
            "is not supported: write false, and async_training.replay to train on the responses of an earlier run"
        )
        yield Violation.unsupported(f"{_ROLE}.rollout.skip_rollout", True, expected)
    if run.actor_rollout_ref.rollout.over_sample_rate:
        rate = run.actor_rollout_ref.rollout.over_sample_rate
        expected = "is not supported: each response is a call of its own, which gives none up: write 0"
        yield Violation.unsupported(f"{_ROLE}.rollout.over_sample_rate", rate, expected)


def _fully_async_rules(run: RunConfig) -> Iterator[Violation]:
    shared = run.actor_rollout_ref
    wanted = shared.actor.ppo_mini_batch_size * run.async_training.require_batches
    if run.data.train_batch_size != wanted:
        expected = f"must be 0, or {_ROLE}.actor.ppo_mini_batch_size x async_training.require_batches = {wanted}"
        yield Violation("data.train_batch_size", run.data.train_batch_size, expected)
    if not shared.rollout.calculate_log_probs:
        expected = "must be true: the loss compares with the weights that sampled"
        yield Violation(f"{_ROLE}.rollout.calculate_log_probs", False, expected)


def _turn_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield settings under which responses cannot be interrupted on the devices of the trainer."""
    shared = run.actor_rollout_ref
    if not shared.hybrid_engine:
        expected = "must be true: servers and trainer take turns on the same devices; servers on separate devices are "
        expected += "async_training.mode=fully_async"
        yield Violation(f"{_ROLE}.hybrid_engine", False, expected)
    if not shared.rollout.serves:
        expected = "must be async: only requests can be interrupted"
        yield Violation(f"{_ROLE}.rollout.mode", shared.rollout.mode, expected)
    updates = run.async_training.trigger_parameter_sync_step
    if updates != 1:
        expected = "must be 1: engines that take turns with the trainer get the weights of every update"
        yield Violation("async_training.trigger_parameter_sync_step", updates, expected)
    yield from _remax_rules(run)


def _one_step_off_rules(run: RunConfig) -> Iterator[Violation]:
    options = run.async_training
    for name, value in DECIDED[ONE_STEP_OFF].items():
        if options[name] not in (getattr(AsyncTrainingConfig, name), value):
            expected = f"is {as_yaml(value)} with async_training.mode={ONE_STEP_OFF}: leave it out"
            yield Violation(f"async_training.{name}", options[name], expected)


def _overlap_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield settings under which no server can generate while the trainer trains; the main trainer takes them."""
    shared = run.actor_rollout_ref
    if shared.hybrid_engine:
        expected = "must be false: generation and training overlap, so the servers need separate devices: "
        expected += f"write false, and {_ROLE}.rollout.nnodes and n_gpus_per_node; the main trainer takes true"
        yield Violation(f"{_ROLE}.hybrid_engine", True, expected)
    elif not shared.rollout.serves:
        expected = "must be async: standalone servers answer request by request. Rows without agent_name get one "
        expected += "response each, as in a batch"
        yield Violation(f"{_ROLE}.rollout.mode", shared.rollout.mode, expected)
    yield from _remax_rules(run)


def _remax_rules(run: RunConfig) -> Iterator[Violation]:
    if run.algorithm.adv_estimator == "remax":
        expected = "is not supported: its greedy baselines would come from other weights than the samples: write "
        expected += "another estimator such as rloo, or take the main trainer"
        yield Violation.unsupported("algorithm.adv_estimator", "remax", expected)


def refuse_two_numbers(config: DictConfig, defaults: Path) -> None:
    """Reject numbers of devices and samples in ``rollout`` that differ from those in ``actor_rollout_ref.rollout``.

    Args: ``defaults`` is the file of the recipe that has the defaults of ``rollout``.
    Raises: ConfigError.
    """
    violations = []
    recipe = OmegaConf.load(defaults)
    for name in ("nnodes", "n_gpus_per_node", "n"):
        short, whole = (OmegaConf.select(config, f"{node}.{name}") for node in ("rollout", f"{_ROLE}.rollout"))
        if short not in (None, OmegaConf.select(recipe, f"rollout.{name}"), whole):
            violations.append(
                Violation(
                    f"rollout.{name}", short, f"is the same as {_ROLE}.rollout.{name}={whole}: write one of the two"
                )
            )
    if violations:
        raise ConfigError(violations)


def complete(config: DictConfig) -> None:
    """Fill in the keys of the main trainer that those of fully asynchronous training decide.

    The node ``rollout``, by which established commands set servers and length, may be absent.

    Raises: ConfigError for a run of less than one update.
    """
    pace = config.async_training
    if pace.mode == ONE_STEP_OFF:
        return
    groups = OmegaConf.select(config, f"{_ROLE}.actor.ppo_mini_batch_size") * pace.require_batches
    rollout = OmegaConf.select(config, "rollout") or {}
    prompts, epochs, test_freq = (rollout.get(name) for name in ("total_rollout_steps", "total_epochs", "test_freq"))
    with open_dict(config):
        if pace.mode == COLOCATE_ASYNC and not is_written("async_training.trigger_parameter_sync_step"):
            pace.trigger_parameter_sync_step = 1
        if not config.data.train_batch_size:
            config.data.train_batch_size = groups
        if config.trainer.total_training_steps is None and prompts is not None:
            if prompts < groups:
                expected = f"must be {groups} or more, the prompts of one update: {_ROLE}.actor.ppo_mini_batch_size x "
                raise ConfigError(
                    [Violation("rollout.total_rollout_steps", prompts, f"{expected}async_training.require_batches")]
                )
            config.trainer.total_training_steps = prompts // groups
        if epochs is not None:
            config.trainer.total_epochs = min(config.trainer.total_epochs, epochs)
        if test_freq is not None and test_freq > 0:
            config.trainer.test_freq = test_freq * pace.trigger_parameter_sync_step
        if pace.use_rollout_log_probs:
            OmegaConf.update(config, f"{_ROLE}.actor.use_rollout_log_probs", True)
