"""Convert the images and videos of prompts to inputs of SGLang's scheduler, with the tokens and positions of training.

SGLang's own processors tokenize a prompt again, and choose pixels and positions by their own rules. So this module runs
the model's processor on each image and video alone, as the data set does, and gives the result to the scheduler.
"""

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import WrongInput
from verl.models.transformers.names import SGLANG_VISION_FAMILIES
from verl.utils.dataset.vision_utils import encoded_media, model_inputs
from verl.utils.vision.multi_modal import num_bytes
from verl.utils.vision.positions import VisionRope, config_rope
from verl.workers.rollout.engine_settings import media_settings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput
    from transformers import ProcessorMixin

    from verl.workers.config import HFModelConfig, RolloutConfig

KINDS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""The kinds of media, and the name of their pixels in the processor's output."""
_CACHE_BYTES = 1 << 28

Item = Any  # an image of PIL, or a video as (frames, metadata)


@dataclass(frozen=True)
class Prompt:
    """A prompt in the engine's form: the tokens, those of media expanded, and the media (None for text alone)."""

    token_ids: list[int]
    media: "MultimodalProcessorOutput | None" = None


@dataclass(frozen=True)
class _Encoded:
    """The processor's output for an image or a video.

    Attributes:
        tokens: its tokens in the prompt.
        inputs: pixels and grid.
        seconds: between two patches of a video, for families whose positions are times.
        digest: identifies the image or video.
    """

    kind: str
    tokens: list[int]
    inputs: dict[str, Any]
    seconds: list[float]
    digest: int


class MediaForm:
    """Expands prompts with one token for each image and video.

    Args:
        processor: that of the model.
        rope: the rules of its positions.
        limits: the most images and videos that a prompt may have; others have no limit.
        kwargs: arguments of the processor, as ``data.mm_processor_kwargs``.
    """

    def __init__(
        self,
        processor: "ProcessorMixin",
        rope: VisionRope,
        limits: Mapping[str, int],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._processor: Any = processor
        self._rope = rope
        self._limits = dict(limits)
        self._kwargs = dict(kwargs)
        ids = processor.tokenizer.convert_tokens_to_ids
        self._marks = {ids(getattr(processor, f"{kind}_token")): kind for kind in KINDS}
        self._cache: OrderedDict[int, _Encoded] = OrderedDict()  # the samples of a prompt share its images
        self._lock = threading.Lock()

    def expand(self, prompt_ids: Sequence[int], media: Mapping[str, Sequence[Item]]) -> Prompt:
        """Return the prompt with all tokens of its images and videos.

        Tokens of images beyond those that come with the prompt are text, as a model may have sampled them.

        Raises: WrongInput for images or videos without a token, or more than the limit.
        """
        for kind, limit in self._limits.items():
            count = len(media.get(kind) or ())
            if count > limit:
                raise WrongInput(
                    f"the prompt has {count} {kind}s, and the engine takes {limit}: raise "
                    "actor_rollout_ref.rollout.limit_images or engine_kwargs.sglang.limit_mm_data_per_request"
                )
        left = {kind: [self._encode(kind, item) for item in media.get(kind) or ()] for kind in KINDS}
        tokens: list[int] = []
        shown: list[tuple[int, _Encoded]] = []  # the media that are shown, and where each starts
        for token in prompt_ids:
            waiting = left.get(self._marks.get(token, ""))
            if waiting:
                shown.append((len(tokens), waiting[0]))
                tokens.extend(waiting.pop(0).tokens)
            else:
                tokens.append(token)
        for kind, entries in left.items():
            if entries:
                count = sum(encoded.kind == kind for _, encoded in shown)
                raise WrongInput(f"the prompt has tokens for {count} {kind}s, and {count + len(entries)} come with it")
        return Prompt(tokens, self._output(tokens, shown) if shown else None)

    def _output(self, tokens: list[int], shown: Sequence[tuple[int, _Encoded]]) -> "MultimodalProcessorOutput":
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        ids = torch.tensor(tokens)
        stands = (ids == self._rope.image_token_id) | (ids == self._rope.video_token_id)
        is_text = torch.ones_like(stands)
        for start, encoded in shown:
            is_text[start : start + len(encoded.tokens)] = False
        grids = {
            f"{kind}_grid_thw": torch.cat([each.inputs[f"{kind}_grid_thw"] for _, each in shown if each.kind == kind])
            for kind in {each.kind for _, each in shown}
        }
        seconds = [value for _, each in shown for value in each.seconds]
        positions = self._rope.positions(
            ids.masked_fill(stands & is_text, -1), **grids, second_per_grid_ts=seconds or None
        )
        return MultimodalProcessorOutput(
            input_ids=tokens,
            mm_items=[self._item(start, encoded) for start, encoded in shown],
            im_token_id=self._rope.image_token_id,
            video_token_id=self._rope.video_token_id,
            mrope_positions=positions,
            mrope_position_delta=(positions[:, -1].max() + 1 - len(tokens)).reshape(1, 1),
        )

    def _item(self, start: int, encoded: _Encoded) -> "MultimodalDataItem":
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        pixels = KINDS[encoded.kind]
        return MultimodalDataItem(
            modality=Modality[encoded.kind.upper()],
            hash=encoded.digest,  # hash of the picture, since pixels may have the same values in other shapes
            offsets=[(start + first, start + last) for first, last in self._runs(encoded.tokens)],
            feature=encoded.inputs[pixels],
            model_specific_data={name: value for name, value in encoded.inputs.items() if name != pixels},
        )

    def _runs(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return the first and last position of each run of tokens that the tower's outputs replace."""
        stands = {self._rope.image_token_id, self._rope.video_token_id}
        runs = (list(run) for shows, run in groupby(range(len(tokens)), lambda at: tokens[at] in stands) if shows)
        return [(run[0], run[-1]) for run in runs]

    def _encode(self, kind: str, item: Item) -> _Encoded:
        digest = int.from_bytes(hashlib.blake2b(pickle.dumps((kind, item), protocol=5), digest_size=8).digest())
        with self._lock:  # a processor has state
            found = self._cache.pop(digest, None) or self._processed(kind, item, digest)
            self._cache[digest] = found
            while sum(num_bytes(each.inputs) for each in self._cache.values()) > _CACHE_BYTES and len(self._cache) > 1:
                self._cache.popitem(last=False)
        return found

    def _processed(self, kind: str, item: Item, digest: int) -> _Encoded:
        encoded = encoded_media(self._processor, {kind: [item]}, self._kwargs)
        seconds = torch.as_tensor(encoded.get("second_per_grid_ts", ())).reshape(-1).tolist()
        return _Encoded(kind, encoded["input_ids"][0].tolist(), model_inputs(encoded), seconds, digest)


def media_form(config: "RolloutConfig", model_config: "HFModelConfig") -> MediaForm | None:
    """Return the form of prompts with images and videos; None for a model that reads text only."""
    hf_config = model_config.hf_config
    if hf_config.model_type not in SGLANG_VISION_FAMILIES:
        return None
    limits, kwargs = media_settings("sglang", config.engine_kwargs.get("sglang") or {})
    if config.limit_images is not None:
        limits["image"] = config.limit_images
    return MediaForm(model_config.processor, config_rope(hf_config), limits, kwargs)
