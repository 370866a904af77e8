"""Path of the clients of servers in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.workers.rollout.llm_server")
