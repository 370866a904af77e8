"""Check a whole ``ppo_trainer`` tree before Ray starts, and list everything that is wrong at once."""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl.algos.names import ADV_ESTIMATORS, POLICY_LOSSES
from verl.base_config import Violation, as_yaml, config_error, nearest
from verl.trainer.config.keys import dotted_keys, replaced_keys, select, tree_of
from verl.trainer.config.other_versions import row_of
from verl.trainer.config.rules.asynchronous import async_rules
from verl.trainer.config.rules.batch import batch_rules
from verl.trainer.config.rules.files import file_rules, may_register
from verl.trainer.config.rules.fork_workers import fork_rules
from verl.trainer.config.rules.megatron import megatron_rules
from verl.trainer.config.rules.model import model_rules, noise_notice, option_rules, rope_notice, vocabulary_rules
from verl.trainer.config.rules.no_effect import idle_keys, keys_of_absent_roles, unsupported_rules
from verl.trainer.config.rules.profiler import profiler_rules
from verl.trainer.config.rules.reward import dapo_rules, manager_rules, reward_model_rules
from verl.trainer.config.rules.rollout import (
    agent_loop_rules,
    bypass_rules,
    importance_weight_rules,
    multi_turn_rules,
    rollout_rules,
    server_rules,
)
from verl.trainer.config.rules.shared_weights import shared_weight_rules
from verl.trainer.config.run_config import RunConfig, parse_tree
from verl.utils import envs
from verl.utils.json_types import Json
from verl.workers.config import PolicyLossConfig
from verl.workers.config.engines import ROLLOUTS
from verl.workers.rewards.signature import SCORER_CALLS, class_in_file

logger = logging.getLogger(__name__)

Tree = Mapping[str, Json]

