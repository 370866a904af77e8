"""Images and videos of later turns: their model inputs, and the position ids of whole trajectories."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.utils.dataset.files import Row
from verl.utils.dataset.vision_utils import encoded_media, model_inputs
from verl.utils.json_types import Json
from verl.utils.vision.positions import position_ids, rope_of

if TYPE_CHECKING:
    from transformers import ProcessorMixin

LATER_INPUTS = "__later_inputs__"
"""Column of ``multi_modal_inputs`` for rows whose images, videos or prompt a loop has changed; None for the others."""


class WholeTrajectories:
    """Computes multi-modal inputs and positions of trajectories to which tools or users have added images.

    Args: ``processor`` is that of the policy; ``kwargs`` are ``data.mm_processor_kwargs``.
    """

    def __init__(self, processor: "ProcessorMixin", kwargs: Mapping[str, Json]) -> None:
        self._processor = processor
        self._kwargs = dict(kwargs)

    def complete(
        self, tensors: dict[str, Tensor], outputs: Sequence[AgentLoopOutput], changed: Collection[int]
    ) -> list[Row | None]:
        """Write ``position_ids`` (B, 4, L) of the rows with a changed prompt or later media; return their inputs.

        Raises: ValueError naming the row for a model family whose positions are not known, and for images or videos
            that do not match their tokens.
        """
        return [
            self._row(tensors, row, output)
            if row in changed or output.num_later_images or output.num_later_videos
            else None
            for row, output in enumerate(outputs)
        ]

    def without_inputs(self) -> "WholeTrajectories":
        """Return a stand-in that keeps inputs and positions unchanged, for rows that only a scorer reads."""
        return _NoInputs(self._processor, self._kwargs)

    def _row(self, tensors: dict[str, Tensor], row: int, output: AgentLoopOutput) -> Row:
        ids = tensors["input_ids"][row].clone()
        width = tensors["response_mask"].shape[1]
        ids[-width:][tensors["response_mask"][row].bool()] = -1  # a sampled image token does not stand for an image
        try:
            rope = rope_of(self._processor)
            encoded = encoded_media(self._processor, output.multi_modal_data or {}, self._kwargs)
            tensors["position_ids"][row] = position_ids(rope, ids, tensors["attention_mask"][row], encoded)
        except ValueError as error:
            raise ValueError(
                f"trajectory {row}: {error}; engine and data set must have the same mm_processor_kwargs "
                "(actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs)"
            ) from error
        return model_inputs(encoded)


class _NoInputs(WholeTrajectories):
    def complete(
        self, tensors: dict[str, Tensor], outputs: Sequence[AgentLoopOutput], changed: Collection[int]
    ) -> list[Row | None]:
        return [None] * len(outputs)
