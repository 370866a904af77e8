"""Established path of ``RolloutTraceConfig``."""

from verl.utils.observe.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

__all__ = ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"]
