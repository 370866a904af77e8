"""An estimator and a loss, registered where they are imported."""

from collections import defaultdict

import torch

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.utils import torch_functional as verl_F


@register_adv_est("letters_mean")
def compute_letters_advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    """Subtract the mean of the prompt's samples, and add the bonus that the configuration gives."""
    scores = token_level_rewards.sum(dim=-1)
    samples = defaultdict(list)
    for row, uid in enumerate(index):
        samples[uid].append(scores[row])
    means = {uid: torch.stack(values).mean() for uid, values in samples.items()}
    bonus = 0.0 if config is None else config.get("letters_bonus", 0.0)
    with torch.no_grad():
        advantages = torch.stack([scores[row] - means[uid] + bonus for row, uid in enumerate(index)])
        advantages = advantages.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("letters_clip")
def compute_letters_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """Clip the ratio on both sides, like PPO, and never below by the dual."""
    assert config is not None
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    log_ratio = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    losses = torch.maximum(plain, clipped)
    fraction = verl_F.masked_mean((clipped > plain).float(), response_mask)
    kl = verl_F.masked_mean(-log_ratio, response_mask)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return loss, fraction, kl, torch.tensor(0.0)
