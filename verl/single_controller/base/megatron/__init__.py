"""Workers that stand in a layout of Megatron-Core."""

from verl.single_controller.base.megatron.worker import MegatronWorker

__all__ = ["MegatronWorker"]
