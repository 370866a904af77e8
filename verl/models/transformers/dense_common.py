"""Let a transformers model's head score tokens instead of returning logits (``use_fused_kernels``).

It works for any causal model with a plain linear head, optionally followed by a scale or a soft cap. These are measured
by running the model's own forward with known hidden states and logits. Works with transformers 5.16 to 5.19.
"""

import math
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from verl.utils.failures import replacing_errors
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy
from verl.utils.kernel.rows import HeadFormula
from verl.utils.model import CausalLMOutputForPPO

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.generic import ModelOutput

_MARK = "_verl_fused_head"


@dataclass(frozen=True)
class HeadRequest:
    """A request to a fused head: score the tokens ``labels`` (k,) at the flat positions ``at`` (k,).

    ``entropy`` is ``none``, ``value`` (without gradient) or ``grad``.
    """

    at: Tensor
    labels: Tensor
    temperature: float = 1.0
    entropy: str = "none"


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the model has a fused head."""
    return _MARK in getattr(model, "__dict__", {})


def install_fused_head(model: "PreTrainedModel", backend: str = "torch") -> None:
    """Let a model accept ``head_request=HeadRequest(...)``, or ``temperature=`` to score every next token.

    It then returns a ``CausalLMOutputForPPO``. Without either argument it works as before.

    Raises: ValueError unless its logits come from a plain linear head with an optional scale or soft cap.
    """
    head, name = _head_of(model)
    formula = _formula_of(model, name)
    model.__dict__[_MARK] = (model.forward, name)
    head.__dict__[_MARK] = (head.forward, formula, backend)
    model.forward = MethodType(_forward, model)
    head.forward = MethodType(_score, head)  # type: ignore[method-assign]


def _forward(
    self: "PreTrainedModel", *args: Tensor, head_request: HeadRequest | None = None, **kwargs: Any
) -> "ModelOutput":
    plain, head_name = self.__dict__[_MARK]
    if head_request is None and kwargs.get("temperature") is None:
        return plain(*args, **kwargs)
    temperature = kwargs.pop("temperature", None)
    ids = kwargs.get("input_ids")
    kwargs = {key: value for key, value in kwargs.items() if value is not None and key not in ("labels", "return_dict")}
    output = getattr(self, self.base_model_prefix)(*args, **kwargs)
    hidden = output[0]
    head = getattr(self, head_name)
    if head_request is not None:
        log_probs, entropy = head(hidden.flatten(0, 1).index_select(0, head_request.at), head_request)
        router_logits = getattr(output, "router_logits", None)
        return CausalLMOutputForPPO(log_probs=log_probs, entropy=entropy, router_logits=router_logits)
    ids = args[0] if ids is None else ids
    everywhere = torch.arange(ids.numel(), device=ids.device)
    request = HeadRequest(everywhere, ids.roll(-1, dims=-1).flatten(), float(temperature), "grad")
    log_probs, entropy = head(hidden.flatten(0, 1), request)
    return CausalLMOutputForPPO(log_probs=log_probs.view(ids.shape), entropy=entropy.view(ids.shape))


def _score(
    self: nn.Linear, hidden: Tensor, request: HeadRequest | None = None
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Replace the head's forward, because only there FSDP has gathered the head's weights."""
    plain, formula, backend = self.__dict__[_MARK]
    if request is None:
        return plain(hidden)
    return linear_log_probs_and_entropy(
        hidden,
        self.weight,
        request.labels,
        replace(formula, temperature=request.temperature),
        bias=self.bias,
        entropy=request.entropy,
        backend=backend,
    )


# How a model makes its logits


def _head_of(model: "PreTrainedModel") -> tuple[nn.Linear, str]:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        adapted = "remove the head from model.target_modules, or " if hasattr(head, "base_layer") else ""
        raise ValueError(
            f"use_fused_kernels=True needs a plain linear head, but {type(model).__name__} has a "
            f"{type(head).__name__}: {adapted}set use_fused_kernels=False"
        )
    names = [name for name, child in model.named_children() if child is head]
    if not names or not hasattr(model, model.base_model_prefix):
        raise ValueError(
            f"use_fused_kernels=True needs the head and its base model as direct children, unlike in "
            f"{type(model).__name__}: set use_fused_kernels=False"
        )
    return head, names[0]


class _Outputs(MoeModelOutputWithPast):
    """Outputs with hidden states, and None for every other attribute."""

    def __getattr__(self, name: str) -> None:
        return None


class _Stub(nn.Module):
    """Returns a known value, and remembers its inputs."""

    def __init__(self, value: "_Outputs | Tensor") -> None:
        super().__init__()
        self.value = value
        self.seen: tuple[Tensor, ...] = ()

    def forward(self, *args: Tensor, **kwargs: Tensor | bool | None) -> "_Outputs | Tensor":
        self.seen = args
        return self.value


_PROBES = (1e-3, 1.0, -7.0, 0.3, 20.0, 60.0, -1e3, 1e6, 1e7)


def own_forward(
    model: "PreTrainedModel",
    head_name: str,
    hidden: Tensor,
    logits: Tensor,
    router_logits: tuple[Tensor, ...] | None = None,
    **inputs: Tensor | None,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Run a causal model's own forward around stubs, which return known hidden states and logits.

    Returns: its output, and what its head was called with.
    """
    inner = _Stub(_Outputs(last_hidden_state=hidden, router_logits=router_logits))  # type: ignore[arg-type]
    head = _Stub(logits)
    shell = object.__new__(type(model))
    parts = dict(model._modules) | {model.base_model_prefix: inner, head_name: head}
    shell.__dict__.update(model.__dict__ | {"_modules": parts})
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
    return type(model).forward(shell, input_ids=ids, use_cache=False, **inputs), head.seen


def _formula_of(model: "PreTrainedModel", head_name: str) -> HeadFormula:
    """Measure scale and soft cap: run the model's forward with known hidden states and logits."""
    hidden = torch.arange(12.0).view(1, 3, 4)
    logits = torch.tensor(_PROBES).view(1, 1, -1)
    with replacing_errors(lambda error: ValueError(f"{_unknown(model)} ({type(error).__name__}: {error})")):
        output, seen = own_forward(model, head_name, hidden, logits, logits_to_keep=torch.tensor([1]))
        found = output.logits
    found = found.flatten().tolist()
    if not seen or not torch.equal(seen[0], hidden[:, 1:2]) or len(found) != len(_PROBES):
        raise ValueError(_unknown(model))
    cap = found[-1] if math.isclose(found[-1], found[-2], rel_tol=1e-4) else None
    scale = found[1] / _PROBES[1] if cap is None else found[0] / _PROBES[0]
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale
    formula = HeadFormula(scale=scale, softcap=cap)
    expected = formula.logits(torch.tensor(_PROBES, dtype=torch.float64)).tolist()
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True)):
        raise ValueError(_unknown(model))
    return formula


def _unknown(model: nn.Module) -> str:
    return (
        f"use_fused_kernels=True: {type(model).__name__} computes its logits by more than a linear head, a scale and a "
        "soft cap: set use_fused_kernels=False"
    )
