"""The actor alone and the critic as Ray workers: equal to the engine, and with a loss of the caller."""

import platform
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import ray
from ray.util.placement_group import remove_placement_group

from examples.tiny_model import make_tiny_model
from tests.workers.engine import cases, real_losses
from verl.algos.aggregate import Sum
from verl.errors import WorkerTaskError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.metric import reduce_metrics
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPCriticModelCfg, FSDPOptimizerConfig
from verl.workers.roles import ActorWorker, CriticWorker
from verl.workers.roles.losses import ppo_loss

OPTIMIZER = FSDPOptimizerConfig(lr=cases.LR, weight_decay=0.01)
ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_infer_micro_batch_size_per_gpu": 2,
    "ppo_mini_batch_size": cases.ROWS // 2,
    "rollout_n": 2,
    "entropy_coeff": real_losses.ENTROPY,
    "use_kl_loss": True,
    "kl_loss_coef": real_losses.KL,
    "clip_ratio_c": real_losses.DUAL,
    "optim": OPTIMIZER,
}


@pytest.fixture
def start(ray_cluster: None) -> Iterator[Any]:
    """Start groups of workers; all end with the test."""
    pools, groups = [], []

    def start(num_workers: int, cls: type, config: Any) -> RayWorkerGroup:
        pools.append(RayResourcePool([num_workers], max_colocate_count=1))
        worker = RayClassWithInitArgs(ray.remote(cls), config=config)
        groups.append(RayWorkerGroup(pools[-1], worker, device_name="cpu", call_timeout_s=600))
        groups[-1].init_model()
        return groups[-1]

    yield start
    for group in groups:
        group.kill()
    for placement in (placement for pool in pools for placement in pool.pgs or []):
        remove_placement_group(placement)


def batch() -> Any:
    data = real_losses.batch(list(range(cases.ROWS)))
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()
    return data


def faults_of_a_large_block() -> int:
    """Return the page faults of a tensor of 64 MB, after others of its size: 16,384 in new pages of 4 kB."""
    found = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64 << 20, dtype=torch.uint8)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return max(found[-3:])


def scaled_values(factor: float, *, model_output: Any, data: Any) -> Any:
    """A loss of the caller: the mean of the values, times a factor."""
    total = Sum(factor * (model_output["values"] * data.batch["response_mask"]).sum(), "token")
    return [total], {"critic/mine": total}


def test_roles_take_the_steps_of_the_engine_and_losses_of_the_caller(start: Any, tmp_path: Path) -> None:
    cases.write_model(tmp_path / "model")
    model = cases.model_config(tmp_path / "model")
    expected = cases.build(tmp_path / "model")
    data = real_losses.batch(list(range(cases.ROWS)), micro_batch_size_per_gpu=3)
    with expected.eval_mode():
        output = expected.infer_batch(data)
    with expected.train_mode():
        steps = [expected.train_batch(data, real_losses.LOSSES["language_model"]) for _ in range(2)]

    actor = start(2, ActorWorker, FSDPActorConfig(model_config=model, **ACTOR))
    inferred = actor.compute_log_prob(batch())
    torch.testing.assert_close(inferred.batch["old_log_probs"], output["log_probs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inferred.batch["entropy"], output["entropy"], atol=1e-5, rtol=1e-5)
    metrics = reduce_metrics(actor.update_actor(batch()).meta_info["metrics"])
    assert metrics["actor/grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=1e-4)
    assert metrics["actor/pg_loss"] == pytest.approx(steps[0]["actor/pg_loss"], rel=1e-4)
    assert metrics["actor/lr"] == cases.LR
    # the same loss, as the caller's own and without its other terms
    plain = FSDPActorConfig(**(ACTOR | {"entropy_coeff": 0, "use_kl_loss": False}))
    actor.set_loss_fn(partial(ppo_loss, plain))
    metrics = reduce_metrics(actor.update_actor(batch()).meta_info["metrics"])
    assert metrics["actor/pg_loss"] == pytest.approx(steps[1]["actor/pg_loss"], rel=1e-3)
    assert "actor/kl_loss" not in metrics and metrics["actor/grad_norm"] != pytest.approx(steps[1]["grad_norm"])
    actor.set_loss_fn(lambda model_output, data: (model_output["log_probs"].sum(), {}))
    with pytest.raises(WorkerTaskError, match="the loss returned Tensor: return "):
        actor.update_actor(batch())

    make_tiny_model(str(tmp_path / "critic"), hidden_size=32, num_layers=1)
    values = FSDPCriticConfig(
        ppo_micro_batch_size_per_gpu=3,
        forward_micro_batch_size_per_gpu=4,
        ppo_mini_batch_size=cases.ROWS,
        grad_clip=100.0,
        optim=OPTIMIZER,
        model=FSDPCriticModelCfg(
            path=str(tmp_path / "critic"), use_remove_padding=True, enable_gradient_checkpointing=False
        ),
    )
    critic = start(1, CriticWorker, values)
    if platform.libc_ver()[0] == "glibc":  # a worker on a CPU keeps the memory of a step for the next one
        assert critic.execute_func_rank_zero(faults_of_a_large_block) < 16
    critic.set_loss_fn(partial(scaled_values, 3.0))
    mean = critic.compute_values(batch()).batch["values"].sum() / batch().batch["response_mask"].sum()
    metrics = reduce_metrics(critic.update_critic(batch()).meta_info["metrics"])
    assert metrics["critic/mine"] == pytest.approx(3 * mean.item(), rel=1e-4)
    assert "critic/vf_loss" not in metrics and metrics["critic/grad_norm"] > 0


def test_an_actor_without_a_model_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.workers.roles.base.initialize_global_process_group_ray", lambda timeout_second: None)
        patch.setattr("verl.single_controller.base.Worker.__init__", lambda self: None)
        with pytest.raises(ValueError, match=r"actor\.model_config=None"):
            ActorWorker(FSDPActorConfig(**ACTOR))
