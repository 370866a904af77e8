"""Established names of the FSDP workers: the classes are those of ``verl.workers.roles`` for every strategy."""

from verl.workers.engine.fsdp.layout import create_device_mesh
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker", "create_device_mesh"]
