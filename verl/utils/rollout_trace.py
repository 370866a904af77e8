"""Import path of the established verl interface for ``verl.utils.observe.rollout_trace``."""

from verl.utils.observe.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

__all__ = ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"]
