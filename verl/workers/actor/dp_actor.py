"""Established path of ``DataParallelPPOActor``."""

from verl.workers.roles.dp_actor import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
