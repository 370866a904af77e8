"""Position ids of prompts with images and videos equal those of transformers' models."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.utils.vision.positions import PositionError, VisionRope, continued, position_ids

START, END, IMAGE, VIDEO, VIDEO_START, VIDEO_END = 90, 91, 92, 93, 94, 95
RATE = 4.0
ROPES = {
    "qwen2_vl": VisionRope(IMAGE, VIDEO),
    "qwen2_5_vl": VisionRope(IMAGE, VIDEO, tokens_per_second=RATE),
    "qwen3_vl": VisionRope(IMAGE, VIDEO, frames_apart=True),
    "glm4v": VisionRope(IMAGE, IMAGE, frames_apart=True, video_span=(VIDEO_START, VIDEO_END)),
}
MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "glm4v": "Glm4vModel",
}
SIDES = st.integers(1, 4).map(lambda side: 2 * side)
PARTS = st.one_of(
    st.tuples(st.just("text"), st.integers(1, 6)),
    st.tuples(st.just("image"), st.just(1), SIDES, SIDES, st.just(1.0)),
    st.tuples(st.just("video"), st.integers(1, 5), SIDES, SIDES, st.sampled_from([0.2, 0.5, 1.0, 1.3])),
)


def _tokens(family: str, parts: list[tuple[Any, ...]]) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return the tokens of a prompt, their types as a processor gives them, and its grids."""
    ids, kinds = [1], [0]
    grids: dict[str, list[Any]] = {"image": [], "video": [], "seconds": []}
    for kind, count, *rest in parts:
        if kind == "text":
            ids, kinds = ids + [7] * count, kinds + [0] * count
            continue
        height, width, seconds = rest
        frames = [count] if family in ("qwen2_vl", "qwen2_5_vl") or kind == "image" else [1] * count
        token = IMAGE if family == "glm4v" or kind == "image" else VIDEO
        around = (VIDEO_START, VIDEO_END) if family == "glm4v" and kind == "video" else (START, END)
        ids, kinds = [*ids, around[0]], [*kinds, 0]
        for frame in frames:
            size = frame * height * width // 4
            ids, kinds = [*ids, 8, START, *[token] * size, END], [*kinds, 0, 0, *[1 + (kind == "video")] * size, 0]
        ids, kinds = [*ids, around[1]], [*kinds, 0]
        grids[kind].append([count, height, width])
        if kind == "video":
            grids["seconds"].append(seconds)
    as_tensor = {kind: torch.tensor(grids[kind]) if grids[kind] else None for kind in ("image", "video")}
    return [*ids, 9], [*kinds, 0], as_tensor | {"seconds": torch.tensor(grids["seconds"])}


def _reference(family: str, ids: list[int], kinds: list[int], grids: dict[str, Any], mask: Any) -> torch.Tensor:
    """Return what the model of transformers computes, (3, L)."""
    import transformers

    cls = getattr(transformers, MODELS[family])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=RATE)
    stand_in = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=partial(cls.get_vision_position_ids, None),
    )
    extra = {"second_per_grid_ts": grids["seconds"]} if family == "qwen2_5_vl" and grids["video"] is not None else {}
    positions, _ = cls.get_rope_index(
        stand_in,
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=grids["image"],
        video_grid_thw=grids["video"],
        attention_mask=mask.unsqueeze(0),
        **extra,
    )
    return positions[:, 0]


