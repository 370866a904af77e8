"""Let liger-kernel compute norms, rotary positions and MLPs of a transformers model (``use_liger``).

Its fused loss stays out: engines score tokens themselves, or with ``use_fused_kernels``.
"""

from typing import TYPE_CHECKING

from verl.errors import WrongInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install_liger(model: "PreTrainedModel") -> None:
    """Replace the layers of a model by liger-kernel's.

    liger-kernel also replaces functions and classes of the family, so later models of this process may have them too.

    Raises: WrongInput without the package, or if it has nothing for the family of the model.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError:
        raise WrongInput("model.use_liger=True needs the package liger-kernel: install it or write False") from None
    family = model.config.model_type
    try:
        if family not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:  # liger-kernel would only log it
            raise TypeError(f"it knows {', '.join(sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN))}")
        monkey_patch._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    except TypeError as error:
        raise WrongInput(
            f"model.use_liger=True: liger-kernel has nothing for {type(model).__name__} of model_type={family!r}: "
            f"write False ({error})"
        ) from error
