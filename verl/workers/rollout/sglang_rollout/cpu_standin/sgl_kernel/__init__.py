"""Stand-in for SGLang's kernel package on a CPU that has no build of it; it computes nothing.

Versions: SGLang 0.5.20 to 0.5.23. On a CPU, SGLang imports the nine functions below when its modules load. They serve
speculative decoding, and one of them copies keys and values between tiers of a cache; an engine that samples token by
token calls none of them, and computes everything with torch. The module that prepares images for all of Qwen's models
also looks up four operators, which only Qwen3.5 calls. Remove when SGLang imports them where it needs them.

``torch.ops.sgl_kernel.convert_weight_packed`` must stay absent: SGLang takes it as the sign that all CPU kernels are
there.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

IS_STAND_IN = True

if torch.cuda.is_available():
    raise ImportError("the stand-in for sgl_kernel is for CPUs only, and CUDA is present: pip install sglang-kernel")


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this kernel of SGLang is not installed, and its stand-in computes nothing: switch off "
            "speculative decoding and the hierarchical cache in actor_rollout_ref.rollout.engine_kwargs.sglang, or "
            "take a model that needs no kernels"
        )

    kernel.__name__ = name
    return kernel


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")

OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
for _name in OPERATORS:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, _absent(_name))
