"""Tensors of Megatron-Core under checkpoint names, one at a time, for code that has its own way of gathering them."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.models.mcore.families import EXPERT, FUSED_NORMS, find_family, outer_rules

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(re.escape(EXPERT).replace(r"\{expert\}", r"(\d+)") + "(.+)")
_PLAIN_NORMS = {fused: plain for plain, fused in FUSED_NORMS.items()}


class WeightConverter:
    """The weights of one model, from Megatron-Core's names to those of its checkpoint; ``dtype`` None keeps theirs."""

    def __init__(self, hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        self._outer = outer_rules(hf_config, False, tied) | {
            name: rule for name, rule in outer_rules(hf_config, True, tied).items() if name == "output_layer.bias"
        }
        self._head = outer_rules(hf_config, True, tied)["output_layer.weight"]
        self._layer = find_family(hf_config).layer(hf_config)

    def convert_param(self, name: str, params_one_group: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
        """Return checkpoint names and tensors of one parameter, given its parts of all tensor-parallel ranks in order.

        Numbers of layers and experts in ``name`` are the global ones. Raises: ValueError for a name without a rule.
        """
        name, parts = name.removeprefix("module."), list(params_one_group)
        layer = expert = None
        rule = self._outer.get(name)
        if name == "output_layer.weight" and parts and len(parts[0]) == 1:
            rule = self._head
        if found := _LAYER.fullmatch(name):
            layer, rest = found.groups()
            if of_expert := _EXPERT.fullmatch(rest):
                expert, rest = of_expert[1], f"{EXPERT}{of_expert[2]}"
            rule = self._layer.get(_PLAIN_NORMS.get(rest, rest))
        if rule is None:
            raise ValueError(f"no rule says which checkpoint tensors make {name!r} of Megatron-Core")
        names = [each.format(layer=layer, expert=expert) for each in rule.names]
        return names, [tensor.to(self.dtype or tensor.dtype) for tensor in rule.export(parts)]


def get_mcore_weight_converter(hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> WeightConverter:
    """Return the converter of a model. Raises: UnsupportedModelError where its architecture is not known."""
    return WeightConverter(hf_config, dtype)
