"""The worker of a role on Megatron-Core."""

from types import ModuleType

from verl.single_controller.base.decorator import Dispatch, DistGlobalInfo, DistRankInfo, register
from verl.single_controller.base.worker import Worker


class MegatronWorker(Worker):
    """A worker that reports its place in the Megatron-Core layout, after ``init_model``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of the axes.

        Raises: RuntimeError before ``init_model``.
        """
        state = _parallel_state()
        return DistGlobalInfo(
            tp_size=state.get_tensor_model_parallel_world_size(),
            dp_size=state.get_data_parallel_world_size(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
            cp_size=state.get_context_parallel_world_size(),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return the place of this worker on each axis.

        Raises: RuntimeError before ``init_model``.
        """
        state = _parallel_state()
        return DistRankInfo(
            tp_rank=state.get_tensor_model_parallel_rank(),
            dp_rank=state.get_data_parallel_rank(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            cp_rank=state.get_context_parallel_rank(),
        )


def _parallel_state() -> ModuleType:
    from megatron.core import parallel_state

    state: ModuleType = parallel_state
    if not state.model_parallel_is_initialized():
        raise RuntimeError("this process has no Megatron-Core layout yet: call init_model first")
    return state
