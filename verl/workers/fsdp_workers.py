"""Established names of the FSDP workers: the classes are those of ``verl.workers.roles`` for every strategy."""

from verl.workers.roles import ActorRolloutRefWorker, CriticWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker"]
