"""Import path of the established verl interface for helpers of pipeline schedules."""

from verl.compat.megatron_parallel import compute_transformers_input_shapes, make_batch_generator

__all__ = ["compute_transformers_input_shapes", "make_batch_generator"]
