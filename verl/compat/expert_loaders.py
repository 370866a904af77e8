"""Loaders for the stacked weights of experts in models of vLLM."""

from torch import nn


def patch_vllm_moe_model_weight_loader(model: nn.Module) -> None:
    """Give stacked expert weights that lack a ``weight_loader`` the loader of their layer.

    Versions: 0.8.2 and later, for forks that load weights into vLLM by themselves: a parameter that was replaced, as by
    quantization or offloading, has lost its ``weight_loader``, and ``load_weights`` then copies an expert over all of
    them or fails. Remove when ``load_weights`` takes the loader from the layer.
    """
    for module in model.modules():
        loader = getattr(module, "weight_loader", None)
        for name, parameter in module.named_parameters(recurse=False) if callable(loader) else ():
            if name.startswith(_STACKED) and not hasattr(parameter, "weight_loader"):
                parameter.weight_loader = loader  # type: ignore[attr-defined]


_STACKED = ("w13_weight", "w2_weight")
