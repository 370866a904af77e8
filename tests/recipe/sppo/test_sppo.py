"""The reward and the loss of SPPO: values by hand, gradients against autograd through plain transformers."""

import math

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from recipe.sppo.config import SPPOActorConfig
from recipe.sppo.dp_actor import DataParallelSPPOActor, compute_sppo_loss, sppo_policy_loss
from recipe.sppo.sppo_ray_trainer import compute_advantage, softmean
from tests.workers.engine import cases
from verl.algos.policy_loss import effective_loss_agg_mode
from verl.protocol import DataProto

ETA = 0.7


def test_the_soft_mean_lies_between_mean_and_maximum():
    values = torch.tensor([0.0, 1.0, 5.0])
    by_hand = math.log((1 + math.exp(0.5) + math.exp(2.5)) / 3) / 0.5
    assert softmean(values, 0.5).item() == pytest.approx(by_hand)
    assert softmean(values, 1e-4).item() == pytest.approx(2.0, abs=1e-3)
    assert softmean(values, 100.0).item() == pytest.approx(5.0, abs=0.02)
    assert softmean(values + 3, 0.5).item() == pytest.approx(by_hand + 3)


def test_rewards_minus_the_soft_mean_stand_at_each_token():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rewards = torch.tensor([[0.5, 0.5, 9.0], [0.0, 9.0, 9.0]])
    data = DataProto.from_dict({"response_mask": mask, "token_level_rewards": rewards})
    batch = compute_advantage(data, 2.0).batch
    mean = math.log((math.exp(2.0) + 1) / 2) / 2
    assert batch["seq_level_rewards"].tolist() == pytest.approx([1 - mean, -mean])
    expected = [[1 - mean, 1 - mean, 0], [-mean, 0, 0]]
    np.testing.assert_allclose(batch["advantages"].numpy(), expected, rtol=1e-6)
    assert torch.equal(batch["returns"], batch["advantages"])


def test_the_loss_by_hand():
    old = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, 0.0, 0.0]])
    new = torch.tensor([[-0.5, -1.0, 7.0], [-3.5, 4.0, 4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rewards = torch.tensor([0.4, -0.6])
    expected = ((1.5 - ETA * 0.4) ** 2 + (-0.5 + ETA * 0.6) ** 2) / 2
    loss, ratio = compute_sppo_loss(old, new, rewards, mask, ETA)
    assert loss.item() == pytest.approx(expected) and ratio.tolist() == [1.5, -0.5]
    config = SPPOActorConfig(sppo_eta=ETA, ppo_micro_batch_size_per_gpu=1)
    found = sppo_policy_loss(old, new, rewards.unsqueeze(-1) * mask, mask, "token-mean", config)
    assert found[0].item() == pytest.approx(expected)
    assert found[2].item() == pytest.approx(-(0.5 + 1.0 - 0.5) / 3)
    assert effective_loss_agg_mode("sppo", "token-mean") == "seq-mean-token-sum"  # a mean over responses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sppo")
    cases.write_model(root)
    return root


_READ = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


@pytest.mark.parametrize("cut", [{"ppo_micro_batch_size_per_gpu": 3}, {"ppo_micro_batch_size_per_gpu": 8}])
def test_an_update_is_the_gradient_of_the_loss(folder, cut):
    rows = {key: value for key, value in cases.tensors().items() if key in _READ}
    generator = torch.Generator().manual_seed(5)
    mask = rows["response_mask"].bool()
    module = Qwen2ForCausalLM.from_pretrained(folder)
    inputs = {key: rows[key] for key in ("input_ids", "attention_mask", "position_ids")}
    logits = module(**inputs).logits[:, cases.PROMPT - 1 : -1] / cases.TEMPERATURE
    log_probs = logits.log_softmax(-1).gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
    old = (log_probs + 0.1 * torch.randn(log_probs.shape, generator=generator)).detach()
    rewards = torch.randn(cases.ROWS, generator=generator)
    loss = ((torch.where(mask, log_probs - old, 0.0).sum(-1) - ETA * rewards) ** 2).mean()
    loss.backward()

    trained = Qwen2ForCausalLM.from_pretrained(folder)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    options = {"ppo_mini_batch_size": cases.ROWS, "sppo_eta": ETA, "grad_clip": 1e6, "use_remove_padding": True} | cut
    actor = DataParallelSPPOActor(SPPOActorConfig(**options), trained, torch.optim.SGD(trained.parameters(), lr=1.0))
    rows |= {"old_log_probs": old, "seq_level_rewards": rewards}
    metrics = actor.update_policy(DataProto.from_dict(rows, meta_info={"temperature": cases.TEMPERATURE}))
    assert metrics["actor/pg_loss"] == [pytest.approx(loss.item(), rel=1e-4)]
    for (name, parameter), expected in zip(trained.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(before[name] - parameter.detach(), expected.grad, atol=5e-5, rtol=1e-3, msg=name)
