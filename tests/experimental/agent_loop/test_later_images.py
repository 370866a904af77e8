"""Rows of trajectories whose images, or whose prompt with images, are not those of the data set."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from PIL import Image

from examples.tiny_model import GLM_MEDIA, VL_KINDS, vision_tokenizer, vl_processor
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.later_images import LATER_INPUTS, WholeTrajectories
from verl.experimental.agent_loop.rows import rows_of
from verl.experimental.agent_loop.tool_media import MediaRules
from verl.protocol import DataProto
from verl.utils.vision.multi_modal import replace_inputs, resolve
from verl.utils.vision.positions import position_ids, rope_of

PROMPT, RESPONSE = 40, 120


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_rows_equal_those_of_the_whole_text(kind: str) -> None:
    """Inputs are those of the processor's one call for the text and all media, positions those of transformers."""
    tokenizer = vision_tokenizer(kind)
    processor = vl_processor(kind, tokenizer)
    side = 2 * processor.image_processor.patch_size
    first, second = (Image.new("RGB", size, "red") for size in ((2 * side, 2 * side), (3 * side, 2 * side)))
    film = (np.full((4, 3, 2 * side, 2 * side), 99, dtype=np.uint8), metadata_of(4))
    shown, played = placeholders(kind)
    texts = [(f"<|user|>{shown}Hi<|end|><|assistant|>", [first]), ("<|user|>Hi<|end|><|assistant|>", [])]
    asked_prompts = [whole_of(processor, text, images)["input_ids"][0].tolist() for text, images in texts]
    cases: list[Case] = [
        Case(texts[0][0], [first], f"look<|end|><|tool|>{shown}<|end|><|assistant|>", [second]),
        Case("<|system|>Use tools.<|end|>" + texts[0][0], [first], "done"),
        Case("<|system|>Use tools.<|end|>" + texts[1][0], [], f"<|tool|>{shown}ok", [second]),
        Case(texts[0][0], [first], "as it was"),
        Case(texts[0][0], [first], f"<|end|><|tool|>{played}{shown}<|end|>so", [second], [film]),
        Case(texts[0][0], [first], f"~<|end|><|tool|>{shown}ok", [second], sampled="~"),
    ]
    asked = request([asked_prompts[0], asked_prompts[0], asked_prompts[1], *[asked_prompts[0]] * 3], processor)
    pad = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    outputs = []
    for case in cases:
        ids = case.encoded(processor)["input_ids"][0].tolist()
        count = len(whole_of(processor, case.prompt, case.images)["input_ids"][0])
        mask = [int(tokenizer.decode([token]) == case.sampled) for token in ids[count:]]
        response = [pad if is_sampled else token for token, is_sampled in zip(ids[count:], mask, strict=True)]
        media = {"image": case.images + case.later, "video": case.films}
        outputs.append(
            AgentLoopOutput(
                prompt_ids=ids[:count],
                response_ids=response,
                response_mask=mask,
                multi_modal_data={name: items for name, items in media.items() if items} or None,
                num_later_images=len(case.later),
                num_later_videos=len(case.films),
            )
        )
    found = rows_of(outputs, asked, RESPONSE, tokenizer.pad_token_id, WholeTrajectories(processor, {}))
    for row, case in enumerate(cases):
        encoded = case.encoded(processor)
        attended = found.batch["attention_mask"][row].bool()
        expected = encoded["input_ids"][0].tolist()
        tokens = found.batch["input_ids"][row][attended].tolist()
        assert [pair for pair in zip(tokens, expected, strict=True) if pair[0] != pair[1]] == (
            [(pad, tokenizer.encode(case.sampled)[0])] if case.sampled else []
        )
        places = found.batch["position_ids"][row][:, attended]
        assert torch.equal(places[1:], transformers_positions(kind, encoded)), row
        assert torch.equal(places[0], torch.arange(len(expected)))
        inputs = found.non_tensor_batch[LATER_INPUTS][row]
        if row == 3:
            assert inputs is None
            continue
        names = [name for name in encoded if name.startswith(("pixel_values", "image_grid", "video_grid"))]
        assert set(inputs) == set(names)
        for name in names:
            torch.testing.assert_close(inputs[name], encoded[name], atol=0, rtol=0)
    columns = {"multi_modal_inputs": np.array([{"old": row} for row in range(6)], dtype=object)}
    replace_inputs(columns, found.non_tensor_batch[LATER_INPUTS])
    replaced = resolve(columns["multi_modal_inputs"])  # with a running Ray the columns hold handles
    assert replaced[3] == {"old": 3} and "pixel_values" in replaced[0]


