"""Roles on Megatron-Core: layouts against the workers, the model and each other, and what cannot run."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from verl.base_config import Violation, as_yaml
from verl.trainer.config.megatron_fields import optimizer_rules, override_rules, stage_problem
from verl.trainer.config.megatron_models import config_fields, family_rules, reference_node
from verl.trainer.config.refusals import select
from verl.utils.megatron.ranks import expert_layout_problem, model_parallel_size

Tree = Mapping[str, Any]

SIZES = tuple(f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
SHARED = (*SIZES, "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")
"""Keys of a ``megatron`` node that roles of one process have in common."""

CUDA_ONLY = (
    *("apply_rope_fusion", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_grouped_gemm"),
    *("moe_enable_deepep", "moe_router_fusion", "tp_comm_overlap", "cpu_offloading", "enable_cuda_graph", "fp8"),
    *("fp4", "use_kitchen", "fine_grained_activation_offloading", "symmetric_ar_type", "batch_invariant_mode"),
)
"""Fields of TransformerConfig whose code runs on CUDA alone."""

CUDA_OPTIMIZERS = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")
"""Fields of OptimizerConfig of which the same is true."""


ASCEND = "is not supported with trainer.device=npu: Megatron-Core runs on CUDA and CPU. Write "

ACTOR_MODEL = "actor_rollout_ref.model"
"""The key of the model that actor and reference have."""


class Role(NamedTuple):
    """A role that has a training engine; ``shares`` says whether it lives in the actor's processes."""

    key: str
    node: Tree
    model: str
    world: int
    shares: bool

    @property
    def is_megatron(self) -> bool:
        """Whether it runs on Megatron-Core."""
        return self.node.get("strategy") == "megatron"

    @property
    def engine(self) -> str:
        """The key of its layout."""
        return f"{self.key}.megatron"


def workers_of_a_shard(node: Tree, fsdp_key: str) -> int:
    """Return how many workers share each shard of a batch in a role: by its layout, or its sequence parallelism."""
    if node.get("strategy") == "megatron" and isinstance(node.get("megatron"), Mapping):
        return max(1, model_parallel_size(node["megatron"]))
    own: int = node.get("ulysses_sequence_parallel_size", 1)
    inner: int = select(node, f"{fsdp_key}.ulysses_sequence_parallel_size", 1)
    return own if own > 1 else inner


def roles_of(tree: Tree, use_reference: bool, use_critic: bool) -> list[Role]:
    """Return the roles that have a training engine, the actor first."""
    shared, trainer, reward = tree["actor_rollout_ref"], tree["trainer"], tree["reward_model"]
    world = trainer["n_gpus_per_node"] * trainer["nnodes"]
    roles = [Role("actor_rollout_ref.actor", shared["actor"], ACTOR_MODEL, world, True)]
    if use_reference and not shared["model"].get("lora_rank", 0):
        roles.append(Role("actor_rollout_ref.ref", shared["ref"], ACTOR_MODEL, world, True))
    if use_critic:
        roles.append(Role("critic", tree["critic"], "critic.model", world, True))
    if reward.get("enable") is True and reward.get("model_type") != "generative":
        own = reward.get("enable_resource_pool") is True
        size = reward["n_gpus_per_node"] * reward["nnodes"] if own else world
        roles.append(Role("reward_model", reward, "reward_model.model", size, not own))
    return roles


def megatron_rules(tree: Tree, use_reference: bool, use_critic: bool, broken: set[str]) -> Iterator[Violation]:
    """Yield what keeps roles on Megatron-Core from running; rules that need a key in ``broken`` are left out."""
    if any(key.startswith(("trainer.n", "reward_model.n")) for key in broken):
        return
    roles = roles_of(tree, use_reference, use_critic)
    yield from _strategy_rules(roles)
    on_ascend = tree["trainer"]["device"] == "npu"
    for role in roles:
        if not role.is_megatron:
            continue
        if on_ascend:
            yield Violation.unsupported(
                f"{role.key}.strategy", "megatron", f"{ASCEND}--config-name=ppo_trainer, which is of FSDP"
            )
        elif not isinstance(role.node.get("megatron"), Mapping):
            yield Violation(f"{role.key}.strategy", "megatron", "needs --config-name=ppo_megatron_trainer")
        elif not any(key.startswith(role.engine) for key in broken):
            yield from _option_rules(tree, role)
            yield from _world_rules(role, tree["trainer"]["device"] == "cpu")
            yield from _model_rules(tree, role)
            if role.shares and roles[0].is_megatron:
                yield from _shared_rules(role, roles[0])


def _strategy_rules(roles: list[Role]) -> Iterator[Violation]:
    """Yield roles that share processes on Megatron-Core with others on FSDP."""
    actor = roles[0]
    for role in roles[1:]:
        if role.shares and role.is_megatron != actor.is_megatron:
            yield Violation(
                f"{role.key}.strategy",
                role.node.get("strategy"),
                f"shares its workers with the actor, whose strategy is {actor.node.get('strategy')}: choose both by "
                "--config-name, ppo_trainer or ppo_megatron_trainer",
            )


