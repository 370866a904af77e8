"""The roles on Megatron-Core and on FSDP with the same weights and rows: what each gives back."""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import torch

from examples.tiny_model import make_tiny_model
from tests.workers.engine import cases, real_losses
from tests.workers.engine.megatron_cases import OFFLOAD
from tests.workers.roles import reward_cases
from verl.protocol import DataProto
from verl.utils.distributed import group_timeout
from verl.utils.megatron.ranks import place_of
from verl.workers import config as nodes

TP, PP, CP = ({f"{axis}_parallel_size": 2} for axis in ("tensor_model", "pipeline_model", "context"))
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "two workers": {"tp 2": TP, "pp 2": PP},
    "two workers, more": {"pp 2 x 2 virtual": PP | {"virtual_pipeline_model_parallel_size": 2}, "cp 2": CP, "dp 2": {}},
    "two workers, offloaded": {
        "pp 2, offloaded": PP | OFFLOAD,
        "tp 2, parameters offloaded": TP | {"param_offload": True},
        "pp 2, gradients offloaded": PP | {"grad_offload": True},
        "tp 2, optimizer offloaded": TP | {"optimizer_offload": True},
    },
    "four workers": {"tp 2 pp 2": TP | PP, "pp 2 dp 2": PP, "tp 2 dp 2": TP, "cp 2 dp 2": CP},
}
WORLDS = {"two workers": 2, "two workers, more": 2, "two workers, offloaded": 2, "four workers": 4}
PARTS = {"model": "param_offload", "grad": "grad_offload", "optimizer": "optimizer_offload"}
ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_infer_micro_batch_size_per_gpu": 2,
    "ppo_mini_batch_size": cases.ROWS // 2,
    "ppo_epochs": 2,
    "rollout_n": 2,
    "entropy_coeff": real_losses.ENTROPY,
    "use_kl_loss": True,
    "kl_loss_coef": real_losses.KL,
    "clip_ratio_c": real_losses.DUAL,
}
ORDER = {"ppo_mini_batch_size": cases.ROWS // 4, "shuffle": True, "data_loader_seed": 3, "ppo_epochs": 1}
COV = {"clip_cov_ratio": 0.2, "clip_cov_lb": -5.0, "kl_cov_ratio": 0.2}
ACTORS = {
    "vanilla": {},
    "clip_cov": {"policy_loss": nodes.PolicyLossConfig(loss_mode="clip_cov", **COV)},
    "kl_cov": {"policy_loss": nodes.PolicyLossConfig(loss_mode="kl_cov", **COV)},
    "shuffled": ORDER,
}
TIMEOUT_S = 777
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1.0}
CRITIC: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "forward_micro_batch_size_per_gpu": 4,
    "ppo_mini_batch_size": cases.ROWS,
    "ppo_epochs": 2,
}


def write_models(root: Path) -> None:
    cases.write_model(root / "policy", num_hidden_layers=4)
    make_tiny_model(str(root / "critic"), hidden_size=128, num_layers=4)
    reward_cases.write_models(root, num_layers=4)


def batch() -> DataProto:
    data = real_losses.batch(list(range(cases.ROWS)))
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()
    data.batch["sampling_seed"] = torch.arange(cases.ROWS) * 1_000_003
    return data


def actor(root: Path, layout: dict[str, Any] | None, name: str) -> Any:
    from verl.single_controller.base.megatron import MegatronWorker
    from verl.workers.roles import ActorWorker

    common = ACTOR | ACTORS[name] | {"model_config": cases.model_config(root / "policy")}
    if layout is None:
        return ActorWorker(nodes.FSDPActorConfig(**common, optim=nodes.FSDPOptimizerConfig(**OPTIMIZER)), TIMEOUT_S)
    cls = type("MegatronActorWorker", (MegatronWorker, ActorWorker), {})
    engine, optim = nodes.McoreEngineConfig(**layout), nodes.McoreOptimizerConfig(**OPTIMIZER)
    return cls(nodes.McoreActorConfig(**common, optim=optim, megatron=engine), TIMEOUT_S)


def critic(root: Path, layout: dict[str, Any] | None) -> Any:
    path = str(root / "critic")
    if layout is None:
        from verl.workers.fsdp_workers import CriticWorker

        model = nodes.FSDPCriticModelCfg(path=path, tokenizer_path=path, use_remove_padding=True)
        optim = nodes.FSDPOptimizerConfig(**OPTIMIZER)
        return CriticWorker(nodes.FSDPCriticConfig(**CRITIC, model=model, optim=optim))
    from verl.workers.megatron_workers import CriticWorker as OnMegatron

    model_node = nodes.McoreCriticModelConfig(path=path, tokenizer_path=path)
    engine, optimizer = nodes.McoreEngineConfig(**layout), nodes.McoreOptimizerConfig(**OPTIMIZER)
    return OnMegatron(nodes.McoreCriticConfig(**CRITIC, model=model_node, optim=optimizer, megatron=engine))


def reward(root: Path, layout: dict[str, Any] | None) -> Any:
    changes: dict[str, Any] = reward_cases.MICRO[3] | reward_cases.PACKED
    if layout is None:
        return reward_cases.worker(root, changes)
    from verl.workers.megatron_workers import RewardModelWorker

    node = reward_cases.node(root, changes | {"strategy": "megatron", "megatron": layout})
    node["model"].pop("fsdp_config")
    built = RewardModelWorker(node)
    built.init_model()
    return built


class Group:
    """What the driver does for this rank: it gives the shard, and takes the outputs of those that count."""

    def __init__(self, worker: Any, mesh: str) -> None:
        self.rank = worker._query_dispatch_info(mesh)
        self.counts = worker._query_collect_info(mesh)

    def shard(self, data: DataProto, dp_size: int) -> DataProto:
        data.meta_info["global_steps"] = 1
        return data.chunk(dp_size)[self.rank]


