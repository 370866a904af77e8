"""Import path of the established verl interface for helpers of sequence parallelism."""

from verl.compat.megatron_parallel import (
    is_sequence_parallel_param,
    mark_parameter_as_sequence_parallel,
    pad_to_sequence_parallel,
)

__all__ = ["is_sequence_parallel_param", "mark_parameter_as_sequence_parallel", "pad_to_sequence_parallel"]
