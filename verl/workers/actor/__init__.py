"""Names of the established verl interface for the actor around a module that the caller has built."""

from verl.workers.roles.own_actor import BasePPOActor, DataParallelPPOActor

__all__ = ["BasePPOActor", "DataParallelPPOActor"]
