"""Rules of the fused head."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.refusals import select


def fused_rules(tree: Mapping[str, Any], model: str) -> Iterator[Violation]:
    """Yield a backend that cannot run on these workers, and adapters of a head that is fused.

    Args: ``model`` is the key of the model node.
    """
    if not select(tree, f"{model}.use_fused_kernels", False):
        return
    key = f"{model}.fused_kernel_options.impl_backend"
    if select(tree, key) == "triton":
        device = select(tree, "trainer.device")
        if device in ("cpu", "npu"):
            yield Violation(key, "triton", f"needs CUDA: write torch with trainer.device={device}")
        elif importlib.util.find_spec("triton") is None:
            yield Violation(
                key, "triton", "needs the package triton, which is not installed: install it or write torch"
            )
    targets = select(tree, f"{model}.target_modules")
    if select(tree, f"{model}.lora_rank", 0) and isinstance(targets, list) and "lm_head" in targets:
        expected = "must not name the head with use_fused_kernels=true: leave lm_head out, or write it false"
        yield Violation(f"{model}.target_modules", targets, expected)


def fused_role_rules(shared: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield a switch of the actor that says otherwise than that of the model, and a loss that needs logits.

    Args: ``shared`` is the node ``actor_rollout_ref``.
    """
    actor, fused = shared["actor"], bool(shared["model"].get("use_fused_kernels", False))
    key = "actor_rollout_ref.actor"
    if actor.get("use_fused_kernels", fused) != fused:
        expected = "follows actor_rollout_ref.model.use_fused_kernels: set that one"
        yield Violation(f"{key}.use_fused_kernels", not fused, expected)
    elif fused and actor["use_kl_loss"] and actor["kl_loss_type"] == "full":
        expected = "needs logits, which a fused head does not make: write low_var_kl, or use_fused_kernels=false"
        yield Violation(f"{key}.kl_loss_type", "full", expected)
