"""Workers and worker groups, independent of the backend that runs the processes."""

from verl.single_controller.base.errors import (
    PlacementError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from verl.single_controller.base.phase import phase
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "PlacementError",
    "ResourcePool",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerTaskError",
    "WorkerTimeoutError",
    "phase",
]