def _option_rules(tree: Tree, role: Role) -> Iterator[Violation]:
    """Yield options of the model and the engine that do not exist on Megatron-Core, or not on these devices."""
    for name, wanted in (("lora_rank", 0), ("use_liger", False), ("enable_activation_offload", False)):
        if (value := select(tree, f"{role.model}.{name}", wanted)) != wanted:
            yield Violation.unsupported(
                f"{role.model}.{name}", value, f"is not supported with strategy=megatron: write {as_yaml(wanted)}"
            )
    folder = role.node["megatron"].get("dist_checkpointing_path")
    if isinstance(folder, str) and "://" not in folder and not os.path.isdir(os.path.expanduser(folder)):
        expected = "no such folder: write one that scripts/converter_hf_to_mcore.py made, or a checkpoint"
        yield Violation(f"{role.engine}.dist_checkpointing_path", folder, expected)
    yield from override_rules(role.node["megatron"], role.engine, role.model)
    yield from optimizer_rules(role.node.get("optim") or {}, f"{role.key}.optim")
    on_cpu = tree["trainer"]["device"] == "cpu"
    overrides = role.node["megatron"].get("override_transformer_config") or {}
    for name in CUDA_ONLY:
        if on_cpu and overrides.get(name):
            key = f"{role.engine}.override_transformer_config.{name}"
            yield Violation(key, overrides[name], "needs CUDA: leave it out with trainer.device=cpu")
    fused = f"{ACTOR_MODEL}.use_fused_kernels"
    if overrides.get("defer_embedding_wgrad_compute") and role.model == ACTOR_MODEL and select(tree, fused, False):
        key = f"{role.engine}.override_transformer_config.defer_embedding_wgrad_compute"
        yield Violation(key, True, f"needs logits: leave it out, or write {fused}=false")
    dispatcher = overrides.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher != "alltoall" and (on_cpu or dispatcher != "flex"):
        key = f"{role.engine}.override_transformer_config.moe_token_dispatcher_type"
        also = "" if on_cpu else " or flex"
        yield Violation(key, dispatcher, f"must be alltoall{also}: the length of micro-batches varies")
    of_optimizer = (role.node.get("optim") or {}).get("override_optimizer_config") or {}
    for name in (each for each in CUDA_OPTIMIZERS if on_cpu and of_optimizer.get(each)):
        key = f"{role.key}.optim.override_optimizer_config.{name}"
        yield Violation(key, of_optimizer[name], "needs CUDA: leave it out with trainer.device=cpu")
    if on_cpu and overrides.get("deallocate_pipeline_outputs"):
        key = f"{role.engine}.override_transformer_config.deallocate_pipeline_outputs"
        yield Violation(key, True, "must be false with trainer.device=cpu: gloo still reads what would be freed")
    if on_cpu and overrides.get("transformer_impl") == "transformer_engine":
        key = f"{role.engine}.override_transformer_config.transformer_impl"
        yield Violation(key, "transformer_engine", "needs CUDA: write local with trainer.device=cpu")


def _world_rules(role: Role, on_cpu: bool) -> Iterator[Violation]:
    """Yield sizes that do not divide the workers."""
    engine = role.node["megatron"]
    tp, pp, cp = (engine[name] for name in SIZES[:3])
    if role.world % (tp * pp * cp):
        expected = f"x pipeline_model_parallel_size={pp} x context_parallel_size={cp} must divide the {role.world}"
        yield Violation(f"{role.engine}.{SIZES[0]}", tp, f"{expected} workers (n_gpus_per_node x nnodes)")
    elif (found := expert_layout_problem(role.world, engine, on_cpu)) is not None:
        key, value, expected = found
        yield Violation(f"{role.engine}.{key}", value, expected)


def _model_rules(tree: Tree, role: Role) -> Iterator[Violation]:
    """Yield a model whose files are here that is not supported, and sizes that do not divide its heads, experts or
    layers."""
    key, node, engine = role.model, select(tree, role.model), role.node["megatron"]
    if role.key.endswith(".ref"):
        key, node = reference_node(tree["actor_rollout_ref"])
    if (fields := config_fields(node)) is None:
        return
    yield from family_rules(node, fields, key, "--config-name=ppo_trainer")
    config = vars(fields)
    tp, pp, _, ep = (engine[name] for name in SIZES)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = config.get(name)
        if isinstance(count, int) and count % tp:
            yield Violation(f"{role.engine}.{SIZES[0]}", tp, f"must divide {name}={count} of the model")
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    if ep > 1 and "model_type" in config and (not experts or experts % ep):
        yield Violation(f"{role.engine}.{SIZES[3]}", ep, f"must divide the {experts} experts of the model")
    if experts and tp > 1 and not engine["sequence_parallel"]:
        expected = f"must be true with {SIZES[0]}={tp}: the model has experts, which Megatron-Core cuts no other way"
        yield Violation(f"{role.engine}.sequence_parallel", False, expected)
    layers, overrides = config.get("num_hidden_layers"), engine.get("override_transformer_config") or {}
    stages = engine["virtual_pipeline_model_parallel_size"] or 1
    if isinstance(layers, int) and (found := stage_problem(layers, pp, stages, overrides)) is not None:
        name, expected = found
        if name is None:
            yield Violation(f"{role.engine}.{SIZES[1]}", pp, expected)
        else:
            yield Violation(f"{role.engine}.override_transformer_config.{name}", overrides[name], expected)


def _shared_rules(role: Role, actor: Role) -> Iterator[Violation]:
    """Yield what differs from the layout of the actor, whose processes have one set of groups."""
    for name in SHARED:
        value, common = role.node["megatron"][name], actor.node["megatron"][name]
        if value != common:
            expected = (
                f"must be {as_yaml(common)}, as in {actor.engine}: roles that share their workers have one layout"
            )
            yield Violation(f"{role.engine}.{name}", value, expected)
