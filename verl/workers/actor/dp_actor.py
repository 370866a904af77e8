"""Import path of ``DataParallelPPOActor`` in the established verl interface."""

from verl.workers.roles.own_actor import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
