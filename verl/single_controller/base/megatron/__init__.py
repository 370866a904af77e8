"""The worker of Megatron-Core roles."""

from verl.single_controller.base.megatron.worker import MegatronWorker

__all__ = ["MegatronWorker"]