_NODES = [each.name for each in fields(RunConfig)]
_NODES += [f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model")]

_BRIDGES = tuple(
    f"{role}.megatron.use_mbridge"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
)
FORK_NODES = ("algorithm.filter_groups",)
"""Nodes that only recipes read, and every fork may."""

_MISSING = {
    "actor_rollout_ref.rollout.name": f"write {', '.join(ROLLOUTS[:-1])} or {ROLLOUTS[-1]}",
    "actor_rollout_ref.actor.strategy": "write fsdp, fsdp2 or megatron",
    "critic.strategy": "write fsdp, fsdp2 or megatron",
}


def validate_config(
    config: DictConfig, use_reference_policy: bool, use_critic: bool, recipe_nodes: Collection[str] = ()
) -> None:
    """Check everything that can be checked without a cluster; ``recipe_nodes`` are nodes that the recipe reads.

    Raises: ConfigError listing each wrong key with its value and what would be right; it is a NotImplementedError
        too if all that is wrong is not supported.
    """
    examined_config(config, use_reference_policy, use_critic, recipe_nodes).checked()


class Examined(NamedTuple):
    """A parsed tree with its violations."""

    run: RunConfig
    violations: list[Violation]

    def checked(self) -> RunConfig:
        """Return the parsed tree.

        Raises: as ``validate_config``.
        """
        if self.violations:
            raise config_error(self.violations)
        return self.run


def examined_config(
    config: DictConfig,
    use_reference: bool | None = None,
    use_critic: bool | None = None,
    recipe_nodes: Collection[str] = (),
    of_fork: bool = False,
    recipe_rules: Callable[[RunConfig], Iterable[Violation]] | None = None,
    stops_at_types: bool = False,
) -> Examined:
    """Parse a tree, apply all rules, and return it with its violations.

    Without ``use_reference`` and ``use_critic`` the tree decides about both. A tree ``of_fork`` is read by code of the
    user, who may add keys, register names and draw prompts for itself: what only that code can know is not refused.
    ``recipe_rules`` yields what a recipe refuses. In the result a value of the wrong type is replaced by its default.

    Raises: ConfigError if the tree cannot be resolved; with ``stops_at_types`` also if it has unknown keys or values
        of the wrong type, with everything that is wrong in the tree.
    """
    tree, violations = _resolved(config)
    if not of_fork:
        raw = tree_of(config, resolve=False)
        violations += replaced_keys(raw)
    if tree is None:
        raise config_error(_once_per_key(violations))
    run, reader = parse_tree(tree, use_critic)
    if use_reference is None:
        use_reference = run.needs_reference
    nodes = [*recipe_nodes, *FORK_NODES] if of_fork else recipe_nodes
    refused = [each for each in reader.violations if not of_fork or each not in reader.unknown]
    found = [*unsupported_rules(run, tree, nodes), *refused]
    missing = {violation.key for violation in violations}
    found = [violation for violation in found if violation.key not in missing]
    broken = {violation.key for violation in found} | missing
    refused_by_recipe = list(recipe_rules(run)) if recipe_rules else []
    broken |= {violation.key for violation in refused_by_recipe}
    violations += [*found, *refused_by_recipe]
    violations += _rules(run, tree, use_reference, broken, of_fork)
    violations = _once_per_key(violations)
    if stops_at_types and any(each in refused for each in reader.mistyped + reader.unknown):
        raise config_error(violations)
    if not violations:
        _give_notices(run, tree, use_reference)
    return Examined(run, violations)


def _resolved(config: DictConfig) -> tuple[Tree | None, list[Violation]]:
    """Return the resolved tree and its missing values; None and the reasons if it cannot be resolved."""
    raw = tree_of(config, resolve=False)
    scalars = [Violation(key, select(raw, key), "must be a mapping: set keys below it") for key in _NODES]
    scalars = [violation for violation in scalars if not isinstance(violation.value, Mapping)]
    if scalars:
        return None, scalars
    missing = sorted(key for key in dotted_keys(raw) if select(raw, key) == "???")
    violations = [Violation(key, "???", f"is missing: {_MISSING.get(key, 'write a value')}") for key in missing]
    try:
        tree = tree_of(config)
    except OmegaConfBaseException as error:
        expected = f"cannot be resolved: {str(error).splitlines()[0]}: correct it, or write a value"
        return None, [*violations, Violation(str(error.full_key), "${...}", expected)]
    return tree, violations


def _rules(
    run: RunConfig, tree: Tree, use_reference: bool, broken: set[str], of_fork: bool = False
) -> Iterator[Violation]:
    """Yield conflicts between values, general ones first; ``broken`` holds keys that are already wrong."""
    first = [
        *_step_rules(run),
        *async_rules(run),
        *importance_weight_rules(run),
        *bypass_rules(run),
        *option_rules(run),
        *dapo_rules(run),
        *manager_rules(run),
        *profiler_rules(run, tree, use_reference),
        *fork_rules(run),
    ]
    yield from first
    broken = broken | {violation.key for violation in first}
    yield from () if of_fork else _name_rules(run)
    yield from file_rules(run)
    yield from model_rules(run, broken)
    yield from vocabulary_rules(run, use_reference, broken)
    yield from batch_rules(run, use_reference, broken)
    yield from rollout_rules(run, broken)
    yield from agent_loop_rules(run)
    yield from multi_turn_rules(run)
    yield from server_rules(run, broken)
    yield from shared_weight_rules(run)
    yield from megatron_rules(run, use_reference, broken)
    yield from reward_model_rules(run, broken)


def _step_rules(run: RunConfig) -> Iterator[Violation]:
    """Reject PF-PPO without GAE, a warm-up without a critic, and schedule lengths that the trainer sets."""
    if run.algorithm.use_pf_ppo and run.algorithm.adv_estimator != "gae":
        expected = "needs algorithm.adv_estimator=gae: write false"
        yield Violation("algorithm.use_pf_ppo", True, expected, others=("algorithm.adv_estimator",))
    if run.trainer.critic_warmup and run.critic is None:
        expected = "needs a critic, which this run does not have: its first steps would train nothing. Write 0"
        yield Violation("trainer.critic_warmup", run.trainer.critic_warmup, expected, others=("critic.enable",))
    if run.trainer.lazy_columns:
        yield from _lazy_rules(run)
    optimizers = {
        "actor_rollout_ref.actor.optim": run.actor_rollout_ref.actor.optim,
        "critic.optim": run.critic.optim if run.critic else None,
        "reward_model.model.optim": run.reward_model.model.optimizer,
    }
    for key, optimizer in optimizers.items():
        if optimizer is not None and optimizer.total_training_steps not in (None, -1):
            expected = "is set by the trainer: leave it at -1, and write trainer.total_training_steps"
            yield Violation(f"{key}.total_training_steps", optimizer.total_training_steps, expected)


def _lazy_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield settings that need the tokens of the whole batch in one process."""
    name = run.algorithm.adv_estimator
    if name not in ADV_ESTIMATORS:
        expected = (
            f"cannot be combined with algorithm.adv_estimator={name}, which may read the tokens of the whole batch: "
            f"write false, or an estimator out of {', '.join(ADV_ESTIMATORS)}"
        )
        yield Violation("trainer.lazy_columns", True, expected, others=("algorithm.adv_estimator",))
    if run.algorithm.use_pf_ppo:
        expected = "cannot be combined with algorithm.use_pf_ppo=true, which draws whole rows: write false"
        yield Violation("trainer.lazy_columns", True, expected, others=("algorithm.use_pf_ppo",))


_LOSS = "actor_rollout_ref.actor.policy_loss"
REGISTRIES = {
    "algorithm.adv_estimator": ("verl.algos.advantage", "ADV_ESTIMATOR_REGISTRY", "Unknown advantage estimator"),
    f"{_LOSS}.loss_mode": ("verl.algos.policy_loss", "POLICY_LOSS_REGISTRY", "Unsupported loss mode"),
    "reward_model.reward_manager": (
        "verl.workers.rewards.managers",
        "REWARD_MANAGER_REGISTRY",
        "Unknown reward manager",
    ),
    "actor_rollout_ref.rollout.agent.default_agent_loop": (
        "verl.experimental.agent_loop.registry",
        "known_names",
        "is no agent loop",
    ),
    "actor_rollout_ref.rollout.multi_turn.format": (
        "verl.experimental.agent_loop.tool_parser",
        "ToolParser.names",
        "is no format of tool calls",
    ),
}
"""Keys that name something registered, where the registry is, or a function of its names, and the words with which the
registry itself begins its error."""


def _name_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield unregistered estimators, losses and managers, unless user code might still register them."""
    shared = run.actor_rollout_ref
    if envs.read("VERL_USE_EXTERNAL_MODULES") or shared.model.external_lib:
        return
    loss = shared.actor.policy_loss
    # The class of a recipe's node names its losses.
    losses = POLICY_LOSSES if type(loss) is PolicyLossConfig else (*POLICY_LOSSES, loss.loss_mode)
    manager = run.reward_model.reward_manager
    for key, name, ours in (
        ("algorithm.adv_estimator", run.algorithm.adv_estimator, ADV_ESTIMATORS),
        (f"{_LOSS}.loss_mode", loss.loss_mode, losses),
        ("reward_model.reward_manager", manager, tuple(SCORER_CALLS)),
    ):
        module, registry, unknown = REGISTRIES[key]
        # A module that is not imported has registered nothing.
        known = [*ours, *getattr(sys.modules.get(module), registry, ())]
        is_in_file = name == manager and class_in_file(manager) is not None
        is_known = name is None or name in known or is_in_file  # null: a recipe that has no such entry
        if is_known or (name == manager and may_register(run.custom_reward_function.path)):
            continue
        row = row_of(key, name)
        similar = ", ".join(nearest(name, known)) or ", ".join(known)
        problem = row.message if row else f"{unknown}: it is not registered; the nearest: {similar}"
        expected = (
            f"{problem}. A name that you add needs a module that registers it in VERL_USE_EXTERNAL_MODULES or "
            "actor_rollout_ref.model.external_lib"
        )
        yield Violation(key, name, expected)


def _once_per_key(violations: Iterable[Violation]) -> list[Violation]:
    """Keep the first finding of each key."""
    first: dict[str, Violation] = {}
    for violation in violations:
        first.setdefault(violation.key, violation)
    return list(first.values())


_CUTS = {"top_p": (1,), "top_k": (-1, 0), "repetition_penalty": (1,)}
"""Sampling that training does not follow, with the values that turn it off."""


def _give_notices(run: RunConfig, tree: Tree, use_reference: bool) -> None:
    """Warn about legal but unusual settings."""
    unread = [*idle_keys(run, tree), *keys_of_absent_roles(run, tree, use_reference)]
    idle = [f"{each.key}={as_yaml(each.value)} ({each.expected})" for each in _once_per_key(unread)]
    if idle:
        logger.warning("without effect in this run: %s", "; ".join(idle))
    bridged = [key for key in _BRIDGES if select(tree, key)]
    if bridged:
        logger.warning(
            "%s=true: mbridge builds models that verl.models.mcore has no table for; the tables serve all others",
            ", ".join(bridged),
        )
    reward = run.reward_model
    if reward.enable and run.custom_reward_function.path and reward.reward_manager in SCORER_CALLS:
        logger.warning(
            "the reward model scores training, and custom_reward_function validation only: to join both, write a "
            "reward manager that reads rm_scores (docs/reward_models.md)"
        )
    rollout = run.actor_rollout_ref.rollout
    for node, sampling in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if sampling.n > 1 and (not sampling.do_sample or sampling.top_k == 1):
            logger.warning(
                "actor_rollout_ref.%s.n=%d with %s: the responses to a prompt are equal, so best@k and maj@k are the "
                "mean, and a group has no differences to learn from. Write n=1, or sample",
                *(node, sampling.n, "top_k=1" if sampling.do_sample else "do_sample=false"),
            )
    if run.algorithm.use_kl_in_reward and run.actor_rollout_ref.actor.use_kl_loss:
        logger.warning("KL is in the reward (algorithm.use_kl_in_reward) and in the loss (actor.use_kl_loss)")
    if run.actor_rollout_ref.actor.use_rollout_log_probs:
        logger.warning(
            "actor_rollout_ref.actor.use_rollout_log_probs=true: the log-probs of the rollout are the old ones, and no "
            "pass computes others. Until 0.1 the key only asked for a pass where a single update needs none"
        )
    if run.actor_rollout_ref.actor.optim.lr == 0:
        logger.warning("actor_rollout_ref.actor.optim.lr=0: the actor learns nothing")
    rollout = run.actor_rollout_ref.rollout
    cuts = [f"{name}={as_yaml(rollout[name])}" for name, off in _CUTS.items() if rollout[name] not in off]
    if cuts and rollout.do_sample and rollout.calculate_log_probs:
        logger.warning(
            "actor_rollout_ref.rollout: log-probs of the rollout are computed with %s, and log-probs of training "
            "without: metrics and importance weights that compare the two include this difference",
            ", ".join(cuts),
        )
    for notice in (rope_notice(run), noise_notice(run)):
        if notice is not None:
            logger.warning(notice)
    if run.data.val_batch_size is not None:
        logger.warning("data.val_batch_size is deprecated: leave it null, the engine schedules validation itself")
