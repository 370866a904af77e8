"""Show the model a part of the image of its prompt, larger."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

from verl.base_config import BaseConfig, setting
from verl.errors import WrongInput
from verl.tools.base_tool import BaseTool, Executed, created_with
from verl.tools.calls import OUTCOME, BadArguments, ToolOutcome
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.class_files import read_options
from verl.utils.concurrency import ConcurrencyLimit
from verl.utils.import_utils import lazy_exports
from verl.utils.json_types import Json, JsonObject
from verl.utils.vision.limits import MediaConfig

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
# Users' forks of verl and tests import these names.
_POOL = ("PoolMode", "TokenBucketWorker", "init_visual_execution_pool")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_POOL, "verl.compat.execution_pool"))

FAILED = -0.05
"""Reward of a call that shows nothing."""
MIN_DIMENSION = 28
"""Least width and height of what is shown: a model sees at least one token of 28 pixels along each side."""
MOST_RATIO = 100
"""Largest ratio of the sides of what is shown; models refuse images that are longer."""


@dataclass
class ImageZoomInToolConfig(BaseConfig):
    """``config`` of the tool."""

    _is_closed: ClassVar[bool] = True

    num_workers: int = setting(20, "images of a process at once", at_least=1)
    rate_limit: int = setting(50, "images of all processes of this machine at once", at_least=1)
    enable_global_rate_limit: bool = setting(True, "whether rate_limit applies")
    timeout: float = setting(30.0, "seconds to load or cut an image", above=0)
    image_patch_size: int = setting(14, "side of a patch of the model's vision tower, in pixels", at_least=1)
    media: MediaConfig = field(default_factory=MediaConfig)


class ImageZoomInTool(BaseTool):
    """Cuts ``bbox_2d`` out of the image that ``create`` gets. Failures answer with a text and the reward ``FAILED``."""

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        from verl.utils.dataset.vision_utils import process_image  # imports torch, which takes seconds

        self._load = process_image
        self.options = read_options(self, config, ImageZoomInToolConfig)
        shared = self.options.rate_limit if self.options.enable_global_rate_limit else None
        self._limit = ConcurrencyLimit(self.options.num_workers, shared, "image zoom")
        self._pool = ThreadPoolExecutor(self.options.num_workers, thread_name_prefix="zoom")
        self._images: dict[str, Image] = {}
        self._shown: dict[str, int] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool for the model."""
        if self.tool_schema is not None:
            return self.tool_schema
        box = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "The region as [x1, y1, x2, y2], in pixels of the image; (x1, y1) is its upper left corner.",
        }
        label = {"type": "string", "description": "The name of what is in the region."}
        function = {
            "name": "image_zoom_in_tool",
            "description": "Zoom in on a region of the image.",
            "parameters": {"type": "object", "properties": {"bbox_2d": box, "label": label}, "required": ["bbox_2d"]},
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: str | None = None, **kwargs: Json) -> tuple[str, ToolResponse]:
        """Load ``image``, in the size in which the model sees it.

        Args: ``kwargs`` has ``image``, anything that a row of the data may have, itself or in ``create_kwargs``.

        Raises: ValueError without an image, or if it cannot be read.
        """
        image = created_with("image", kwargs)
        if image is None:
            key = f"tools_kwargs.{self.name}.create_kwargs.image"
            raise WrongInput(f"a row has no image for the tool {self.name}: write {key}")
        instance_id, response = await super().create(instance_id)
        self._images[instance_id] = await self._run(
            partial(self._load, image, self.options.image_patch_size, self.options.media)
        )
        return instance_id, response

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Json) -> Executed:
        """Show ``bbox_2d``, with ``label`` in the text; small regions are widened to ``MIN_DIMENSION``."""
        image = self._images[instance_id]
        try:
            box = fit_box(parameters.get("bbox_2d"), image.width, image.height)
        except BadArguments as error:
            metrics: JsonObject = {"success": False, OUTCOME: ToolOutcome.BAD_ARGUMENTS}
            return ToolResponse(text=f"Error: {error}"), FAILED, metrics
        try:
            shown = await self._run(partial(image.crop, box))
        except TimeoutError:
            text = f"Error: the image was not ready within {self.options.timeout:g} s."
            return ToolResponse(text=text), FAILED, {"success": False, OUTCOME: ToolOutcome.TIMEOUT}
        label = parameters.get("label")
        named = f" with label {label}" if label else ""
        text = f"Zoomed in on the image to the region {list(box)}{named}."
        self._shown[instance_id] = self._shown.get(instance_id, 0) + 1
        return ToolResponse(text=text, image=[shown]), 0.0, {"success": True}

    async def calc_reward(self, instance_id: str, **kwargs: Json) -> float:
        """Return how many regions were shown, for scorers that reward looking."""
        return float(self._shown.get(instance_id, 0))

    async def release(self, instance_id: str, **kwargs: Json) -> None:
        """Forget the image."""
        self._images.pop(instance_id, None)
        self._shown.pop(instance_id, None)

    async def _run(self, work: Callable[[], T]) -> T:
        async with self._limit.slot(), asyncio.timeout(self.options.timeout):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def fit_box(box: Json, width: int, height: int) -> tuple[int, int, int, int]:
    """Return a region of whole pixels inside an image, with sides of at least ``MIN_DIMENSION``.

    Raises: BadArguments if there is none.
    """
    if not isinstance(box, Sequence) or isinstance(box, str) or len(box) != 4:
        raise BadArguments("bbox_2d must be four numbers [x1, y1, x2, y2].")
    numbers = [each for each in box if isinstance(each, int | float) and math.isfinite(each)]
    if len(numbers) != 4:
        raise BadArguments("bbox_2d must be four numbers [x1, y1, x2, y2].")
    left, right = (min(max(each, 0), width) for each in (numbers[0], numbers[2]))
    top, bottom = (min(max(each, 0), height) for each in (numbers[1], numbers[3]))
    if left >= right or top >= bottom:
        raise BadArguments(
            f"bbox_2d={list(box)} is empty or lies outside the image of {width} x {height} pixels: x1 < x2 and y1 < y2."
        )
    if min(width, height) < MIN_DIMENSION:
        raise BadArguments(f"the image of {width} x {height} pixels is too small to zoom in.")
    left, right = _widened(math.floor(left), math.ceil(right), width)
    top, bottom = _widened(math.floor(top), math.ceil(bottom), height)
    if max(right - left, bottom - top) > MOST_RATIO * min(right - left, bottom - top):
        raise BadArguments(f"bbox_2d={list(box)} is too narrow: one side is {MOST_RATIO} times the other.")
    return left, top, right, bottom


def _widened(low: int, high: int, end: int) -> tuple[int, int]:
    """Return an interval of at least ``MIN_DIMENSION`` around another one, inside 0 to ``end``."""
    missing = max(0, MIN_DIMENSION - (high - low))
    low = min(max(0, low - missing // 2), end - max(MIN_DIMENSION, high - low))
    return low, max(high, low + MIN_DIMENSION)
