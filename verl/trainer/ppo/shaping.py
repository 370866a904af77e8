"""From token-level scores to rewards and advantages, on the driver's batch."""

from typing import Any

import torch

from verl.algos.kl import kl_penalty as compute_kl
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.utils.torch_functional import masked_mean


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the (B, R) columns of the attention mask that belong to the response."""
    width = data.batch["responses"].size(1)
    mask: torch.Tensor = data.batch["attention_mask"][:, -width:]
    return mask


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL to the reference policy from the scores and adapt its coefficient.

    Adds ``token_level_rewards`` (B, R). Returns: the batch, and the penalty and the coefficient that was used.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    mask = data.batch["response_mask"]
    kl = compute_kl(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    kl = torch.where(mask.bool(), kl, 0.0)  # what lies outside may be anything, infinite too
    beta = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - beta * kl
    current = masked_mean(kl, mask=mask, axis=-1).mean().item()
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str | AdvantageEstimator,
    gamma: float | None = None,
    lam: float | None = None,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    generator: torch.Generator | None = None,
) -> DataProto:
    """Add ``advantages`` and ``returns`` (B, R) by the registered estimator of a name.

    The estimator gets what it has parameters for: see ``verl.algos.advantage``. ``gamma`` and ``lam`` default to the
    config's, else to 1; the deviation of a group divides unless the argument or the config says no. ``num_repeat`` is
    accepted for callers that pass the samples per prompt; groups are told by ``uid``. The generator is that of
    PF-PPO's draw of rows.

    Raises: ValueError for an unknown estimator, and for one that needs what the batch does not have.
    """
    batch = data.batch
    if "response_mask" not in batch.keys():
        batch["response_mask"] = compute_response_mask(data)
    columns = {name: batch[name] for name in ("values", "reward_baselines") if name in batch.keys()}
    if "uid" in data.non_tensor_batch:
        columns["index"] = data.non_tensor_batch["uid"]
    discounts = {name: value for name, value in (("gamma", gamma), ("lam", lam)) if value is not None}
    batch["advantages"], batch["returns"] = core_algos.estimate_advantages(
        adv_estimator,
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        config=config,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        **columns,
        **discounts,
    )
    if adv_estimator == AdvantageEstimator.GAE and config is not None and config.get("use_pf_ppo", False):
        options = config.get("pf_ppo") or {}
        data = core_algos.compute_pf_ppo_reweight_data(
            data, options.get("reweight_method", "pow"), options.get("weight_pow", 2.0), generator
        )
    return data
