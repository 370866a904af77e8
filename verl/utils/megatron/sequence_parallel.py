"""Parameters and tokens under the sequence parallelism of Megatron-Core."""

from torch import Tensor


def mark_parameter_as_sequence_parallel(parameter: Tensor) -> None:
    """Have the gradient of a parameter summed over the ranks that share the tokens."""
    parameter.sequence_parallel = True  # type: ignore[attr-defined]


def is_sequence_parallel_param(param: Tensor) -> bool:
    """Whether a parameter is marked so."""
    return bool(getattr(param, "sequence_parallel", False))


def padded_to_multiple(length: int, size: int) -> int:
    """Return the smallest multiple of ``size`` that is not below ``length``."""
    return -(-length // size) * size


def pad_to_sequence_parallel(unpad_tokens: Tensor) -> Tensor:
    """Pad (T, ...) tokens with zeros so that the tensor-parallel ranks can share them."""
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    missing = padded_to_multiple(len(unpad_tokens), size) - len(unpad_tokens)
    if not missing:
        return unpad_tokens
    padded = unpad_tokens.new_zeros(len(unpad_tokens) + missing, *unpad_tokens.shape[1:])
    padded[: len(unpad_tokens)] = unpad_tokens
    return padded
