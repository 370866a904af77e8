"""Requirements for one copy of the weights in trainer and engine."""

from collections.abc import Iterator
from typing import NamedTuple

from verl.base_config import Violation
from verl.trainer.config.run_config import RunConfig
from verl.utils.json_types import Json, mapping_at
from verl.workers.config import FSDPActorConfig
from verl.workers.config.engines import ENGINES
from verl.workers.config.model import path_problems, read_config_json

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = f"{_ROLLOUT}.share_weights"
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_OWN_WEIGHTS = ("quantization", "cpu_offload_gb", "enable_sleep_mode", "dtype")
"""Arguments of vLLM that give its weights another form, or free them while the trainer needs them."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _Need(NamedTuple):
    """A key that must have another value, what to write, and why."""

    key: str
    value: Json
    is_met: bool
    remedy: str
    reason: str


def shared_weight_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield why trainer and engine cannot hold one copy of the weights, if they are asked to."""
    if not run.actor_rollout_ref.rollout.share_weights:
        return
    for need in (*_needs_of_the_layout(run), *_needs_of_the_memory(run)):
        if not need.is_met:
            expected = f"does not go with {_KEY}=true, because {need.reason}: {need.remedy}, or write {_KEY}=false"
            yield Violation(need.key, need.value, expected, others=(_KEY,))
    path = run.actor_rollout_ref.model.path
    config = {} if list(path_problems(path)) else read_config_json(path)
    text = {**config, **mapping_at(config, "text_config")}
    experts = [count for name in _EXPERTS if isinstance(count := text.get(name), int)]
    form = "a latent cache" if text.get("kv_lora_rank") else "experts" if max(experts, default=0) > 1 else None
    if form:
        yield Violation(
            _KEY, True, f"is not supported for a model with {form}, which vllm holds in another form: write false"
        )


def _needs_of_the_layout(run: RunConfig) -> Iterator[_Need]:
    shared = run.actor_rollout_ref
    actor = shared.actor
    rollout = shared.rollout
    # A user's engine class is asked later.
    can_share = rollout.name not in ENGINES or ENGINES[rollout.name].shares_weights
    yield _Need(f"{_ROLLOUT}.name", rollout.name, can_share, "write vllm", f"{rollout.name} cannot hold them")
    hybrid = shared.hybrid_engine
    size = run.trainer.world_size
    yield _Need("actor_rollout_ref.hybrid_engine", hybrid, hybrid, "write true", "servers hold weights of their own")
    is_fsdp = isinstance(actor, FSDPActorConfig)
    yield _Need(
        f"{_ACTOR}.strategy", actor.strategy, is_fsdp, "write fsdp or fsdp2", "Megatron-Core has another layout"
    )
    workers = "trainer.n_gpus_per_node" if run.trainer.n_gpus_per_node > 1 else "trainer.nnodes"
    count = run.trainer.n_gpus_per_node if run.trainer.n_gpus_per_node > 1 else run.trainer.nnodes
    yield _Need(workers, count, size == 1, "write 1", f"each of {size} workers would hold a part")
    parallel = rollout.tensor_model_parallel_size
    reason = "each worker's engine would hold a part"
    yield _Need(f"{_ROLLOUT}.tensor_model_parallel_size", parallel, parallel == 1, "write 1", reason)
    rank = shared.model.lora_rank
    reason = "adapters are merged into a copy of the weights"
    yield _Need("actor_rollout_ref.model.lora_rank", rank, rank == 0, "write 0", reason)


def _needs_of_the_memory(run: RunConfig) -> Iterator[_Need]:
    actor = run.actor_rollout_ref.actor
    rollout = run.actor_rollout_ref.rollout
    on_cpu = run.trainer.device == "cpu"
    frees = rollout.free_cache_engine and not on_cpu
    yield _Need(
        f"{_ROLLOUT}.free_cache_engine", True, not frees, "write false", "vllm frees its weights with its cache"
    )
    own = rollout.engine_kwargs.get("vllm") or {}
    for name in _OWN_WEIGHTS:
        key = f"{_ROLLOUT}.engine_kwargs.vllm.{name}"
        yield _Need(key, own.get(name), not own.get(name), "leave it out", "the engine's weights would be others")
    if not isinstance(actor, FSDPActorConfig):
        return
    fsdp = actor.fsdp_config
    node = f"{_ACTOR}.fsdp_config"
    for name in ("param_offload", "offload_policy"):
        yield _Need(f"{node}.{name}", True, not fsdp[name], "write false", "the weights would leave the engine")
    held = _long_name(fsdp.model_dtype)
    reason = f"the trainer holds {held} ({node}.model_dtype)"
    yield _Need(f"{_ROLLOUT}.dtype", rollout.dtype, _long_name(rollout.dtype) == held, f"write {held}", reason)
    precision = dict(fsdp.mixed_precision or {})
    computed = _long_name(precision.get("param_dtype") or (held if on_cpu else "bf16"))
    reason = f"the trainer would compute with a {computed} copy of {held} weights"
    yield _Need(f"{node}.mixed_precision", precision or None, computed == held, f"write param_dtype: {held}", reason)


def _long_name(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype)
