"""Inputs per token besides the id for vision-language models of transformers without an entry.

A processor returns these inputs for a prompt: which tokens stand for images, or belong to the prefix. This module makes
them from the tokens of a whole row, because a response follows the prompt and a tool may show images in it. The
families of ``verl.models.transformers.vision`` do not need these inputs: they get their positions with the rows.

Works with transformers 5.16 to 5.19.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.base_config import ConfigError, Violation
from verl.errors import WrongInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TYPES = "token_type_ids"
MM_TYPES = "mm_token_type_ids"
_PREFIX = ("paligemma",)
"""Families in which the tokens before the first sampled one see each other; the others mark their images."""
_OF_TOKENS = (
    *("bbox", "cross_attention_mask", "image_attention_mask", "image_embeds_position_mask", "moe_mm_token_type_ids"),
    *("qformer_input_ids", "decoder_input_ids"),
)
"""Further arguments with a value for each token, which a response would have to continue."""


@dataclass(frozen=True)
class TokenInputs:
    """The rules of a model.

    Attributes:
        family: its ``model_type``.
        takes: which of ``TYPES`` and ``MM_TYPES`` its forward takes.
        unknown: a further argument with a value for each token; None without.
        has_axes: it computes positions along several axes from ``MM_TYPES``.
    """

    family: str
    config: "PretrainedConfig"
    takes: frozenset[str]
    unknown: str | None
    has_axes: bool

    @classmethod
    def of(cls, model: Any) -> "TokenInputs":
        """Read the rules of a transformers model from its class and configuration."""
        inner = getattr(model, "model", model)
        known = {name for part in (model, inner) for name in inspect.signature(type(part).forward).parameters}
        unknown = next((name for name in _OF_TOKENS if name in known), None)
        axes = MM_TYPES in known and hasattr(inner, "get_rope_index")
        return cls(model.config.model_type, model.config, frozenset(known & {TYPES, MM_TYPES}), unknown, axes)

    def inputs(self, ids: Tensor, sampled: Tensor, has_media: bool) -> dict[str, Tensor]:
        """Return the arguments for padded rows (b, L); a sampled token is text whatever its id.

        Raises: WrongInput for a family with another argument of this kind.
        """
        if self.unknown is not None and has_media:
            raise WrongInput(
                f"model_type={self.family!r} takes {self.unknown} with its images, which verl cannot continue over a "
                "response: train it without images, or another model"
            )
        if self.family in _PREFIX:
            return {TYPES: (sampled.long().cumsum(-1) > 0).long()}
        kinds = self._kinds(ids, sampled) if has_media else None
        if kinds is None:
            return {}
        return {name: (kinds == 1).long() if name == TYPES else kinds for name in self.takes}

    def check_packed(self, has_positions: bool) -> None:
        """Raise ConfigError for packed rows with images of a model that needs these arguments.

        Args: ``has_positions`` tells rows that have positions along several axes.
        """
        needs = self.takes - {MM_TYPES} if has_positions and self.has_axes else self.takes
        if not needs and self.unknown is None:
            return
        problem = f"cannot pack images of model_type={self.family!r}, whose attention or positions depend on them: "
        raise ConfigError([Violation("model.use_remove_padding", True, problem + "write false")])

    def _kinds(self, ids: Tensor, sampled: Tensor) -> Tensor:
        """Return 1 for tokens of images, 2 of videos, 3 of sound, 0 of text."""
        kinds = torch.zeros_like(ids)
        for kind, medium in enumerate(("image", "video", "audio"), start=1):
            token = getattr(self.config, f"{medium}_token_id", None)
            if token is None:
                token = getattr(self.config, f"{medium}_token_index", None)
            if token is not None:
                kinds[ids == token] = kind
        start, end = (getattr(self.config, f"video_{name}_token_id", None) for name in ("start", "end"))
        # GLM writes video frames with image tokens.
        if self.family.startswith("glm") and start is not None and end is not None:
            inside = (ids == start).cumsum(-1) > (ids == end).cumsum(-1)
            kinds[inside & (ids == self.config.image_token_id)] = 2
        return kinds.masked_fill(sampled, 0)
