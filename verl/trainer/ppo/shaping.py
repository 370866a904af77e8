"""Turn token-level scores into rewards and advantages.

Each formula is one plain function over whole columns. ``computed`` runs it in the driver, or on a worker if columns are
by reference (``trainer.lazy_columns``).
"""

import math
from typing import TypedDict

import torch

from verl.algos.advantage import compute_pf_ppo_reweight_data, estimate_advantages
from verl.algos.config import AlgoConfig
from verl.algos.kl import KLController
from verl.algos.kl import kl_penalty as compute_kl
from verl.algos.mismatch import compute_rollout_importance_weights
from verl.algos.names import AdvantageEstimator
from verl.base_config import Tree
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import Workers, computed, is_lazy
from verl.trainer.ppo.segments import Joined

VETOED = "__vetoed__"
"""Array (B,) of a batch by reference: whether a token vetoes the response."""


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the (B, R) columns of the attention mask that belong to the response."""
    tensors = tensors_of(data)
    width = tensors["responses"].shape[1]
    return tensors["attention_mask"][:, -width:]


class Reader(TypedDict, total=False):
    """The workers that read columns by reference, as an argument of the functions below."""

    group: Workers


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl", group: Workers | None = None
) -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL to the reference policy from the scores and adapt its coefficient.

    Adds ``token_level_rewards`` (B, R). A worker of ``group`` reads columns by reference. Returns: the batch, and
    metrics of the penalty and of the coefficient used.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    beta = kl_ctrl.value
    columns = ["token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"]
    found = tensors_of(computed(_rewards_after_kl, data, columns, group=group, kind=kl_penalty, beta=beta))
    tensors_of(data)["token_level_rewards"] = found["token_level_rewards"]
    kl = found["kl"]
    tokens = found["tokens"]
    if whole := Joined.of(data):
        kl, tokens = (whole.total(each) for each in (kl, tokens))
    used = tokens > 0  # rows without a token only fill the batch
    current = (kl[used] / tokens[used]).mean().item() if used.any() else 0.0
    kl_ctrl.update(current_kl=current, n_steps=int(used.sum()))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def _rewards_after_kl(data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    kl = compute_kl(tensors["old_log_probs"], tensors["ref_log_prob"], data.meta_info["kind"])
    kl = torch.where(mask.bool(), kl, 0.0)  # padding may hold any number, also infinity
    rewards = tensors["token_level_scores"] - data.meta_info["beta"] * kl
    return DataProto.from_dict({"token_level_rewards": rewards, "kl": kl.sum(-1), "tokens": mask.sum(-1)})


def add_rollout_weights(
    batch: DataProto, algorithm: AlgoConfig, group: Workers | None = None
) -> tuple[DataProto, dict[str, float]]:
    """Return the batch, with importance weights if the loss uses them, and metrics of the mismatch of the rollout.

    Both need ``algorithm.rollout_is_threshold``. A worker of ``group`` reads columns by reference.

    Raises: ValueError when the loss uses them and the rollout returned no log-probabilities.
    """
    if algorithm.rollout_is_threshold is None:
        return batch, {}
    tensors = tensors_of(batch)
    if "rollout_log_probs" not in tensors.keys():
        if algorithm.rollout_is:
            raise WrongInput(
                "algorithm.rollout_is=true: the rollout returned no rollout_log_probs, which importance weights need; "
                "set actor_rollout_ref.rollout.calculate_log_probs=true, or algorithm.rollout_is=false"
            )
        return batch, {}
    columns = ["old_log_probs", "rollout_log_probs", "response_mask", *Joined.tensors(batch)]
    found = computed(_rollout_weights, batch, columns, Joined.ARRAYS, group, algorithm=algorithm)
    if is_lazy(batch):
        batch.non_tensor_batch[VETOED] = tensors_of(found)[VETOED].numpy()
    if algorithm.rollout_is:
        tensors["rollout_is_weights"] = tensors_of(found)["rollout_is_weights"]
    return batch, found.meta_info["metrics"]


def _rollout_weights(data: DataProto) -> DataProto:
    """Return the weights (B, R) and the vetoed rows (B,), and ``metrics``."""
    algorithm = data.meta_info["algorithm"]
    tensors = tensors_of(data)
    whole = Joined.of(data)
    columns = [tensors[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask")]
    old_log_probs, rollout_log_probs, mask = columns if whole is None else map(whole.join, columns)
    weights, metrics = compute_rollout_importance_weights(
        old_log_prob=old_log_probs,
        rollout_log_prob=rollout_log_probs,
        response_mask=mask,
        rollout_is_level=algorithm.rollout_is_level,
        rollout_is_mode=algorithm.rollout_is_mode,
        rollout_is_threshold=algorithm.rollout_is_threshold,
        rollout_is_threshold_lower=algorithm.rollout_is_threshold_lower,
        rollout_is_veto_threshold=algorithm.rollout_is_veto_threshold,
    )
    assert weights is not None
    values = tensors_of(weights)["rollout_is_weights"]
    found = {
        "rollout_is_weights": values if whole is None else whole.split(values),
        VETOED: vetoed_rows(data, algorithm.rollout_is_veto_threshold),
    }
    return DataProto.from_dict(found, meta_info={"metrics": metrics})


def vetoed_rows(batch: DataProto, threshold: float | None) -> torch.Tensor:
    """Return the responses with a token whose ratio of trainer to rollout is below the veto threshold, (B,) bool."""
    if threshold is not None and VETOED in batch.non_tensor_batch:
        return torch.from_numpy(batch.non_tensor_batch[VETOED].astype(bool))
    tensors = tensors_of(batch)
    if threshold is None or not {"old_log_probs", "rollout_log_probs"} <= set(tensors.keys()):
        return torch.zeros(len(batch), dtype=torch.bool)
    gap = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    below: torch.Tensor = (gap < math.log(threshold)) & tensors["response_mask"].bool()
    return below.any(-1)


def with_rollout_log_probs(batch: DataProto) -> DataProto:
    """Return the batch with the log-probabilities of the rollout as ``old_log_probs`` (B, R).

    Raises: WrongInput when the rollout returned none.
    """
    tensors = tensors_of(batch)
    if "rollout_log_probs" not in tensors.keys():
        raise WrongInput(
            "actor_rollout_ref.actor.use_rollout_log_probs=true: the rollout returned no rollout_log_probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    tensors["old_log_probs"] = tensors["rollout_log_probs"].clone()
    return batch


def compute_advantage(
    data: DataProto,
    adv_estimator: str | AdvantageEstimator,
    gamma: float | None = None,
    lam: float | None = None,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Tree | None = None,
    generator: torch.Generator | None = None,
    group: Workers | None = None,
) -> DataProto:
    """Add ``advantages`` and ``returns`` (B, R) by a registered estimator.

    The estimator gets the values that it has parameters for, see ``verl.algos.advantage``. A trajectory of several rows
    is one long row to it, so each counts once, and values and rewards of its segments follow each other.

    Args:
        gamma: discount; None takes the config's, else 1. The same for ``lam``.
        num_repeat: samples per prompt; accepted and not read, because ``uid`` tells the groups apart.
        norm_adv_by_std_in_grpo: divide by the deviation of the group, unless the config says no.
        generator: source of PF-PPO's draw of rows.
        group: workers of which one reads columns by reference.
    Raises: ValueError for an unknown estimator, and when the batch lacks a column that the estimator needs.
    """
    batch = tensors_of(data)
    if "response_mask" not in batch.keys():
        batch["response_mask"] = compute_response_mask(data)
    discounts = {name: value for name, value in (("gamma", gamma), ("lam", lam)) if value is not None}
    columns = ["token_level_rewards", "response_mask", "values", "reward_baselines", *Joined.tensors(data)]
    arrays = ["uid", *Joined.ARRAYS]
    found = computed(
        _advantages,
        data,
        columns,
        arrays,
        group,
        estimator=adv_estimator,
        config=config,
        by_std=norm_adv_by_std_in_grpo,
        discounts=discounts,
    )
    batch["advantages"], batch["returns"] = (tensors_of(found)[name] for name in ("advantages", "returns"))
    if adv_estimator == AdvantageEstimator.GAE and config is not None and config.get("use_pf_ppo"):
        options = AlgoConfig().pf_ppo | dict(config.get("pf_ppo") or {})
        data = compute_pf_ppo_reweight_data(data, options["reweight_method"], options["weight_pow"], generator)
    return data


def _advantages(data: DataProto) -> DataProto:
    batch = tensors_of(data)
    options = data.meta_info
    columns = {name: batch[name] for name in ("values", "reward_baselines") if name in batch.keys()}
    groups = {"index": data.non_tensor_batch["uid"]} if "uid" in data.non_tensor_batch else {}
    rewards = batch["token_level_rewards"]
    mask = batch["response_mask"]
    whole = Joined.of(data)
    if whole is not None:
        rewards = whole.rewards(rewards)
        mask = whole.join(mask)
        columns = {name: whole.join(each) if each.dim() == 2 else each[whole.last] for name, each in columns.items()}
        groups = {name: uids[whole.last.numpy()] for name, uids in groups.items()}
    advantages, returns = estimate_advantages(
        options["estimator"],
        token_level_rewards=rewards,
        response_mask=mask,
        config=options["config"],
        norm_adv_by_std_in_grpo=options["by_std"],
        **columns,
        **groups,
        **options["discounts"],
    )
    if whole is not None:
        advantages = whole.split(advantages)
        returns = whole.split(returns)
    return DataProto.from_dict({"advantages": advantages, "returns": returns})
