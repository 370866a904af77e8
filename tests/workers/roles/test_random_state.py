"""Dropout of a role: drawn from the seed of its engine, by each rank its own, and taken up by a resumed run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine import cases
from tests.workers.roles import megatron_cases
from verl.protocol import DataProto
from verl.utils.numerics.seeding import seed_process
from verl.workers import config as nodes
from verl.workers.roles import ActorWorker
from verl.workers.rollout.base import preserved_random_state

STRATEGIES = ["fsdp", "megatron"]
STEPS, SAVED_AFTER = 4, 2
LEFT_OUT = ("perf/", "timing")


@pytest.fixture(scope="module", params=STRATEGIES)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Build an actor in this process, by its dropout and seed."""
    if request.param == "megatron":
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    root = tmp_path_factory.mktemp("random_state")
    cases.write_model(root / "policy")

    def start(dropout: float, seed: int = 42, rank: int = 0) -> ActorWorker:
        model = cases.model_config(root / "policy", override_config={"attention_dropout": dropout})
        common = megatron_cases.ACTOR | {"model_config": model, "ppo_epochs": 1}
        seed_process(torch.seed())  # whatever was drawn in this process before
        if request.param == "fsdp":
            engine = nodes.FSDPEngineConfig(seed=seed)
            worker = ActorWorker(nodes.FSDPActorConfig(**common, optim=nodes.FSDPOptimizerConfig(), fsdp_config=engine))
        else:
            from megatron.core import parallel_state

            from verl.single_controller.base.megatron import MegatronWorker

            parallel_state.destroy_model_parallel()
            cls = type("MegatronActorWorker", (MegatronWorker, ActorWorker), {})
            engine = nodes.McoreEngineConfig(seed=seed)
            worker = cls(nodes.McoreActorConfig(**common, optim=nodes.McoreOptimizerConfig(), megatron=engine))
        worker._rank = rank
        worker.init_model()
        return worker

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{root}/store"}.items():
            patch.setenv(name, value)
        yield start
        if request.param == "megatron":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def train(worker: ActorWorker, steps: int) -> list[dict[str, float]]:
    """Generate as the rollouts do, in a random state that is put back, and update; returns what each step reports."""
    reports = []
    for _ in range(steps):
        with preserved_random_state():
            torch.rand(int(torch.randint(1, 100, ())))
        data: DataProto = megatron_cases.batch()
        metrics = worker.update_actor(data).meta_info["metrics"]
        reports.append({name: value for name, value in metrics.items() if not name.startswith(LEFT_OUT)})
    return reports


def test_dropout_repeats_and_a_resumed_run_takes_it_up(start: Any, tmp_path: Path) -> None:
    """Every metric of every step, bit for bit; without dropout, and by another seed or rank, they are others."""
    worker = start(0.2)
    expected = train(worker, SAVED_AFTER)
    worker.save_checkpoint(str(tmp_path / "global_step_2" / "actor"), global_step=SAVED_AFTER)
    expected += train(worker, STEPS - SAVED_AFTER)
    assert train(start(0.2), STEPS) == expected

    resumed = start(0.2)
    train(resumed, 1)
    resumed.load_checkpoint(str(tmp_path / "global_step_2" / "actor"))
    assert train(resumed, STEPS - SAVED_AFTER) == expected[SAVED_AFTER:]

    others: list[dict[str, Any]] = [{"dropout": 0.2, "seed": 43}, {"dropout": 0.0}]
    if resumed.config.strategy != "megatron":  # where the place in the layout counts
        others.append({"dropout": 0.2, "rank": 1})
    norms = [report["actor/grad_norm"] for report in [expected[0], *(train(start(**each), 1)[0] for each in others)]]
    assert len(set(norms)) == len(norms) and all(0 < norm < 1e3 for norm in norms)


def test_log_probs_are_those_without_dropout(start: Any) -> None:
    """Old and reference log-probabilities are of the policy that generates, which drops nothing."""
    with_dropout, without = (start(dropout).compute_log_prob(megatron_cases.batch()).batch for dropout in (0.2, 0.0))
    torch.testing.assert_close(with_dropout["old_log_probs"], without["old_log_probs"], atol=0, rtol=0)