@pytest.mark.parametrize("family", ROPES)
@given(parts=st.lists(PARTS, max_size=6), left=st.integers(0, 5), answer=st.integers(1, 6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_equal_transformers_on_random_layouts(
    family: str, parts: list[tuple[Any, ...]], left: int, answer: int
) -> None:
    ids, kinds, grids = _tokens(family, parts)
    ids, kinds = [0] * left + ids, [0] * left + kinds
    mask = (torch.arange(len(ids)) >= left).long()
    inputs = {
        "image_grid_thw": grids["image"],
        "video_grid_thw": grids["video"],
        "second_per_grid_ts": grids["seconds"] if len(grids["seconds"]) else None,
    }
    found = position_ids(ROPES[family], torch.tensor(ids), mask, inputs)
    assert torch.equal(found[1:], _reference(family, ids, kinds, grids, mask))
    assert found[0].tolist() == [1] * left + list(range(len(ids) - left))

    # what is generated goes on as if it had been a part of the prompt
    whole = torch.cat([mask, torch.ones(answer, dtype=torch.long)])
    longer = _reference(family, ids + [7] * answer, kinds + [0] * answer, grids, whole)
    prompts = found.repeat(3, 1, 1)  # three samples
    behind = continued(prompts, answer)
    assert behind.shape == (3, 4, answer)
    assert torch.equal(behind[1, 1:], longer[:, -answer:])
    assert behind[2, 0].tolist() == list(range(len(ids) - left, len(ids) - left + answer))


def test_grids_by_hand() -> None:
    ids = torch.tensor([0, 1, START, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, END])
    found = ROPES["qwen2_vl"].positions(ids, torch.tensor([[1, 4, 6]]), attention_mask=(ids > 0).long())
    assert found.tolist() == [
        [0, 0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    side_by_side = torch.tensor([IMAGE, IMAGE, IMAGE, 1])
    found = ROPES["qwen2_vl"].positions(side_by_side, torch.tensor([[1, 2, 2], [1, 2, 4]]))
    assert found.tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    assert position_ids(None, ids, (ids > 0).long()).tolist() == [0, *range(9)]
    text = torch.tensor([[0, 0, 1, 2]])
    assert continued(text, 2).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("ids", "grid", "message"),
    [
        ([1, IMAGE, IMAGE], [[1, 2, 2]], "2 image tokens, but its image grids need 1"),
        ([1, IMAGE, 1, IMAGE], [[1, 2, 4]], "are not adjacent"),
        ([1, IMAGE], None, "1 image tokens, but its image grids need 0"),
    ],
)
def test_tokens_that_are_not_those_of_the_grids(ids: list[int], grid: Any, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        ROPES["qwen2_vl"].positions(torch.tensor(ids), None if grid is None else torch.tensor(grid))


def test_families_are_told_by_their_processors() -> None:
    from verl.models.transformers import glm4v, qwen2_vl, qwen3_vl
    from verl.utils.vision.positions import config_rope, vision_rope

    names = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|image|>": IMAGE}
    names |= {"<|begin_of_video|>": VIDEO_START, "<|end_of_video|>": VIDEO_END}
    tokenizer = SimpleNamespace(convert_tokens_to_ids=names.__getitem__, name_or_path="no/such/folder")

    def processor(name: str, image_token: str = "<|image_pad|>") -> Any:
        members = {"image_token": image_token, "video_token": "<|video_pad|>", "tokenizer": tokenizer}
        return type(name, (), members | {"image_processor": SimpleNamespace(merge_size=2)})()

    assert vision_rope(processor("Qwen2VLProcessor")) == ROPES["qwen2_vl"]
    assert vision_rope(processor("Qwen2_5_VLProcessor")) == VisionRope(IMAGE, VIDEO, tokens_per_second=2)
    assert vision_rope(processor("Qwen3VLProcessor")) == ROPES["qwen3_vl"]
    assert vision_rope(processor("Glm4vProcessor", "<|image|>")) == ROPES["glm4v"]
    assert vision_rope(processor("LlavaProcessor")) is None
    ids, grid = torch.tensor([1, IMAGE, 1]), torch.tensor([[1, 2, 2]])
    for module in (qwen2_vl, qwen3_vl, glm4v):
        found = module.get_rope_index(processor("Qwen2VLProcessor"), ids, image_grid_thw=grid)
        assert found.tolist() == [[0, 1, 2]] * 3
    markers = {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
    for family, rope in ROPES.items():
        vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=RATE)
        config = SimpleNamespace(
            model_type=family, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, **markers
        )
        assert config_rope(config) == rope
    with pytest.raises(PositionError, match="LlavaProcessor"):
        qwen2_vl.get_rope_index(processor("LlavaProcessor"), ids)
