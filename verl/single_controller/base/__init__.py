"""Workers and worker groups, independent of the backend that runs the processes."""

from verl.single_controller.base.driver_phase import phase as phase
from verl.single_controller.base.worker import Worker as Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs as ClassWithInitArgs
from verl.single_controller.base.worker_group import ResourcePool as ResourcePool
from verl.single_controller.base.worker_group import WorkerGroup as WorkerGroup
