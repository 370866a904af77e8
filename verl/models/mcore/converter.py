"""Convert single Megatron-Core tensors to checkpoint names, for callers that gather the parts themselves."""

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
    """Converts one model's weights from Megatron-Core to checkpoint names; with ``dtype`` None it keeps their dtype."""

    def __init__(self, hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        self._outer = outer_rules(hf_config, False, tied) | {
            name: rule for name, rule in outer_rules(hf_config, True, tied).items() if name == "output_layer.bias"
        }
        self._head = outer_rules(hf_config, True, tied)["output_layer.weight"]
        self._layer = find_family(hf_config).layer(hf_config)

    def convert_param(self, name: str, params_one_group: Sequence[Tensor]) -> tuple[list[str], list[Tensor]]:
        """Return checkpoint names and tensors of one parameter from its parts on all tensor-parallel ranks, in order.

        ``name`` holds the global layer and expert numbers. Raises: ValueError for a name without a rule.
        """
        name = name.removeprefix("module.")
        parts = list(params_one_group)
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
            raise ValueError(f"no rule maps Megatron-Core's {name!r} to checkpoint tensors")
        names = [each.format(layer=layer, expert=expert) for each in rule.names]
        return names, [tensor.to(self.dtype or tensor.dtype) for tensor in rule.export(parts)]


def get_mcore_weight_converter(hf_config: "PretrainedConfig", dtype: torch.dtype | None = None) -> WeightConverter:
    """Return the converter of a model. Raises: UnsupportedModelError for an unknown architecture."""
    return WeightConverter(hf_config, dtype)
