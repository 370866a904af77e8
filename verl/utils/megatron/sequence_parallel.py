"""Parameters and tokens under Megatron-Core's sequence parallelism."""

import torch
from torch import Tensor


def mark_parameter_as_sequence_parallel(parameter: Tensor) -> None:
    """Mark a parameter so that its gradient is summed over the ranks that share the tokens."""
    parameter.sequence_parallel = True  # type: ignore[attr-defined]


def is_sequence_parallel_param(param: Tensor) -> bool:
    """Whether a parameter has that mark."""
    return bool(getattr(param, "sequence_parallel", False))


def pad_to_sequence_parallel(unpad_tokens: Tensor) -> Tensor:
    """Pad (T, ...) tokens with zeros to a multiple of the tensor-parallel size."""
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    padding = unpad_tokens.new_zeros(-len(unpad_tokens) % size, *unpad_tokens.shape[1:])
    return torch.cat([unpad_tokens, padding])