def is_offloaded(layout: dict[str, Any]) -> bool:
    """Whether an engine takes something away between its turns, which no engine around its modules can bring back."""
    return any(layout.get(switch) for switch in PARTS.values())


def away(worker: Any) -> list[str]:
    """Return the parts of a worker's engine that are off the device now."""
    offload = getattr(worker.engine, "offload", None)
    return [part for part in PARTS if offload is not None and offload.is_away(part)]


def run_roles(root: Path, rank: int, world_size: int, layout: dict[str, Any] | None) -> dict[str, Any]:
    """Run every role on one layout, or on FSDP alone."""
    result: dict[str, Any] = {}
    dp_size = 1
    if layout is not None:
        place = place_of(rank, world_size, nodes.McoreEngineConfig(**layout))
        dp_size, result["place"] = place.dp_size, dataclasses.asdict(place)
    for name in ACTORS:
        if name == "shuffled" and dp_size > 1:
            continue  # its mini-batches are of other rows there
        worker = actor(root, layout, name)
        worker.init_model()
        group = Group(worker, "actor")
        log_probs = worker.compute_log_prob(group.shard(batch(), dp_size)).batch
        metrics = worker.update_actor(group.shard(batch(), dp_size)).meta_info["metrics"]
        after = worker.compute_log_prob(group.shard(batch(), dp_size)).batch["old_log_probs"]
        result[name] = {"rows": group.rank, "counts": group.counts, "metrics": metrics, "after": after}
        result[name] |= {key: log_probs[key] for key in ("old_log_probs", "entropy")} | {"away": away(worker)}
        if layout is not None:
            sizes, own = worker.get_megatron_global_info(), worker.get_megatron_rank_info()
            groups = (worker.engine.layout.tp_group, worker.engine.layout.pp_group, worker.engine.shares.dp_group)
            result["timeouts"] = [group_timeout(group).total_seconds() for group in groups]
            result["info"] = dataclasses.asdict(sizes) | dataclasses.asdict(own)
        if layout is not None and name == "vanilla" and not is_offloaded(layout):
            result["bare actor"] = _bare_actor(root, layout, dp_size)
    result["critic"] = _critic(root, layout, dp_size)
    worker = reward(root, layout)
    group = Group(worker, "reward")
    scores = worker.compute_rm_score(group.shard(reward_cases.batch(), dp_size)).batch["rm_scores"]
    result["reward"] = {"rows": group.rank, "counts": group.counts, "scores": scores, "away": away(worker)}
    if layout is not None and not is_offloaded(layout):
        from verl.workers.reward_model.megatron import MegatronRewardModel

        engine = worker.engine
        bare = MegatronRewardModel(worker.config, None, engine.models, engine.hf_config, None)
        result["bare reward"] = bare.compute_reward(group.shard(reward_cases.batch(), dp_size)).batch["rm_scores"]
    return result


def _bare_actor(root: Path, layout: dict[str, Any], dp_size: int) -> dict[str, float]:
    """Update an actor around modules that are there already; return the averages of what each step tells."""
    from verl.workers.actor.megatron_actor import MegatronPPOActor

    worker = actor(root, layout, "vanilla")
    worker.init_model()
    config = dataclasses.replace(worker.config, ppo_mini_batch_size=worker.rows_per_step, model_config=None)
    engine = worker.engine
    bare = MegatronPPOActor(config, None, engine.hf_config, None, engine.module, engine.optimizer)
    rows = Group(worker, "actor").shard(batch(), dp_size)
    rows.meta_info |= {"micro_batch_size": 2, "use_dynamic_bsz": False}
    old = bare.compute_log_prob(rows)[0]
    torch.testing.assert_close(old, bare.compute_log_prob(rows, calculate_entropy=True)[0])
    steps = bare.update_policy(bare.make_minibatch_iterator(rows))
    return {name: sum(values) / len(values) for name, values in steps.items()}


def _critic(root: Path, layout: dict[str, Any] | None, dp_size: int) -> dict[str, Any]:
    worker = critic(root, layout)
    worker.init_model()
    group = Group(worker, "critic")
    values = worker.compute_values(group.shard(batch(), dp_size)).batch["values"]
    metrics = worker.update_critic(group.shard(batch(), dp_size)).meta_info["metrics"]
    found = {"rows": group.rank, "counts": group.counts, "values": values, "metrics": metrics, "away": away(worker)}
    if layout is not None and not is_offloaded(layout):
        from verl.workers.critic.megatron_critic import MegatronPPOCritic

        engine = worker.engine
        bare = MegatronPPOCritic(worker.config, None, engine.hf_config, None, engine.module, engine.optimizer)
        rows = group.shard(batch(), dp_size)
        rows.meta_info |= {"micro_batch_size": 3}
        found["after"] = worker.compute_values(group.shard(batch(), dp_size)).batch["values"]
        found["bare"] = bare.compute_values(rows)
    return found


def run_layouts(rank: int, world: str, root: Path, store: str) -> None:
    """Run every layout of a world on one rank; rank 0 runs the roles on FSDP before, alone."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    world_size = WORLDS[world]
    results: dict[str, Any] = {}
    if rank == 0:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DIST_INIT_METHOD=f"file://{store}_alone")
        results["fsdp"] = run_roles(root, 0, 1, None)
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), DIST_INIT_METHOD=f"file://{store}")
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    for name, layout in LAYOUTS[world].items():
        results[name] = run_roles(root, rank, world_size, layout)
        parallel_state.destroy_model_parallel()
    torch.save(results, root / f"{world}, rank {rank}.pt")
