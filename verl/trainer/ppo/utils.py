"""Roles of a run, and which of them a configuration needs."""

import logging
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.single_controller.base import Worker

    WorkerType = type[Worker]
else:
    WorkerType = type

logger = logging.getLogger(__name__)


class Role(Enum):
    """What a worker does."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6

    def __str__(self) -> str:
        return _NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> "Role":
        """Return the role of a name such as ``actor_rollout``, in any case.

        Raises: ValueError for an unknown name.
        """
        for role, known in _NAMES.items():
            if known == name.lower():
                return role
        raise ValueError(f"there is no role {name!r}; choose of {sorted(_NAMES.values())}")


_NAMES: dict[Role, str] = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}


def need_reference_policy(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Whether a reference policy is among the workers."""
    return Role.RefPolicy in role_worker_mapping


def need_reward_model(role_worker_mapping: Mapping[Role, Any]) -> bool:
    """Whether a reward model is among the workers."""
    return Role.RewardModel in role_worker_mapping


def need_critic(config: Any) -> bool:
    """Whether a critic is trained: ``critic.enable``, or where that is null whether the estimator is GAE."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    if config.algorithm.adv_estimator == "gae":
        return True
    _tell_no_critic(str(config.algorithm.adv_estimator))
    return False


@cache
def _tell_no_critic(adv_estimator: str) -> None:
    logger.info(
        "no critic: algorithm.adv_estimator=%s does not need one; set critic.enable=true to train one all the same",
        adv_estimator,
    )


def reference_is_in_actor(config: Any) -> bool:
    """Whether the workers of the actor hold the reference: the base of its adapters, or a model that the full KL
    compares with.
    """
    return bool(config.actor_rollout_ref.model.get("lora_rank", 0) > 0 or needs_full_kl(config))


def needs_full_kl(config: Any) -> bool:
    """Whether the loss compares the whole distributions of actor and reference."""
    actor = config.actor_rollout_ref.actor
    return bool(actor.use_kl_loss and actor.kl_loss_type == "full")


def config_needs_reference(config: Any) -> bool:
    """Whether a configuration asks for a reference policy: KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)
