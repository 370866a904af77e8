"""The workers: one class per role, for all backends."""

from verl.workers.roles.actor import ActorWorker
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.async_rollout import AsyncActorRolloutRefWorker
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "ActorWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
