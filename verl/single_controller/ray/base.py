"""Import path of the established verl interface for ``verl.single_controller.ray``."""

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from verl.single_controller.ray import *  # noqa: F403
from verl.single_controller.ray import __all__ as _ray_names

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup", *_ray_names]
