"""Check a whole ``ppo_trainer`` tree before Ray starts, and list everything that is wrong at once."""

import importlib.util
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.base_config import Violation, config_error
from verl.trainer.config.dapo import dapo_rules
from verl.trainer.config.files import file_rules, model_rules
from verl.trainer.config.fused import fused_role_rules, fused_rules
from verl.trainer.config.idle import idle_keys
from verl.trainer.config.keys import dotted_keys, nearest
from verl.trainer.config.megatron import megatron_rules, workers_of_a_shard
from verl.trainer.config.profiling import profiler_rules
from verl.trainer.config.refusals import refused, select
from verl.trainer.config.reward_models import reward_model_rules, score_notices
from verl.trainer.config.run_config import parse_tree
from verl.trainer.config.scorers import manager_rules
from verl.trainer.ppo.steps import prompts_per_step
from verl.utils import envs
from verl.workers.config.actor import micro_batch_rules, mini_batch_rules

logger = logging.getLogger(__name__)

Tree = Mapping[str, Any]

ADV_ESTIMATORS = (
    *("gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("rloo", "rloo_vectorized", "opo", "gpg", "remax"),
)
POLICY_LOSSES = ("vanilla", "gspo", "gpg", "geo_mean", "clip_cov", "kl_cov", "cispo", "sapo")
REWARD_MANAGERS = ("naive", "batch", "dapo", "prime")
MAX_LORA_RANK_VLLM = 512


def validate_config(
    config: DictConfig, use_reference_policy: bool, use_critic: bool, recipe_nodes: Collection[str] = ()
) -> None:
    """Check everything that can be checked without a cluster; ``recipe_nodes`` are read by the recipe that runs.

    Raises: ConfigError listing each wrong key with its value and what would be right; it is a NotImplementedError
    too if all that is wrong is not supported.
    """
    violations = _once_per_key(config_violations(config, use_reference_policy, use_critic, recipe_nodes))
    if violations:
        raise config_error(violations)
    logger.info("the configuration passed all checks")


def config_violations(
    config: DictConfig, use_reference_policy: bool, use_critic: bool, recipe_nodes: Collection[str] = ()
) -> Iterator[Violation]:
    """Yield everything that is wrong, the broad before the narrow."""
    raw: Tree = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    scalars = [Violation(key, select(raw, key), "must be a mapping: set keys below it") for key in _NODES]
    scalars = [violation for violation in scalars if not isinstance(violation.value, Mapping)]
    if scalars:
        yield from scalars
        return
    missing = sorted(key for key in dotted_keys(raw) if select(raw, key) == "???")
    yield from (Violation(key, "???", f"is missing: {_MISSING.get(key, 'write a value')}") for key in missing)
    try:
        tree: Tree = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        yield Violation(str(error.full_key), "${...}", f"cannot be resolved: {str(error).splitlines()[0]}")
        return
    parsed = parse_tree(tree, use_critic)
    found = [*refused(tree, recipe_nodes), *parsed.violations]
    found = [violation for violation in found if violation.value != "???"]  # said above
    found += [*_combination_rules(tree, use_critic), *dapo_rules(tree), *manager_rules(tree)]
    found += profiler_rules(tree, use_reference_policy, use_critic)
    yield from found
    yield from _name_rules(tree)
    yield from file_rules(tree)
    yield from model_rules(tree, use_critic)
    broken = {violation.key for violation in found} | set(missing)
    yield from _size_rules(tree, use_reference_policy, use_critic, broken)
    yield from megatron_rules(tree, use_reference_policy, use_critic, broken)
    yield from reward_model_rules(tree, broken)
    if not broken:
        _notices(tree, use_critic)


def _size_rules(tree: Tree, use_reference: bool, use_critic: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield sizes that do not fit each other; a rule is left out where a size that it needs is wrong in itself."""
    rollout, layout = "actor_rollout_ref.rollout", {"trainer.n_gpus_per_node", "trainer.nnodes"}
    layout |= {key for key in broken if key.endswith((".fsdp_size", ".ulysses_sequence_parallel_size"))}
    layout |= {f"{rollout}.{name}" for name in ("tensor_model_parallel_size", "data_parallel_size")}
    if not broken & layout:
        yield from _layout_rules(tree, use_reference, use_critic)
    layout |= {key for key in broken if key.startswith("actor_rollout_ref.actor.megatron")}
    batch = layout | {"data.train_batch_size", "data.gen_batch_size", f"{rollout}.n"}
    if not broken & batch:
        yield from _train_batch_rules(tree, use_reference)
    for role in ["actor_rollout_ref.actor"] + ["critic"] * use_critic:
        if any(key.startswith(f"{role}.megatron") for key in broken):
            continue
        sizes = ("ppo_mini_batch_size", "ppo_micro_batch_size", "ulysses_sequence_parallel_size", "use_dynamic_bsz")
        if not broken & (batch | {f"{role}.{name}" for name in sizes}):
            per_gpu_is_wrong = f"{role}.ppo_micro_batch_size_per_gpu" in broken
            yield from (violation.under(role) for violation in _role_batch_rules(tree, role, per_gpu_is_wrong))
    for role in ["rollout"] + ["ref"] * use_reference:
        if not any(key.startswith(f"actor_rollout_ref.{role}.log_prob_") for key in broken):
            yield from _log_prob_rules(tree, f"actor_rollout_ref.{role}")
    lengths = ("prompt_length", "response_length", "max_model_len", "max_num_batched_tokens", "temperature")
    if not broken & {f"{rollout}.{name}" for name in lengths} and "actor_rollout_ref.model.lora_rank" not in broken:
        yield from _rollout_rules(tree)


_NODES = (
    *("data", "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "algorithm", "trainer"),
    *("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout", "actor_rollout_ref.model"),
    *("global_profiler", "ray_kwargs"),
)

_MISSING = {
    "actor_rollout_ref.rollout.name": "write vllm or hf",
    "actor_rollout_ref.actor.strategy": "write fsdp, fsdp2 or megatron",
    "critic.strategy": "write fsdp, fsdp2 or megatron",
}


def _once_per_key(violations: Iterator[Violation]) -> list[Violation]:
    """Keep the first thing said of each key."""
    first: dict[str, Violation] = {}
    for violation in violations:
        first.setdefault(violation.key, violation)
    return list(first.values())


def _name_rules(tree: Tree) -> Iterator[Violation]:
    """Yield unregistered estimators and losses, unless a module of the user's may register them."""
    if envs.read("VERL_USE_EXTERNAL_MODULES") or select(tree, "actor_rollout_ref.model.external_lib"):
        return
    for key, known in (
        ("algorithm.adv_estimator", ADV_ESTIMATORS),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", POLICY_LOSSES),
        ("reward_model.reward_manager", REWARD_MANAGERS),
    ):
        name = select(tree, key)
        if isinstance(name, str) and name not in known:
            similar = ", ".join(nearest(name, known)) or ", ".join(known)
            expected = f"is not registered; the nearest: {similar}. A name of your own needs a module that registers it"
            yield Violation(
                key, name, f"{expected} in VERL_USE_EXTERNAL_MODULES or actor_rollout_ref.model.external_lib"
            )


def _combination_rules(tree: Tree, use_critic: bool) -> Iterator[Violation]:
    """Yield options that another choice would leave without the effect that was asked for."""
    algorithm, shared = tree["algorithm"], tree["actor_rollout_ref"]
    if algorithm.get("use_pf_ppo") and algorithm.get("adv_estimator") != "gae":
        yield Violation("algorithm.use_pf_ppo", True, "needs algorithm.adv_estimator=gae: write false")
    for optim in ["actor_rollout_ref.actor.optim"] + ["critic.optim"] * use_critic:
        steps = select(tree, f"{optim}.total_training_steps")
        if steps not in (None, -1):
            expected = "is set by the trainer: leave it at -1, and write trainer.total_training_steps"
            yield Violation(f"{optim}.total_training_steps", steps, expected)
    yield from _rollout_is_rules(algorithm, shared["rollout"])
    packed = shared["model"].get("use_remove_padding", False)
    if shared["actor"].get("use_remove_padding", packed) != packed:
        expected = "follows actor_rollout_ref.model.use_remove_padding: set that one"
        yield Violation("actor_rollout_ref.actor.use_remove_padding", not packed, expected)
    actor = shared["actor"]
    if actor["use_kl_loss"] and actor["kl_loss_type"] == "full" and actor["strategy"] not in ("fsdp", "fsdp2"):
        expected = "needs the whole vocabulary in one worker, as fsdp has it: write low_var_kl, or strategy=fsdp"
        yield Violation("actor_rollout_ref.actor.kl_loss_type", "full", expected)
    yield from fused_rules(tree, "actor_rollout_ref.model")
    yield from fused_role_rules(shared)
    reference = select(shared, "ref.model.path")
    if reference is not None and select(shared, "model.lora_rank", 0):
        expected = "must be null with lora_rank above 0: the reference policy is the actor without its adapters"
        yield Violation("actor_rollout_ref.ref.model.path", reference, expected)
    if shared["model"].get("use_liger"):
        key = "actor_rollout_ref.model.use_liger"
        if select(tree, "trainer.device") == "cpu":
            yield Violation(key, True, "needs a GPU: write false with trainer.device=cpu")
        elif importlib.util.find_spec("liger_kernel") is None:
            yield Violation(
                key, True, "needs the package liger-kernel, which is not installed: install it or write false"
            )


def _rollout_is_rules(algorithm: Tree, rollout: Tree) -> Iterator[Violation]:
    """Yield importance weights of a rollout that lack a limit, or the log-probabilities to make them of."""
    threshold = algorithm.get("rollout_is_threshold")
    if threshold is None and algorithm.get("rollout_is"):
        yield Violation("algorithm.rollout_is", True, "needs algorithm.rollout_is_threshold: write a limit such as 2.0")
    if threshold is not None and not rollout.get("calculate_log_probs"):
        key = "actor_rollout_ref.rollout.calculate_log_probs"
        expected = f"must be true with algorithm.rollout_is_threshold={threshold}, which compares them with those of"
        yield Violation(key, False, f"{expected} training: write true, or the threshold null")


def world_size(tree: Tree) -> int:
    """Return the number of workers."""
    size: int = tree["trainer"]["n_gpus_per_node"] * tree["trainer"]["nnodes"]
    return size


def rollout_group_size(tree: Tree) -> int:
    """Return how many workers hold one generation engine."""
    rollout = tree["actor_rollout_ref"]["rollout"]
    if rollout["name"] == "hf":
        return 1
    size: int = rollout["tensor_model_parallel_size"] * rollout.get("data_parallel_size", 1)
    return size


def _layout_rules(tree: Tree, use_reference: bool, use_critic: bool) -> Iterator[Violation]:
    """Yield parallel sizes that do not divide the number of workers."""
    world = world_size(tree)
    workers = f"the {world} workers (trainer.n_gpus_per_node x trainer.nnodes)"
    group = rollout_group_size(tree)
    if world % group:
        key, rollout = "actor_rollout_ref.rollout.tensor_model_parallel_size", tree["actor_rollout_ref"]["rollout"]
        fitting = [size for size in range(1, world + 1) if world % size == 0]
        expected = f"x data_parallel_size={rollout['data_parallel_size']} must divide {workers}: write one of {fitting}"
        yield Violation(key, rollout["tensor_model_parallel_size"], expected)
    for role, engine, model in _engines(tree, use_reference, use_critic):
        node = select(tree, role)
        sp_size = workers_of_a_shard(node, engine)
        if world % sp_size:
            yield Violation(f"{role}.ulysses_sequence_parallel_size", sp_size, f"must divide {workers}")
        if sp_size > 1 and not select(tree, f"{model}.use_remove_padding"):
            expected = f"needs packed sequences: set {model}.use_remove_padding=true"
            yield Violation(f"{role}.ulysses_sequence_parallel_size", sp_size, expected)
        fsdp_size = select(node, f"{engine}.fsdp_size", -1)
        if fsdp_size > 0 and fsdp_size < world and world % fsdp_size:
            yield Violation(f"{role}.{engine}.fsdp_size", fsdp_size, f"must divide {workers}, or be -1")


def _engines(tree: Tree, use_reference: bool, use_critic: bool) -> list[tuple[str, str, str]]:
    """Return (role, its engine node, the model node that it trains or runs) of each training engine."""
    roles = [("actor_rollout_ref.actor", "fsdp_config", "actor_rollout_ref.model")]
    if use_reference and not select(tree, "actor_rollout_ref.model.lora_rank", 0):
        roles.append(("actor_rollout_ref.ref", "fsdp_config", "actor_rollout_ref.model"))
    if use_critic:
        roles.append(("critic", "model.fsdp_config", "critic.model"))
    return [each for each in roles if select(tree, f"{each[0]}.{each[1]}") is not None]


def _train_batch_rules(tree: Tree, use_reference: bool) -> Iterator[Violation]:
    """Yield a training batch that the workers cannot share evenly."""
    world, data = world_size(tree), tree["data"]
    actor, n = tree["actor_rollout_ref"]["actor"], tree["actor_rollout_ref"]["rollout"]["n"]
    unit = world
    if actor["use_dynamic_bsz"] or actor["strategy"] == "megatron":
        has_engine = use_reference and not select(tree, "actor_rollout_ref.model.lora_rank", 0)
        scorers = [actor] + [tree["actor_rollout_ref"]["ref"]] * has_engine
        shards = [world // workers_of_a_shard(node, "fsdp_config") for node in scorers]
        unit = math.lcm(*(max(1, size) for size in (*shards, world // rollout_group_size(tree))))
    for key in ("train_batch_size", "gen_batch_size"):
        size = data.get(key)
        if isinstance(size, int) and size * n % unit:
            step = unit // math.gcd(unit, n)
            expected = f"x actor_rollout_ref.rollout.n={n} must be a multiple of {unit} workers"
            yield Violation(f"data.{key}", size, f"{expected}: write a multiple of {step}")


def _role_batch_rules(tree: Tree, role: str, per_gpu_is_wrong: bool) -> Iterator[Violation]:
    """Yield the batch sizes of one role that do not fit the training batch or the ranks, by keys of the role."""
    node, world, train = select(tree, role), world_size(tree), prompts_per_step(tree)
    size_key = "train_batch_size" if train == tree["data"]["train_batch_size"] else "gen_batch_size"
    n, is_critic = tree["actor_rollout_ref"]["rollout"]["n"], role == "critic"
    sharers = workers_of_a_shard(node, "model.fsdp_config" if is_critic else "fsdp_config")
    for violation in mini_batch_rules(node, world, train, sharers):
        yield violation._replace(expected=violation.expected.replace("train_batch_size", size_key))
    mini, dp_size, key = node["ppo_mini_batch_size"], max(1, world // sharers), "ppo_mini_batch_size"
    if train >= mini and train % mini:
        yield Violation(key, mini, f"must divide data.{size_key}={train}")
    rows = mini * n
    if rows % dp_size:
        expected = f"x actor_rollout_ref.rollout.n={n} must be a multiple of the {dp_size} data-parallel ranks"
        yield Violation(key, mini, f"{expected}: write a multiple of {dp_size // math.gcd(dp_size, n)}")
        return
    micro = node["ppo_micro_batch_size_per_gpu"]
    if not node["use_dynamic_bsz"] and not per_gpu_is_wrong and micro is not None and (rows // dp_size) % micro:
        expected = f"must divide the {rows // dp_size} sequences of one rank in a mini-batch"
        yield Violation("ppo_micro_batch_size_per_gpu", micro, f"{expected} ({key}={mini} x n={n} / {dp_size} ranks)")


def _log_prob_rules(tree: Tree, role: str) -> Iterator[Violation]:
    """Yield log-prob batch sizes that are missing or given twice."""
    node = select(tree, role)
    if not node["log_prob_use_dynamic_bsz"]:
        for violation in micro_batch_rules(node, "log_prob_micro_batch_size"):
            expected = violation.expected.replace("use_dynamic_bsz", "log_prob_use_dynamic_bsz")
            yield violation._replace(expected=expected).under(role)


def _rollout_rules(tree: Tree) -> Iterator[Violation]:
    """Yield engine sizes that cannot hold a prompt with its response, and sampling that training cannot follow."""
    rollout, key = tree["actor_rollout_ref"]["rollout"], "actor_rollout_ref.rollout"
    context = rollout["prompt_length"] + rollout["response_length"]
    longest = rollout["max_model_len"] or context
    if longest < context:
        expected = f"must be null or at least prompt_length + response_length = {context}"
        yield Violation(f"{key}.max_model_len", longest, expected)
    if rollout["name"] == "vllm" and rollout["max_num_batched_tokens"] < longest:
        expected = f"must be at least the {longest} tokens of the longest sequence: raise it"
        yield Violation(f"{key}.max_num_batched_tokens", rollout["max_num_batched_tokens"], expected)
    if rollout["temperature"] == 0:
        expected = "must be above 0, training computes log-probs at it; validation has val_kwargs.temperature"
        yield Violation(f"{key}.temperature", rollout["temperature"], expected)
    rank = tree["actor_rollout_ref"]["model"].get("lora_rank", 0)
    if rollout["name"] == "vllm" and rank > MAX_LORA_RANK_VLLM:
        yield Violation("actor_rollout_ref.model.lora_rank", rank, f"must be at most {MAX_LORA_RANK_VLLM} with vllm")


def _notices(tree: Tree, use_critic: bool) -> None:
    """Say what is allowed and rarely meant."""
    idle = list(idle_keys(tree, use_critic))
    if idle:
        logger.warning("without effect in this run: %s", "; ".join(idle))
    for notice in score_notices(tree):
        logger.warning("%s", notice)
    if tree["algorithm"]["use_kl_in_reward"] and tree["actor_rollout_ref"]["actor"]["use_kl_loss"]:
        logger.warning("KL is in the reward (algorithm.use_kl_in_reward) and in the loss (actor.use_kl_loss)")
    if tree["data"].get("val_batch_size") is not None:
        logger.warning("data.val_batch_size is deprecated: leave it null, the engine schedules validation itself")
