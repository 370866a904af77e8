"""Preferences and losses of pairs: values by hand, gradients against autograd through plain transformers."""

import math

import pytest
import torch
from transformers import Qwen2ForCausalLM

from recipe.spin.config import SPINActorConfig
from recipe.spin.core_algos import compute_online_dpo_loss, compute_onlineDPO_pref, of_whole_pairs, pairs_of
from recipe.spin.dp_actor import CHOSEN, SPINDataParallelPPOActor
from tests.workers.engine import cases
from verl.protocol import DataProto

BETA = 0.3


def test_the_better_response_of_a_pair_is_chosen():
    rewards = torch.tensor([[0.0, 1, 9], [2, 0, 0], [1, 1, 0], [1, 1, 5]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0]])
    assert compute_onlineDPO_pref(rewards, mask).tolist() == [False, True, True, False]  # of equal ones the first
    with pytest.raises(ValueError, match="3 responses make no pairs"):
        compute_onlineDPO_pref(rewards[:3], mask[:3])


def test_a_response_whose_partner_is_missing_is_not_trained():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]])
    assert of_whole_pairs(mask).tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]


def test_losses_by_hand():
    logits = torch.tensor([2.0, -1.0])
    right = [1 / (1 + math.exp(-BETA * value)) for value in (2, -1)]
    assert compute_online_dpo_loss(logits, BETA).tolist() == pytest.approx([-math.log(p) for p in right])
    smooth = [-0.9 * math.log(p) - 0.1 * math.log(1 - p) for p in right]
    assert compute_online_dpo_loss(logits, BETA, 0.1).tolist() == pytest.approx(smooth)
    ipo = [(value - 1 / (2 * BETA)) ** 2 for value in (2, -1)]
    assert compute_online_dpo_loss(logits, BETA, loss_type="ipo").tolist() == pytest.approx(ipo)


@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_the_derivative_by_each_response(loss_type, smoothing):
    ratio = torch.tensor([0.4, -0.2, 1.0, 3.0], requires_grad=True)
    chosen = torch.tensor([0, 1, 1, 0])
    logits = torch.stack([ratio[1] - ratio[0], ratio[2] - ratio[3]])
    losses = compute_online_dpo_loss(logits, BETA, smoothing, loss_type)
    losses.sum().backward()
    pairs = pairs_of(ratio.detach(), chosen, BETA, smoothing, loss_type)
    torch.testing.assert_close(pairs.gradient, ratio.grad)
    torch.testing.assert_close(pairs.loss, losses.detach().repeat_interleave(2))
    torch.testing.assert_close(pairs.logits, logits.detach().repeat_interleave(2))


# ---- a whole update


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("spin")
    cases.write_model(root)
    return root


def batch(**changes) -> DataProto:
    tensors = {key: value for key, value in cases.tensors().items() if key in _READ}
    generator = torch.Generator().manual_seed(5)
    tensors["ref_log_prob"] = -torch.rand(cases.ROWS, cases.RESPONSE, generator=generator)
    tensors[CHOSEN] = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])
    return DataProto.from_dict(tensors | changes, meta_info={"temperature": cases.TEMPERATURE})


_READ = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def log_prob_sums(module, data) -> torch.Tensor:
    """The log-probabilities of the responses under plain transformers, (B,)."""
    rows = data.batch
    output = module(
        input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], position_ids=rows["position_ids"]
    )
    logits = output.logits[:, cases.PROMPT - 1 : -1] / cases.TEMPERATURE
    log_probs = logits.log_softmax(-1).gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
    return torch.where(rows["response_mask"].bool(), log_probs, 0.0).sum(-1)


def updated(folder, data, **options) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    """Return the gradient that an update of plain descent takes, and its metrics."""
    module = Qwen2ForCausalLM.from_pretrained(folder)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    options = {
        "ppo_mini_batch_size": cases.ROWS,
        "dpo_beta": BETA,
        "grad_clip": 1e6,
        "use_remove_padding": True,
    } | options
    actor = SPINDataParallelPPOActor(SPINActorConfig(**options), module, torch.optim.SGD(module.parameters(), lr=1.0))
    metrics = actor.update_policy_dpo_with_ref(data)
    return {name: before[name] - parameter.detach() for name, parameter in module.named_parameters()}, metrics


CUTS = {
    "pairs together": {"ppo_micro_batch_size_per_gpu": 2},
    "pairs apart": {"ppo_micro_batch_size_per_gpu": 1},
    "by tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20},
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_update_is_the_gradient_of_the_loss(folder, cut):
    data = batch()
    module = Qwen2ForCausalLM.from_pretrained(folder)
    ratio = log_prob_sums(module, data) - (data.batch["ref_log_prob"] * data.batch["response_mask"]).sum(-1)
    side = data.batch[CHOSEN] * 2 - 1
    logits = (side * ratio).view(-1, 2).sum(-1)
    loss = compute_online_dpo_loss(logits, BETA).mean()
    loss.backward()
    gradient, metrics = updated(folder, data, **CUTS[cut])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=2e-5, rtol=1e-3, msg=name)
    assert metrics["actor/dpo_loss"] == [pytest.approx(loss.item(), rel=1e-4)]
    assert metrics["actor/dpo_logits"] == [pytest.approx(logits.mean().item(), rel=1e-4)]
    sums = log_prob_sums(module, data).detach()
    chosen = data.batch[CHOSEN].bool()
    assert metrics["actor/chosen_logps"] == [pytest.approx(sums[chosen].mean().item(), rel=1e-4)]
    assert metrics["actor/rejected_logps"] == [pytest.approx(sums[~chosen].mean().item(), rel=1e-4)]


@pytest.mark.parametrize("cut", CUTS)
def test_identical_pairs_have_no_gradient(folder, cut):
    tensors = {key: value[::2].repeat_interleave(2, 0) for key, value in batch().batch.items()}
    tensors[CHOSEN] = torch.tensor([1, 0] * 4)
    gradient, metrics = updated(folder, batch(**tensors), **CUTS[cut])
    largest = max(value.abs().max().item() for value in gradient.values())
    usual = max(value.abs().max().item() for value in updated(folder, batch(), **CUTS[cut])[0].values())
    assert largest < 1e-6 * max(1.0, usual) and usual > 1e-3
    assert metrics["actor/dpo_loss"] == [pytest.approx(math.log(2))]
    assert metrics["actor/dpo_logits"] == [0.0]
