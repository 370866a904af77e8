"""Importance weights of the rollout from the configuration through the trainer to the gradient of a real engine."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.workers.engine import cases
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.mismatch_helper import compute_rollout_importance_weights
from verl.trainer.ppo.phases import PHASES, checked_phase
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState
from verl.utils.fsdp_utils import full_tensor
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine
from verl.workers.roles.losses import ppo_loss

OFF = {
    "rollout_is_threshold": None,
    "rollout_is_threshold_lower": None,
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_veto_threshold": 1e-4,
    "rollout_is": False,
}


def trainer(**algorithm: Any) -> RayPPOTrainer:
    made = RayPPOTrainer.__new__(RayPPOTrainer)
    base = {
        "adv_estimator": "grpo",
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False,
        "use_pf_ppo": False,
    }
    made.config = OmegaConf.create(
        {"algorithm": base | OFF | algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}, "reward_model": {}}
    )
    made.run_config = RunConfig.parse(made.config)
    made.state = RunState(seed=1, step=3)
    return made


def batch() -> DataProto:
    """Two groups of two; ratios of training to rollout from 1/5 to 4."""
    old = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, 0.0], [-3.0, -0.1, -0.2], [-0.7, -0.7, -0.7]])
    ratios = torch.tensor([[1.0, 4.0, 0.2], [1.0, 1.5, 1.0], [0.4, 1.1, 0.9], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    scores = torch.zeros(4, 3)
    scores[[0, 2], 0] = 1.0
    ones = torch.ones(4, 3, dtype=torch.long)
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": old - ratios.log(),
        "response_mask": mask,
        "token_level_scores": scores,
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids", "responses"), ones),
    }
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "a", "b", "b"], dtype=object)})


def weights_of(**algorithm: Any) -> list[list[float]] | None:
    data, _ = trainer(**algorithm).compute_rollout_importance_weights_and_add_to_batch(batch())
    found = data.batch.get("rollout_is_weights", None)
    return None if found is None else [[round(x, 5) for x in row] for row in found.tolist()]


def test_every_key_reaches_the_weights():
    on = {"rollout_is_threshold": 2.0, "rollout_is": True}
    assert weights_of() is None
    assert weights_of(rollout_is_threshold=2.0) is None
    assert weights_of(**on) == [[1, 2, 0.2], [1, 1.5, 0], [0.4, 1.1, 0.9], [1, 1, 1]]
    assert weights_of(**on | {"rollout_is_threshold": 5.0})[0] == [1, 4, 0.2]
    assert weights_of(**on, rollout_is_mode="mask")[0] == [1, 0, 0]
    assert weights_of(**on, rollout_is_mode="clip") == weights_of(**on, rollout_is_mode="mask")
    assert weights_of(**on, rollout_is_mode="mask", rollout_is_threshold_lower=0.1)[0] == [1, 0, 0.2]
    assert weights_of(**on, rollout_is_level="sequence") == [[0.8] * 3, [1.5, 1.5, 0], [0.396] * 3, [1, 1, 1]]
    assert weights_of(**on, rollout_is_level="geometric")[0] == [round(0.8 ** (1 / 3), 5)] * 3
    assert weights_of(**on, rollout_is_veto_threshold=0.3) == [[0, 0, 0], [1, 1.5, 0], [0.4, 1.1, 0.9], [1, 1, 1]]


def test_metrics_come_without_the_weights():
    data, metrics = trainer(rollout_is_threshold=2.0).compute_rollout_importance_weights_and_add_to_batch(batch())
    assert "rollout_is_weights" not in data.batch.keys()
    assert metrics["mismatch/rollout_is_max"] == pytest.approx(4.0)
    assert {name.split("/")[0] for name in metrics} == {"mismatch"}
    without = batch()
    without.batch.pop("rollout_log_probs")
    assert trainer(rollout_is_threshold=2.0).compute_rollout_importance_weights_and_add_to_batch(without)[1] == {}
    assert trainer(rollout_is=True).compute_rollout_importance_weights_and_add_to_batch(without) == (without, {})
    weighted = trainer(rollout_is_threshold=2.0, rollout_is=True)
    with pytest.raises(ValueError, match=r"algorithm\.rollout_is=true: the rollout returned no rollout_log_probs"):
        weighted.compute_rollout_importance_weights_and_add_to_batch(without)


def test_the_phase_adds_weights_and_metrics(monkeypatch):
    """Between rewards and advantages; the advantages stay what they are."""
    monkeypatch.setenv("VERL_CHECK_PHASES", "1")
    assert "rollout_is_weights" in PHASES["shape"].optional
    shaped = {}
    for weigh in (False, True):
        data, metrics = batch(), {}
        with checked_phase("shape", data) as result:
            chosen = trainer(rollout_is_threshold=2.0, rollout_is=weigh)
            result.append(chosen.shape(data, metrics, {}))
        shaped[weigh] = result[0].batch
        assert metrics["mismatch/rollout_is_max"] == pytest.approx(4.0)
    assert shaped[True]["rollout_is_weights"].shape == (4, 3)
    assert torch.equal(shaped[True]["advantages"], shaped[False]["advantages"])


# ---- the gradient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "plain"
    cases.write_model(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> BaseEngine:
    return cases.build(folder)


def gradients(engine: BaseEngine, loss_mode: str, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    config = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    data = cases.batch(**cases.MICRO[2])
    for name, value in columns.items():
        data.batch[name] = value
    with engine.train_mode():
        engine.forward_backward_batch(data, partial(ppo_loss, config))
        named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        return {name: full_tensor(grad).clone() for name, grad in named.items()}


def plain_gradients(folder: Path, loss_mode: str, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Differentiate the mean over tokens of weight x loss, by plain transformers."""
    from transformers import Qwen2ForCausalLM

    model, data = Qwen2ForCausalLM.from_pretrained(folder), cases.tensors()
    inputs = {name: data[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, cases.PROMPT - 1 : -1]
    scores = torch.log_softmax(logits / cases.TEMPERATURE, dim=-1)
    log_probs = scores.gather(-1, data["responses"].unsqueeze(-1)).squeeze(-1)
    advantages = data["advantages"]
    ratio = (log_probs - columns["old_log_probs"]).exp()
    vanilla = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    vanilla = torch.where(advantages < 0, torch.minimum(vanilla, -3.0 * advantages), vanilla)
    loss = {"vanilla": vanilla, "gpg": -advantages * log_probs}[loss_mode]
    mask = data["response_mask"]
    (columns["rollout_is_weights"] * loss * mask).sum().div(mask.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss_mode", ["vanilla", "gpg"])
@pytest.mark.parametrize(("level", "mode"), [("token", "truncate"), ("sequence", "mask")])
def test_the_gradient_is_that_of_the_weighted_loss(engine, folder, loss_mode, level, mode):
    generator = torch.Generator().manual_seed(9)
    shape = (cases.ROWS, cases.RESPONSE)
    old = -4.6 + 0.3 * torch.randn(shape, generator=generator)
    rollout = old + 0.4 * torch.randn(shape, generator=generator)
    mask = cases.tensors()["response_mask"]
    data, metrics = compute_rollout_importance_weights(old, rollout, mask, level, mode, 1.5)
    assert 0.1 < metrics["mismatch/rollout_is_ratio_fraction_high"] < 0.9
    columns = {"old_log_probs": old, "rollout_is_weights": data.batch["rollout_is_weights"]}
    found, wanted = gradients(engine, loss_mode, columns), plain_gradients(folder, loss_mode, columns)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    unweighted = gradients(engine, loss_mode, {"old_log_probs": old})
    difference = sum((unweighted[name] - found[name]).square().sum() for name in found).sqrt()
    assert difference > 0.1 * sum(gradient.square().sum() for gradient in found.values()).sqrt()
