"""Zooming in on an image: what is shown, pixel by pixel, and what is refused."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from verl.base_config import WrongInput
from verl.tools.calls import BadArguments, CallResult, execute_call
from verl.tools.image_zoom_in_tool import ImageZoomInTool, fit_box

WIDTH, HEIGHT = 140, 112  # whole numbers of tokens of 28 pixels, so that loading keeps the size
PIXELS = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def zoom(parameters: dict[str, Any], **create: Any) -> CallResult:
    async def run() -> CallResult:
        tool = ImageZoomInTool({"type": "native", "num_workers": 2})
        instance_id, _ = await tool.create(**(create or {"image": Image.fromarray(PIXELS)}))
        call = await execute_call(tool, instance_id, parameters)
        await tool.release(instance_id)
        return call

    return asyncio.run(run())


@pytest.mark.parametrize("as_kwargs", [True, False])
def test_the_region_is_cut_out(as_kwargs: bool) -> None:
    image = {"image": Image.fromarray(PIXELS)}
    call = zoom({"bbox_2d": [10, 20.5, 70, 90], "label": "cat"}, **({"create_kwargs": image} if as_kwargs else image))
    assert (call.outcome, call.reward, call.metrics) == ("ok", 0.0, {"success": True})
    assert call.response.text == "Zoomed in on the image to the region [10, 20, 70, 90] with label cat."
    assert call.response.image is not None
    assert np.array_equal(np.asarray(call.response.image[0]), PIXELS[20:90, 10:70])


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (None, "four numbers"),
        ("1,2,3,4", "four numbers"),
        ([1, 2, 3], "four numbers"),
        ([1, 2, 3, float("nan")], "four numbers"),
        ([1, 2, 3, "4"], "four numbers"),
        ([50, 10, 40, 90], "is empty or lies outside the image of 140 x 112 pixels"),
        ([200, 10, 240, 90], "is empty or lies outside"),
    ],
)
def test_failures_cost_and_are_told(box: Any, message: str) -> None:
    call = zoom({"bbox_2d": box})
    assert message in (call.response.text or "") and call.response.image is None
    assert (call.outcome, call.reward, call.metrics["success"]) == ("bad_arguments", -0.05, False)


def test_boxes_fit() -> None:
    assert fit_box([-5, 0, 1000, 112], WIDTH, HEIGHT) == (0, 0, 140, 112)
    assert fit_box([60, 50, 64, 54], WIDTH, HEIGHT) == (48, 38, 76, 66)  # 28 pixels around the middle
    assert fit_box([138, 110, 140, 112], WIDTH, HEIGHT) == (112, 84, 140, 112)
    rng = random.Random(0)
    fitted = 0
    for _ in range(3000):
        width, height = rng.randint(28, 200), rng.randint(28, 200)
        asked = [rng.uniform(-20, 220) for _ in range(4)]
        try:
            left, top, right, bottom = fit_box(asked, width, height)
        except BadArguments:
            continue
        fitted += 1
        assert 0 <= left and right <= width and 0 <= top and bottom <= height
        assert right - left >= 28 and bottom - top >= 28
        assert left <= max(asked[0], 0) and right >= min(asked[2], width)
        assert top <= max(asked[1], 0) and bottom >= min(asked[3], height)
    assert fitted > 300


def test_images_that_cannot_be_shown() -> None:
    with pytest.raises(BadArguments, match="too small"):
        fit_box([0, 0, 20, 20], 20, 100)
    with pytest.raises(BadArguments, match="too narrow"):
        fit_box([0, 0, 4000, 30], 4000, 4000)
    with pytest.raises(WrongInput, match=r"tools_kwargs\.image_zoom_in_tool\.create_kwargs\.image"):
        zoom({}, create_kwargs={})
    with pytest.raises(ValueError, match="cannot be read|no such file|No such file"):
        zoom({}, image="/no/such/image.png")
