"""PRIME's formulas against values computed by hand or by plain loops, and against a model of transformers."""

import math

import numpy as np
import pytest
import torch

from recipe.prime import prime_core_algos as algos
from recipe.prime.prime_fsdp_workers import REFERENCE, ROW, reward_model_loss
from verl.base_config import WrongInput
from verl.protocol import DataProto

INDEX = np.array(["a", "b", "a", "b", "a", "b"], dtype=object)  # in no order, as a balanced batch has them


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(*lengths, width=5):
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()


def test_rewards_of_tokens_are_scaled_log_ratios():
    ratio = torch.tensor([[1.0, -2.0, 4.0], [3.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    token = algos.token_rewards(ratio, mask, 0.5, "token")
    assert token.tolist() == [[0.5, -1.0, 2.0], [1.5, 0.0, 0.0]]
    assert algos.token_rewards(ratio, mask, 0.5, "whole").tolist() == [[0.0, 0.0, 1.5], [1.5, 0.0, 0.0]]
    assert algos.largest_rest(token) == 2.0  # of 1.5, 1.0, 2.0 and 1.5
    assert algos.largest_rest(-token) == 2.0


def test_the_last_token_is_found_under_any_mask():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert algos.at_last(torch.tensor([2.0, 3.0, 4.0]), mask).tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 0]]


def test_cross_entropy_by_hand():
    ratio = torch.tensor([[2.0, 1.0, 7.0], [-4.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    losses = algos.compute_ce_loss(ratio, torch.tensor([1.0, 0.0]), mask, 0.1)
    right, wrong = 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.4))
    assert losses.tolist() == pytest.approx([-math.log(right), -math.log(1 - wrong)])


@pytest.mark.parametrize("loss_type", ["dpo", "bon_acc", "bon_rm"])
def test_pair_losses_against_loops(loss_type):
    reward, outcome = draw(6), torch.tensor([1.0, 0, 0, 0, 1, 0])
    found = algos.find_rivals(reward, outcome, INDEX, loss_type)
    ratio, mask = draw(6, 5, seed=1), mask_of(5, 4, 3, 2, 1, 5)
    losses = algos.compute_dpo_loss(ratio, mask, 0.3, found)
    for i in range(6):
        group = [j for j in range(6) if INDEX[j] == INDEX[i]]
        others = [j for j in group if (outcome[j] < outcome[i] if outcome[i] > 0 else outcome[j] > outcome[i])]
        rival = sum(reward[j].item() for j in others) / len(others) if others else 0.0
        margin = (0.3 * (ratio[i] * mask[i]).sum().item() - rival) * (1 if outcome[i] > 0 else -1)
        ranked = {"dpo": None, "bon_acc": outcome, "bon_rm": reward}[loss_type]
        weight = 1.0
        if ranked is not None:
            weight = 3 * (sum(ranked[j].item() <= ranked[i].item() for j in group) / 3) ** 2
        assert losses[i].item() == pytest.approx(math.log(1 + math.exp(-margin)) * weight, rel=1e-5)


def test_accuracy_counts_pairs_of_a_prompt():
    outcome = torch.tensor([1.0, 0, 0, 0, 1, 0])
    reward = torch.tensor([3.0, 9, 2, 8, 1, 7])  # a: 3 and 1 are right, 2 is wrong; b has no right one
    assert algos.compute_dpo_accuracy(reward, outcome, INDEX) == 0.5
    assert algos.compute_dpo_accuracy(reward + torch.tensor([0, 0, 0, 0, 5.0, 0]), outcome, INDEX) == 1.0
    assert algos.compute_dpo_accuracy(reward, torch.ones(6), INDEX) == 0.5
    assert algos.compute_dpo_abs_accuracy(torch.tensor([1.0, -1, 2]), torch.tensor([1.0, 0, 0])) == pytest.approx(2 / 3)


def test_advantages_against_the_plain_formula_over_blocks():
    """Two streams over consecutive blocks of three samples, in loops."""
    index = np.repeat(np.array(["a", "b"], dtype=object), 3)
    mask = mask_of(5, 4, 3, 2, 1, 5)
    scores, outcome, n = draw(6, 5), torch.tensor([1.0, 0, 1, 0, 0, 1]), 3
    last = torch.zeros(6, 5)
    for row, length in enumerate(mask.sum(-1)):
        last[row, length - 1] = 1
    streams = [(2.0 * scores, mask), (5.0 * outcome.unsqueeze(-1) * last, last)]
    expected = torch.zeros(6, 5)
    for rewards, marked in streams:
        for start in (0, 3):
            means = [rewards[i][marked[i].bool()].mean() for i in range(start, start + 3)]
            for i in range(start, start + 3):
                rest = rewards[i] * n / (n - 1) - sum(means) / (n - 1)
                expected[i] += torch.where(marked[i].bool(), rest, 0.0)
    returns = torch.stack([(expected * mask)[:, at:].sum(-1) for at in range(5)], -1)
    values = returns[mask.bool()]
    advantages = (returns - values.mean()) / (values.var() + 1e-8).sqrt() * mask
    got = algos.compute_rloo_advantage_return(streams, mask, index)
    torch.testing.assert_close(got, (advantages, returns))


def test_advantages_do_not_depend_on_the_order_of_rows_nor_on_a_constant():
    mask, scores, order = mask_of(5, 4, 3, 2, 1, 5), draw(6, 5), torch.tensor([3, 1, 5, 0, 2, 4])
    whole = algos.compute_rloo_advantage_return([(scores, mask)], mask, INDEX)[0]
    moved = algos.compute_rloo_advantage_return([(scores[order], mask[order])], mask[order], INDEX[order.numpy()])[0]
    torch.testing.assert_close(moved, whole[order])
    outcome, last = draw(6), algos.last_tokens(mask)
    base = algos.compute_rloo_advantage_return([(algos.at_last(outcome, mask), last)], mask, INDEX)
    more = algos.compute_rloo_advantage_return([(algos.at_last(outcome + 7, mask), last)], mask, INDEX)
    torch.testing.assert_close(more, base, atol=1e-5, rtol=1e-5)


def test_a_single_sample_has_no_baseline():
    alone = np.array(["a", "b"], dtype=object)
    assert algos.masked_rloo(torch.tensor([[2.0, 4.0], [1.0, 9.0]]), mask_of(2, 1, width=2), alone).tolist() == [
        [2, 4],
        [1, 0],
    ]


def test_prompts_of_medium_accuracy_come_first():
    outcomes = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    lengths = torch.tensor([[1, 2], [3, 8], [1, 1], [4, 5]])
    whole = algos.PromptFilter()
    assert whole.preferred(outcomes, lengths).tolist() == [True] * 4
    assert algos.PromptFilter(0.2, 0.8).preferred(outcomes, lengths).tolist() == [False, True, False, True]
    assert algos.PromptFilter(0.0, 0.5).preferred(outcomes, lengths).tolist() == [True, True, False, True]
    preferred = algos.PromptFilter(0.2, 0.8, 8).preferred(outcomes, lengths)
    assert preferred.tolist() == [False, False, False, True]
    assert algos.preferred_first(preferred, 3).tolist() == [3, 0, 1]


@pytest.mark.parametrize("loss_type", ["ce", "dpo"])
def test_the_loss_of_a_micro_batch_collects_its_log_ratio(loss_type):
    mask = mask_of(5, 2)
    rows = {"response_mask": mask, REFERENCE: draw(2, 5), ROW: torch.tensor([3, 1]), "acc": torch.tensor([1.0, 0.0])}
    rows |= {"rm_rival": torch.tensor([0.2, 0.1]), "rm_side": torch.tensor([1.0, -1]), "rm_weight": torch.ones(2)}
    log_probs = draw(2, 5, seed=2).requires_grad_()
    collected = torch.zeros(4, 5)
    terms, metrics = reward_model_loss(loss_type, 0.5, collected, {"log_probs": log_probs}, DataProto.from_dict(rows))
    ratio = (log_probs - rows[REFERENCE]).detach()
    assert torch.equal(collected, torch.stack([torch.zeros(5), ratio[1], torch.zeros(5), ratio[0]]))
    margin = 0.5 * (ratio * mask).sum(-1)
    if loss_type == "dpo":
        margin = margin - rows["rm_rival"]
    expected = -torch.nn.functional.logsigmoid(margin * torch.tensor([1.0, -1.0])).sum()
    torch.testing.assert_close(terms[0].total, expected)
    assert terms[0].unit == "sequence" and metrics["reward_model/dpo_loss"] is terms[0]
    terms[0].total.backward()
    assert ((log_probs.grad != 0) == mask.bool()).all()


def test_outcomes_that_cross_entropy_cannot_learn_are_named():
    with pytest.raises(WrongInput, match="returned -1: return a score between 0 and 1"):
        algos.checked_outcome(torch.tensor([1.0, -1.0]), "ce")
    assert algos.checked_outcome(torch.tensor([1.0, -1.0]), "dpo").tolist() == [1, -1]
