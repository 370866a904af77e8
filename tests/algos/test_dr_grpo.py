"""Dr. GRPO by its keys: the gradient is the paper's, without the weights by length and by deviation of GRPO."""

from pathlib import Path

import pytest
import torch

from verl.algos.advantage import estimate_advantages
from verl.protocol import DataProto
from verl.workers.config import FSDPActorConfig
from verl.workers.roles.losses import ppo_loss

LIMIT = 6  # the configured response length, which no response of the batch reaches
LENGTHS, SCORES, INDEX = [1, 4, 2, 3], [1.0, 0.0, 1.0, 1.0], list("aabb")


def gradient(norm_by_std: bool, loss_agg_mode: str, micro_batch_size: int = 4) -> torch.Tensor:
    """Return the gradient of the loss of one on-policy update by the logits (B, T, V) of a table of policies."""
    width, generator = max(LENGTHS), torch.Generator().manual_seed(0)
    logits = torch.randn(4, width, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (4, width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(LENGTHS).unsqueeze(-1)).long()
    rewards = torch.zeros(4, width, dtype=torch.float64)
    rewards[torch.arange(4), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES, dtype=torch.float64)
    advantages, _ = estimate_advantages(
        "grpo", token_level_rewards=rewards, response_mask=mask, index=INDEX, norm_adv_by_std_in_grpo=norm_by_std
    )
    config = FSDPActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=LIMIT,
        use_kl_loss=False,
        rollout_n=2,
    )
    log_probs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    totals, units = [], []
    for rows in torch.arange(4).split(micro_batch_size):
        data = DataProto.from_dict(
            {"response_mask": mask[rows], "advantages": advantages[rows], "old_log_probs": log_probs[rows].detach()}
        )
        (part, *others), _ = ppo_loss(config, {"log_probs": log_probs[rows]}, data)
        assert not others
        totals.append(part.total)
        units.append(part.unit)
    assert set(units) == {"sequence"}
    (result,) = torch.autograd.grad(sum(totals) / 4, logits)
    return result


def paper() -> torch.Tensor:
    """Return the mean over responses of ``-1 / LIMIT`` times the sum over tokens of (score - mean) grad log pi."""
    width, generator = max(LENGTHS), torch.Generator().manual_seed(0)
    logits = torch.randn(4, width, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (4, width), generator=generator)
    result = torch.zeros_like(logits)
    for b in range(4):
        peers = [SCORES[i] for i in range(4) if INDEX[i] == INDEX[b]]
        for t in range(LENGTHS[b]):
            of_log_prob = -logits[b, t].softmax(-1)
            of_log_prob[tokens[b, t]] += 1
            result[b, t] = -(SCORES[b] - sum(peers) / len(peers)) * of_log_prob / LIMIT / 4
    return result


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_gradient_is_that_of_the_paper(micro_batch_size):
    got = gradient(norm_by_std=False, loss_agg_mode="seq-mean-token-sum-norm", micro_batch_size=micro_batch_size)
    torch.testing.assert_close(got, paper(), atol=1e-12, rtol=1e-12)


def test_grpo_weighs_by_length_and_deviation():
    """What the two keys take out: a factor for each response in GRPO's gradient, here against Dr. GRPO's."""
    grpo = gradient(norm_by_std=True, loss_agg_mode="seq-mean-token-mean")
    ratio = grpo.abs().sum((1, 2)) / paper().abs().sum((1, 2))
    deviation = 0.5**0.5 + 1e-6  # of scores 1 and 0; the other group has equal scores and no gradient
    want = [LIMIT / (length * deviation) for length in LENGTHS[:2]]
    assert ratio[:2].tolist() == pytest.approx(want)
    assert paper()[2:].eq(0).all()


def test_the_example_sets_both_keys():
    root = Path(__file__).parents[2] / "examples" / "dr_grpo_trainer"
    (script,) = root.glob("*.sh")
    text = script.read_text()
    base = root.parent / "grpo_trainer" / "run_qwen2.5-0.5b_gsm8k.sh"
    assert f"../{base.parent.name}/{base.name}" in text and "adv_estimator=grpo" in base.read_text()
    for word in ("norm_adv_by_std_in_grpo=false", "loss_agg_mode=seq-mean-token-sum-norm"):
        assert word in text
    assert "use_kl_loss=false" in text  # the paper has no KL term
