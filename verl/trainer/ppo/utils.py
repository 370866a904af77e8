"""Roles of a run, and which of them a configuration needs."""

import logging
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from omegaconf import DictConfig

from verl.trainer.config.run_config import needs_critic

if TYPE_CHECKING:
    from ray.actor import ActorClass

    from verl.single_controller.base import Worker

T = TypeVar("T")
WorkerType = type["Worker"]
WorkerClass: TypeAlias = "type[Worker] | ActorClass[Worker]"
"""A class of workers, or the Ray actor class of one."""

logger = logging.getLogger(__name__)
_say_once = cache(logger.info)


class Role(Enum):
    """The job of a worker."""

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
        roles = {known: role for role, known in _NAMES.items()}
        if name.lower() not in roles:
            raise ValueError(f"there is no role {name!r}; choose one of {sorted(roles)}")
        return roles[name.lower()]


_NAMES: dict[Role, str] = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}


def need_reference_policy(role_worker_mapping: Mapping[Role, T]) -> bool:
    """Whether a reference policy is among the workers."""
    return Role.RefPolicy in role_worker_mapping


def need_reward_model(role_worker_mapping: Mapping[Role, T]) -> bool:
    """Whether a reward model is among the workers."""
    return Role.RewardModel in role_worker_mapping


def need_critic(config: DictConfig) -> bool:
    """Whether a critic is trained: ``critic.enable``, or if that is null whether the estimator is GAE."""
    estimator = str(config.algorithm.adv_estimator)
    is_needed = needs_critic(config.critic.enable, estimator)
    if config.critic.enable is None and not is_needed:
        reason = f"algorithm.adv_estimator={estimator} does not need one"
        _say_once("no critic: %s; set critic.enable=true to train one anyway", reason)
    return is_needed
