"""Established path of ``DataParallelPPOActor``."""

from verl.workers.roles.workerless import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
