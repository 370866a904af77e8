"""Established path of ``DataParallelPPOActor``."""

from verl.workers.roles.own_actor import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