def test_what_cannot_be_placed_is_named() -> None:
    processor = vl_processor("qwen2_5_vl", vision_tokenizer("qwen2_5_vl"))
    asked = request([[65]], processor)
    whole = WholeTrajectories(processor, {})
    output = {"prompt_ids": [65], "response_ids": [66], "response_mask": [1], "num_later_images": 1}
    with pytest.raises(ValueError, match=r"trajectory 0: .*0 image tokens, .* the same mm_processor_kwargs"):
        images = {"image": [Image.new("RGB", (56, 56))]}
        rows_of([AgentLoopOutput(**output, multi_modal_data=images)], asked, 4, 0, whole)
    with pytest.raises(ValueError, match=r"trajectory 0: .*0 video tokens, .* the same mm_processor_kwargs"):
        films = {"video": [(np.zeros((4, 3, 56, 56), dtype=np.uint8), metadata_of(4))]}
        rows_of([AgentLoopOutput(**output, multi_modal_data=films)], asked, 4, 0, whole)


@pytest.mark.parametrize("kind, given, videos", [("qwen2_5_vl", None, None), ("glm4v", None, 1), ("glm4v", 0, 0)])
def test_the_most_videos_of_a_conversation(kind: str, given: int | None, videos: int | None) -> None:
    """vLLM takes one video with GLM-4V."""
    tokenizer = vision_tokenizer(kind)
    limits = {} if given is None else {"limit_mm_per_prompt": {"video": given}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": limits}}}})
    rules = MediaRules.of(config, tokenizer, vl_processor(kind, tokenizer))
    assert rules.limits == {"image": None, "video": videos}


@dataclass
class Case:
    """Prompt and response with their images and videos; ``sampled`` becomes an image token that the model sampled."""

    prompt: str
    images: list[Image.Image]
    response: str
    later: list[Image.Image] = field(default_factory=list)
    films: list[Any] = field(default_factory=list)
    sampled: str = ""

    def encoded(self, processor: Any) -> dict[str, Any]:
        """Return what the processor makes of all of it at once."""
        return whole_of(processor, self.prompt + self.response, self.images + self.later, self.films)


def placeholders(kind: str) -> tuple[str, str]:
    """Return how a family writes an image and a video."""
    image, video = GLM_MEDIA.values() if kind == "glm4v" else GLM_MEDIA
    return image, video


def metadata_of(frames: int) -> dict[str, Any]:
    """Return what the data set says of a video with two frames a second."""
    return {"fps": 2.0, "frames_indices": list(range(frames)), "total_num_frames": frames, "duration": frames / 2}


def whole_of(processor: Any, text: str, images: list[Image.Image], films: Sequence[Any] = ()) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if films:
        more = {"videos": [film for film, _ in films], "video_metadata": [metadata for _, metadata in films]}
        more["do_sample_frames"] = False
    return dict(processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt", **more))


def transformers_positions(kind: str, encoded: dict[str, Any]) -> torch.Tensor:
    """Return the positions of a whole text (3, L) by the model of transformers."""
    cls = getattr(transformers, f"{VL_KINDS[kind]}Model")
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    stand_in = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        get_vision_position_ids=partial(cls.get_vision_position_ids, None),
    )
    names = ("image_grid_thw", "video_grid_thw")
    extra = {"second_per_grid_ts": encoded["second_per_grid_ts"]} if "second_per_grid_ts" in encoded else {}
    positions, _ = cls.get_rope_index(
        stand_in,
        input_ids=encoded["input_ids"],
        mm_token_type_ids=encoded["mm_token_type_ids"],
        attention_mask=torch.ones_like(encoded["input_ids"]),
        **{name: encoded.get(name) for name in names},
        **extra,
    )
    return positions[:, 0]


def request(prompts: list[list[int]], processor: object) -> DataProto:
    pad = processor.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (PROMPT - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (PROMPT - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    image = Image.new("RGB", (4 * processor.image_processor.patch_size,) * 2, "red")
    grid = dict(processor.image_processor(images=[image], return_tensors="pt"))
    pad_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    rows = [
        position_ids(rope_of(processor), row, attended, grid if (row == pad_id).any() else {})
        for row, attended in zip(ids, mask, strict=True)
    ]
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "position_ids": torch.stack(rows)})
