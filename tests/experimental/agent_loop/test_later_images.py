"""Rows of trajectories whose images, or whose prompt with images, are not those of the data set."""

import numpy as np
import pytest
import torch
from PIL import Image

from examples.tiny_model import SPECIAL_TOKENS, VISION_CHAT_TEMPLATE, VISION_TOKENS, byte_tokenizer, vl_processor
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.later_images import LATER_INPUTS, WholeTrajectories
from verl.experimental.agent_loop.rows import rows_of
from verl.protocol import DataProto
from verl.utils.vision.multi_modal import replace_inputs, resolve
from verl.utils.vision.positions import position_ids, rope_of

PROMPT, RESPONSE = 40, 60
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_equal_those_of_the_whole_text(kind: str) -> None:
    """Positions and inputs are those of the processor's one call for the text and all images."""
    tokenizer = byte_tokenizer(VISION_CHAT_TEMPLATE, SPECIAL_TOKENS + VISION_TOKENS)
    processor = vl_processor(kind, tokenizer)
    side = 2 * processor.image_processor.patch_size
    first, second = (Image.new("RGB", size, "red") for size in ((2 * side, 2 * side), (3 * side, 2 * side)))
    texts = [(f"<|user|>{SHOWN}Hi<|end|><|assistant|>", [first]), ("<|user|>Hi<|end|><|assistant|>", [])]
    asked_prompts = [whole_of(processor, text, images)["input_ids"][0].tolist() for text, images in texts]
    cases = [  # prompt and response with their images
        (texts[0][0], [first], f"look<|end|><|tool|>{SHOWN}<|end|><|assistant|>", [second]),
        ("<|system|>Use tools.<|end|>" + texts[0][0], [first], "done", []),
        ("<|system|>Use tools.<|end|>" + texts[1][0], [], f"<|tool|>{SHOWN}ok", [second]),
        (texts[0][0], [first], "as it was", []),
    ]
    asked = request([asked_prompts[0], asked_prompts[0], asked_prompts[1], asked_prompts[0]], processor)
    outputs = []
    for prompt, images, response, later in cases:
        ids = whole_of(processor, prompt + response, images + later)["input_ids"][0].tolist()
        count = len(whole_of(processor, prompt, images)["input_ids"][0])
        size = len(ids) - count
        outputs.append(
            AgentLoopOutput(
                prompt_ids=ids[:count],
                response_ids=ids[count:],
                response_mask=[1] * size,
                multi_modal_data={"image": images + later} if images + later else None,
                num_later_images=len(later),
            )
        )
    pad = tokenizer.pad_token_id
    found = rows_of(outputs, asked, RESPONSE, pad, WholeTrajectories(processor, {}))
    for row, (prompt, images, response, later) in enumerate(cases):
        encoded = whole_of(processor, prompt + response, images + later)
        attended = found.batch["attention_mask"][row]
        assert found.batch["input_ids"][row][attended.bool()].tolist() == encoded["input_ids"][0].tolist()
        expected = position_ids(rope_of(processor), found.batch["input_ids"][row], attended, encoded)
        assert torch.equal(found.batch["position_ids"][row][:, attended.bool()], expected[:, attended.bool()]), row
        inputs = found.non_tensor_batch[LATER_INPUTS][row]
        if row == 3:
            assert inputs is None
            continue
        names = [name for name in ("pixel_values", "image_grid_thw") if name in encoded]
        assert set(inputs) == set(names)
        for name in names:
            torch.testing.assert_close(inputs[name], encoded[name], atol=0, rtol=0)
    columns = {"multi_modal_inputs": np.array([{"old": row} for row in range(4)], dtype=object)}
    replace_inputs(columns, found.non_tensor_batch[LATER_INPUTS])
    replaced = resolve(columns["multi_modal_inputs"])  # with a running Ray the columns hold handles
    assert replaced[3] == {"old": 3} and "pixel_values" in replaced[0]


def test_what_cannot_be_placed_is_named() -> None:
    tokenizer = byte_tokenizer(VISION_CHAT_TEMPLATE, SPECIAL_TOKENS + VISION_TOKENS)
    processor = vl_processor("qwen2_5_vl", tokenizer)
    asked = request([[65]], processor)
    whole = WholeTrajectories(processor, {})
    output = {"prompt_ids": [65], "response_ids": [66], "response_mask": [1], "num_later_images": 1}
    with pytest.raises(ValueError, match=r"trajectory 0: .*0 image tokens, .* the same mm_processor_kwargs"):
        images = {"image": [Image.new("RGB", (56, 56))]}
        rows_of([AgentLoopOutput(**output, multi_modal_data=images)], asked, 4, 0, whole)
    with pytest.raises(ValueError, match="trajectory 0: .* a row with videos"):
        rows_of([AgentLoopOutput(**output, multi_modal_data={"video": [1]})], asked, 4, 0, whole)


def whole_of(processor: object, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    return dict(processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt"))


def request(prompts: list[list[int]], processor: object) -> DataProto:
    pad = processor.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (PROMPT - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (PROMPT - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    image = Image.new("RGB", (4 * processor.image_processor.patch_size,) * 2, "red")
    grid = dict(processor.image_processor(images=[image], return_tensors="pt"))
    pad_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = [
        position_ids(rope_of(processor), row, attended, grid if (row == pad_id).any() else {})
        for row, attended in zip(ids, mask, strict=True)
    ]
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "position_ids": torch.stack(rows)})
