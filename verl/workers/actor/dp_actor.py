"""Established path of ``DataParallelPPOActor``."""

from verl.workers.roles.given_modules import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
