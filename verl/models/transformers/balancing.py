"""The balancing loss of experts, which a model adds to its own loss if ``output_router_logits`` is set.

Source: Switch Transformer (arXiv:2101.03961), section 2.2; transformers counts the tokens of all layers together. Works
with transformers 5.16 to 5.19.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import WrongInput
from verl.models.transformers.dense_common import own_forward
from verl.models.transformers.own_loss import balancing_coefficient

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.utils.generic import ModelOutput


@dataclass(frozen=True)
class Balancing:
    """The load-balancing loss of a model, whose own loss adds it with the weight ``coefficient``."""

    model: "PreTrainedModel"
    coefficient: float

    def of_output(self, output: "ModelOutput") -> Tensor | None:
        """Return the loss that the model has computed in a pass; None for a model that never adds one.

        Raises: WrongInput if the routers returned nothing, for which the model returns the loss 0.
        """
        loss = getattr(output, "aux_loss", None)
        if loss is None or isinstance(loss, Tensor):
            return loss
        raise WrongInput(
            f"{type(self.model).__name__} returned no logits of its routers, of which its balancing loss is made: set "
            "output_router_logits=false in model.override_config, or leave out fsdp_config.wrap_policy"
        )

    def of_routers(self, router_logits: tuple[Tensor, ...] | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the loss that the model's own forward computes from its router logits.

        Args: ``router_logits`` are those of each layer, (tokens, experts); ``attention_mask`` (b, L) marks padding.
        """
        head = self.model.get_output_embeddings()
        name = next(name for name, child in self.model.named_children() if child is head)
        known = torch.zeros(1, 1, 1)
        output, _ = own_forward(self.model, name, known, known, router_logits, attention_mask=attention_mask)
        return self.of_output(output)


def balancing_of(model: "PreTrainedModel") -> Balancing | None:
    """Return the balancing loss that the configuration of a causal model asks for; None without one."""
    coefficient = balancing_coefficient(model.config.to_dict())
    return Balancing(model, coefficient) if coefficient else None


def returns_router_logits(config: "PretrainedConfig | None") -> bool:
    """Return whether each pass of a model returns the logits of its routers."""
    return config is not None and bool(getattr(config.get_text_config(), "output_router_logits", False))
