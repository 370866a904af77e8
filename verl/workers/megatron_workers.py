"""The Megatron-Core workers of the established verl interface: the roles, which also know their place in its layout."""

from verl.single_controller.base.megatron import MegatronWorker
from verl.workers import roles

__all__ = ["ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "MegatronWorker", "RewardModelWorker"]


class ActorRolloutRefWorker(MegatronWorker, roles.ActorRolloutRefWorker):
    """Actor, rollout and reference; see ``verl.workers.roles``."""


class AsyncActorRolloutRefWorker(MegatronWorker, roles.AsyncActorRolloutRefWorker):
    """Actor and reference, with a rollout that serves; see ``verl.workers.roles``."""


class CriticWorker(MegatronWorker, roles.CriticWorker):
    """The critic; see ``verl.workers.roles``."""


class RewardModelWorker(MegatronWorker, roles.RewardModelWorker):
    """The reward model; see ``verl.workers.roles``."""
