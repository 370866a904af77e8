"""Switch an existing transformers model to packed and sequence-parallel attention.

Works with transformers 5.16 to 5.19, whose models look up their attention in a registry, so no model code is replaced.
"""

from typing import TYPE_CHECKING

from verl.models.transformers.attention import VARLEN_ATTENTION, register_varlen_attention
from verl.models.transformers.dense_common import has_fused_head, install_fused_head
from verl.utils.kernel.linear_cross_entropy import backend_of
from verl.utils.ulysses import validate_ulysses_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply_monkey_patch(
    model: "PreTrainedModel",
    ulysses_sp_size: int = 1,
    use_remove_padding: bool = True,
    use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None,
) -> None:
    """Switch a model to packed attention, which supports sequence parallelism, and optionally to a fused head.

    With ``use_fused_kernels`` a forward with ``temperature=`` returns ``log_probs`` and ``entropy`` of each next token
    of ``input_ids``, (B, L). The backend is ``torch`` (the default), or ``triton`` on CUDA.

    Raises: ValueError if ``ulysses_sp_size`` does not divide the heads or is used with padding, or if the model's head
    cannot be fused.
    """
    text = model.config.get_text_config()
    validate_ulysses_config(text.num_attention_heads, ulysses_sp_size, getattr(text, "num_key_value_heads", None))
    if ulysses_sp_size > 1 and not use_remove_padding:
        raise ValueError(f"ulysses_sp_size={ulysses_sp_size} needs use_remove_padding=True")
    if use_remove_padding or ulysses_sp_size > 1:
        register_varlen_attention()
        model.set_attn_implementation(VARLEN_ATTENTION)
    if use_fused_kernels and not has_fused_head(model):
        backend = fused_kernels_backend or "torch"
        backend_of(backend, model.device)  # raises if it cannot run there
        install_fused_head(model, backend)
