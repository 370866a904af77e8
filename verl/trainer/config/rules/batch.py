"""Batch sizes and parallel sizes against the number of workers."""

import math
from collections.abc import Iterator

from verl.base_config import Violation
from verl.trainer.config.run_config import RunConfig
from verl.utils.megatron.ranks import model_parallel_size
from verl.workers.config import ActorConfig, CriticConfig, FSDPActorConfig, FSDPCriticConfig, RefConfig
from verl.workers.config.actor_critic import micro_batch_rules, mini_batch_rules, packing_rules
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
RoleConfig = ActorConfig | CriticConfig | RefConfig
_WORLD = {"trainer.n_gpus_per_node", "trainer.nnodes"}
_GROUP = {f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size"}
_OWN_SIZES = ("ppo_mini_batch_size", "ppo_micro_batch_size", "ulysses_sequence_parallel_size", "use_dynamic_bsz")


def batch_rules(run: RunConfig, use_reference: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield batch sizes that do not fit each other; a rule with a size that is wrong by itself is skipped."""
    layout = {key for key in broken if key.endswith((".fsdp_size", ".ulysses_sequence_parallel_size"))}
    layout |= _WORLD | _GROUP
    if not broken & layout:
        yield from _layout_rules(run, use_reference)
    layout |= {key for key in broken if key.startswith(f"{ACTOR}.megatron")}
    batch = layout | {"data.train_batch_size", "data.gen_batch_size", f"{ROLLOUT}.n"}
    if not broken & batch:
        yield from _train_batch_rules(run, use_reference)
    for key, role in ((ACTOR, run.actor_rollout_ref.actor), ("critic", run.critic)):
        if role is None or any(each.startswith(f"{key}.megatron") for each in broken):
            continue
        if not broken & (batch | {f"{key}.{name}" for name in _OWN_SIZES}):
            per_gpu_is_wrong = f"{key}.ppo_micro_batch_size_per_gpu" in broken
            yield from (violation.under(key) for violation in _role_rules(run, role, per_gpu_is_wrong))
    yield from _log_prob_rules(run, use_reference, broken)


def workers_of_a_shard(role: RoleConfig) -> int:
    """Return how many workers share each shard of a batch in a role: by its layout, or its sequence parallelism."""
    engine = role.engine
    if isinstance(engine, McoreEngineConfig):
        return max(1, model_parallel_size(engine))
    own = 1
    if isinstance(role, FSDPActorConfig | FSDPCriticConfig | RefConfig):
        own = role.ulysses_sequence_parallel_size
    if own > 1 or not isinstance(engine, FSDPEngineConfig):
        return own
    return engine.ulysses_sequence_parallel_size


def _engines(run: RunConfig, use_reference: bool) -> Iterator[tuple[str, RoleConfig, str, FSDPEngineConfig, str, bool]]:
    """Yield (key, role, engine key, engine, model key, whether rows are packed) of each FSDP engine that trains."""
    shared = run.actor_rollout_ref
    model = "actor_rollout_ref.model"
    packed = shared.model.use_remove_padding
    if isinstance(shared.actor.engine, FSDPEngineConfig):
        yield ACTOR, shared.actor, "fsdp_config", shared.actor.engine, model, packed
    if use_reference and not shared.model.lora_rank and isinstance(shared.ref.engine, FSDPEngineConfig):
        yield REF, shared.ref, "fsdp_config", shared.ref.engine, model, packed
    if run.critic is not None and isinstance(run.critic.engine, FSDPEngineConfig):
        own = isinstance(run.critic, FSDPCriticConfig) and run.critic.model.use_remove_padding
        yield "critic", run.critic, "model.fsdp_config", run.critic.engine, "critic.model", own


def _layout_rules(run: RunConfig, use_reference: bool) -> Iterator[Violation]:
    """Yield parallel sizes that do not divide the number of workers."""
    world = run.trainer.world_size
    workers = f"the {world} workers (trainer.n_gpus_per_node x trainer.nnodes)"
    rollout = run.actor_rollout_ref.rollout
    if run.actor_rollout_ref.hybrid_engine and world % rollout.workers_per_engine:
        fitting = [size for size in range(1, world + 1) if world % size == 0]
        expected = f"x data_parallel_size={rollout.data_parallel_size} must divide {workers}: write one of {fitting}"
        yield Violation(f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, expected)
    for key, role, engine_key, engine, model, is_packed in _engines(run, use_reference):
        sp_size = workers_of_a_shard(role)
        yield from sharding_rules(key, sp_size, f"{key}.{engine_key}", engine.fsdp_size, world, workers)
        yield from (violation.under(key) for violation in packing_rules(sp_size, is_packed, model))


def sharding_rules(
    key: str, sp_size: int, engine_key: str, fsdp_size: int, world: int, workers: str
) -> Iterator[Violation]:
    """Yield sequence parallelism and shard groups that do not divide ``world`` workers, which ``workers`` describes."""
    if world % sp_size:
        yield Violation(f"{key}.ulysses_sequence_parallel_size", sp_size, f"must divide {workers}")
    if 0 < fsdp_size < world and world % fsdp_size:
        yield Violation(f"{engine_key}.fsdp_size", fsdp_size, f"must divide {workers}, or be -1")


def _train_batch_rules(run: RunConfig, use_reference: bool) -> Iterator[Violation]:
    """Yield a training batch that the workers cannot share evenly."""
    shared = run.actor_rollout_ref
    world = run.trainer.world_size
    n = shared.rollout.n
    unit = world
    if shared.actor.use_dynamic_bsz or shared.actor.strategy == "megatron":
        shards = [world // workers_of_a_shard(shared.actor)]
        if use_reference and not shared.model.lora_rank:
            shards.append(world // workers_of_a_shard(shared.ref))
        if shared.hybrid_engine:
            shards.append(world // shared.rollout.workers_per_engine)
        unit = math.lcm(*(max(1, size) for size in shards))
    for key in ("train_batch_size",) if run.async_training.gathers_draws else ("train_batch_size", "gen_batch_size"):
        size = run.data[key]
        if size is not None and size * n % unit:
            step = unit // math.gcd(unit, n)
            expected = f"x actor_rollout_ref.rollout.n={n} must be a multiple of {unit} workers"
            yield Violation(f"data.{key}", size, f"{expected}: write a multiple of {step}")


def _role_rules(run: RunConfig, role: ActorConfig | CriticConfig, per_gpu_is_wrong: bool) -> Iterator[Violation]:
    """Yield the batch sizes of a role that do not fit the training batch or the ranks, by keys of the role."""
    world = run.trainer.world_size
    train = run.prompts_per_step
    size_key = "train_batch_size" if train == run.data.train_batch_size else "gen_batch_size"
    n = run.actor_rollout_ref.rollout.n
    sharers = workers_of_a_shard(role)
    yield from mini_batch_rules(role, world, train, sharers, size_key)
    key = "ppo_mini_batch_size"
    mini = role.ppo_mini_batch_size
    dp_size = max(1, world // sharers)
    if train >= mini and train % mini:
        yield Violation(key, mini, f"must divide data.{size_key}={train}")
    rows = mini * n
    if rows % dp_size:
        expected = f"x actor_rollout_ref.rollout.n={n} must be a multiple of the {dp_size} data-parallel ranks"
        yield Violation(key, mini, f"{expected}: write a multiple of {dp_size // math.gcd(dp_size, n)}")
        return
    micro = role.ppo_micro_batch_size_per_gpu
    if not role.use_dynamic_bsz and not per_gpu_is_wrong and micro is not None and (rows // dp_size) % micro:
        expected = f"must divide the {rows // dp_size} sequences of one rank in a mini-batch"
        yield Violation("ppo_micro_batch_size_per_gpu", micro, f"{expected} ({key}={mini} x n={n} / {dp_size} ranks)")


def _log_prob_rules(run: RunConfig, use_reference: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield log-prob batch sizes that are missing or given twice."""
    shared = run.actor_rollout_ref
    for key, role in ((ROLLOUT, shared.rollout), (REF, shared.ref)):
        if role.log_prob_use_dynamic_bsz or (key == REF and not use_reference):
            continue
        if not any(each.startswith(f"{key}.log_prob_") for each in broken):
            rules = micro_batch_rules(role, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz")
            yield from (violation.under(key) for violation in rules)
