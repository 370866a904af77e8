"""Load the images and videos of tool answers, within the limits of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl.base_config import build_node
from verl.errors import WrongInput
from verl.tools.schemas import ToolResponse
from verl.utils.dataset.vision_utils import MediaError, MissingVideoSupportError, load_video, process_image
from verl.utils.vision.fetching import check_no_address
from verl.utils.vision.limits import MediaConfig
from verl.utils.vision.positions import media_texts, vision_rope
from verl.workers.config.engines import media_engine
from verl.workers.rollout.engine_settings import media_settings

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.utils.chat.messages import Video

_ROLLOUT = "actor_rollout_ref.rollout"
_OF_ONE_VIDEO = frozenset({"Glm4vProcessor"})
"""Processors of models for which vLLM takes only one video in a prompt."""

Media = Mapping[str, Sequence[Any]]
"""Images and videos of a conversation, as ``multi_modal_data``."""


@dataclass
class Shown:
    """The loaded images of answers, and their videos as (frames (T, 3, H, W), metadata)."""

    images: list["Image"] = field(default_factory=list)
    videos: list["Video"] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def extend(self, other: "Shown") -> None:
        """Append the images and videos of another answer."""
        self.images += other.images
        self.videos += other.videos

    def parts(self, text: str) -> list[dict[str, str]]:
        """Return the content of a message with the images, the videos and a text."""
        media = [{"type": "image"} for _ in self.images] + [{"type": "video"} for _ in self.videos]
        return [*media, {"type": "text", "text": text}] if text else media


@dataclass(frozen=True)
class MediaRules:
    """Limits on the images and videos in tool and user messages.

    Attributes:
        processor: the policy's processor; None if the policy reads text only.
        tokens: the placeholder tokens of images and videos; none for a family whose positions are not known.
        texts: the texts of these tokens.
        limits: the most images and videos of a conversation by kind; None for the engine's own limit.
        media: what they may be.
    """

    processor: "ProcessorMixin | None"
    tokens: frozenset[int]
    texts: tuple[str, ...]
    limits: Mapping[str, int | None]
    media: MediaConfig = field(default_factory=MediaConfig)

    @classmethod
    def of(
        cls, config: DictConfig, tokenizer: "PreTrainedTokenizerBase", processor: "ProcessorMixin | None"
    ) -> "MediaRules":
        """Return the rules of a run."""
        rope = None if processor is None else vision_rope(processor)
        tokens = frozenset() if rope is None else rope.media_tokens
        texts = media_texts(rope, tokenizer)
        engine = media_engine(OmegaConf.select(config, f"{_ROLLOUT}.name"))
        given, _ = media_settings(engine, OmegaConf.select(config, f"{_ROLLOUT}.engine_kwargs.{engine}") or {})
        limits = {kind: _count(given.get(kind)) for kind in ("image", "video")}
        if engine == "vllm" and type(processor).__name__ in _OF_ONE_VIDEO:
            limits["video"] = 1 if limits["video"] is None else min(limits["video"], 1)
        images = OmegaConf.select(config, f"{_ROLLOUT}.limit_images")
        media = build_node(OmegaConf.select(config, "data.media") or {}, MediaConfig)
        return cls(processor, tokens, texts, limits if images is None else {**limits, "image": images}, media)

    def plain(self, text: str) -> str:
        """Return a text without image placeholders, and with ``?`` for characters that no tokenizer can encode."""
        for token in self.texts:
            text = text.replace(token, "")
        return text.encode(errors="replace").decode()  # halves of surrogate pairs

    def joined(self, so_far: Media, new: Shown | None) -> dict[str, list[Any]]:
        """Return the images and videos of a conversation, extended by new ones, as ``multi_modal_data``."""
        more: Media = {"image": new.images, "video": new.videos} if new else {}
        media = {kind: [*so_far.get(kind, ()), *more.get(kind, ())] for kind in ("image", "video")}
        return {kind: items for kind, items in media.items() if items}

    def check_shown(self, prompt_ids: Sequence[int], media: Media, key: str) -> None:
        """Check that a re-rendered prompt has a placeholder for each image and video.

        Raises: WrongInput naming ``key``.
        """
        if not media:
            return
        processor: Any = self.processor
        for kind, token in (("image", processor.image_token), ("video", processor.video_token)):
            found = list(prompt_ids).count(processor.tokenizer.convert_tokens_to_ids(token))
            if found != len(media.get(kind, ())):
                raise WrongInput(
                    f"{key}: the chat template now shows {found} of the {len(media.get(kind, ()))} {kind}s of a "
                    "conversation: write false"
                )

    def loaded(self, tool: str, answer: ToolResponse, so_far: Media, others: Shown) -> Shown:
        """Load the images and videos of an answer, in the sizes that the model takes.

        Args: ``so_far`` are those of the conversation, and ``others`` those of other answers to the same turn.
        Raises: MediaError naming the tool, if one cannot be read or there are too many; WrongInput for a model that
            reads text only.
        """
        given = {"image": answer.image or [], "video": answer.video or []}
        earlier: Media = {"image": others.images, "video": others.videos}
        for kind, items in given.items():
            if items and self.processor is None:
                raise WrongInput(
                    f"the tool {tool} answered with {_a(kind)}, but the model of the policy reads text only"
                )
            if items and not self.tokens:
                raise WrongInput(
                    f"the tool {tool} answered with {_a(kind)}: {type(self.processor).__name__} is not supported here, "
                    "only the processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V are"
                )
            limit = self.limits[kind]
            count = len(so_far.get(kind, ())) + len(earlier[kind]) + len(items)
            if items and limit is not None and count > limit:
                most = f"{limit} {kind}{'' if limit == 1 else 's'}"
                raise MediaError(
                    f"the tool {tool} answered with {_a(kind)}, and a conversation may have at most {most}"
                )
        patch_size = getattr(getattr(self.processor, "image_processor", None), "patch_size", None) or 14
        try:
            check_no_address(self.media, given["image"], given["video"])
            images = [process_image(image, patch_size, self.media) for image in given["image"]]
            loaded = [load_video(each, image_patch_size=patch_size, media=self.media) for each in given["video"]]
            videos: list[Video] = [(frames.numpy(), metadata) for frames, metadata in loaded]
        except MissingVideoSupportError as error:
            raise WrongInput(f"the tool {tool} answered with a video, which cannot be loaded: {error}") from error
        except MediaError as error:
            kind = "video" if given["video"] and not given["image"] else "image"
            raise MediaError(f"the tool {tool} answered with {_a(kind)}: {error}") from error
        return Shown(images, videos)


def _a(kind: str) -> str:
    return f"a{'n' if kind == 'image' else ''} {kind}"


def _count(limit: int | Mapping[str, int] | None) -> int | None:
    """Return a limit of the engine, which may be a number or options with one."""
    found = limit.get("count") if isinstance(limit, Mapping) else limit
    return None if found is None else int(found)
