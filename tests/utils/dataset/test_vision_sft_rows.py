"""Conversations with images and videos for supervised training: tokens, positions, mask and the processor's tensors."""

from typing import Any

import pytest
import torch
from PIL import Image

from examples.tiny_model import VL_KINDS, tiny_vl_config, vision_tokenizer, vl_processor
from tests.utils.dataset.test_vision_rows import clip, encoded, picture
from verl.errors import DataError
from verl.trainer.sft_trainer import padded_batch
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, RMDataset, SFTDataset, SFTTensorCollator
from verl.utils.dataset.vision_utils import MediaEncoder

pytest.importorskip("torchvision")


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def image(seed: int, width: int = 84, height: int = 56) -> dict[str, Any]:
    return {"bytes": encoded(picture(seed, width, height))}


ROWS = [
    {"messages": turns("1+1?", "2"), "images": None, "videos": None},
    {"messages": turns("<image>shape?", "round"), "images": [image(0)], "videos": None},
    {
        "messages": turns("<image> or <image>?", "both", "and <image>", "none"),
        "images": [image(1), image(2, 112, 112), image(3)],
        "videos": None,
    },
    {"messages": turns("<video> after <image>", "yes"), "images": [image(4)], "videos": [clip()]},
]


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    return {kind: vl_processor(kind, vision_tokenizer(kind)) for kind in VL_KINDS}


def build(processor: Any, files: Any, **config: Any) -> MultiTurnSFTDataset:
    settings = {"max_length": 256, "pad_mode": "no_padding", **config}
    return MultiTurnSFTDataset(files, processor.tokenizer, settings, processor)


@pytest.mark.parametrize("kind", VL_KINDS)
def test_items_are_what_the_whole_conversation_gives(kind: str, processors: Any, parquet: Any) -> None:
    """Encoded turn by turn they equal one call of the processor, and positions equal those of transformers' model."""
    import transformers

    processor = processors[kind]
    dataset = build(processor, parquet(ROWS))
    config = tiny_vl_config(kind, processor.tokenizer, hidden_size=32, num_layers=1)
    model = getattr(transformers, f"{VL_KINDS[kind]}Model")(config)
    encoder = MediaEncoder(processor, DataConfig())
    for row, expected in enumerate(ROWS):
        item, columns = dataset[row], {"images": expected["images"], "videos": expected["videos"]}
        messages = encoder.typed(expected["messages"], columns)
        text = processor.apply_chat_template(messages, tokenize=False)
        whole = encoder.encode(text, encoder.take(dict(columns)))
        ids = item["input_ids"]
        assert ids.tolist() == whole["input_ids"][0].tolist()
        said = [message["content"] for message in expected["messages"] if message["role"] == "assistant"]
        assert processor.tokenizer.decode(ids[item["loss_mask"].bool()]) == "".join(f"{text}<|end|>" for text in said)
        for name, value in item["multi_modal_inputs"].items():
            torch.testing.assert_close(value, whole[name])
        media = [name for name in whole if "pixel" in name or name.endswith("grid_thw")]
        assert set(item["multi_modal_inputs"]) == set(media)
        if media:
            names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            grids = {name: whole[name] for name in names if name in whole}
            shown, _ = model.get_rope_index(ids.unsqueeze(0), whole["mm_token_type_ids"], **grids)
            assert torch.equal(item["position_ids"][1:], shown[:, 0])
        assert item["position_ids"][0].tolist() == list(range(len(ids)))


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_batches_keep_images_with_their_rows(processors: Any, parquet: Any, pad_mode: str) -> None:
    processor, files = processors["qwen2_5_vl"], parquet(ROWS)
    dataset, single = build(processor, files, pad_mode=pad_mode), build(processor, files)
    order = [3, 0, 2, 1]
    batch = padded_batch(SFTTensorCollator(pad_mode)([dataset[at] for at in order]), processor.tokenizer.pad_token_id)
    width = max(len(single[at]["input_ids"]) for at in order)
    assert batch.batch["position_ids"].shape == (4, 4, width)
    for place, at in enumerate(order):
        size = len(single[at]["input_ids"])
        assert torch.equal(batch.batch["position_ids"][place, :, :size], single[at]["position_ids"])
        shown = batch.non_tensor_batch["multi_modal_inputs"][place]
        assert shown.keys() == single[at]["multi_modal_inputs"].keys()
        assert all(torch.equal(shown[name], value) for name, value in single[at]["multi_modal_inputs"].items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, r"row 1, column 'images'.* holds 0 images.* 1 <image> markers"),
        ({"images": [{"bytes": b"no image"}]}, r"row 1, column 'images' .*: entry 0: the image cannot be read"),
        ({"messages": turns("shape?", "<image>"), "images": [image(0)]}, r"row 1, column 'messages'.*1 image tokens"),
    ],
)
def test_rows_that_cannot_be_used_are_named(processors: Any, parquet: Any, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(processors["qwen2_5_vl"], parquet([ROWS[0], ROWS[1] | change]))[1]


def test_a_row_with_images_is_not_cut(processors: Any, parquet: Any) -> None:
    dataset = build(processors["qwen2_5_vl"], parquet(ROWS), max_length=12, truncation="right")
    assert (
        len(build(processors["qwen2_5_vl"], parquet(ROWS[:1]), max_length=4, truncation="right")[0]["input_ids"]) == 4
    )
    with pytest.raises(DataError, match="row 2.* tokens, data.max_length is 12"):
        dataset[2]


def test_pairs_of_text_are_the_conversations_of_one_turn(processors: Any, parquet: Any) -> None:
    """The same tokens, images and positions; their mask marks the positions before those that are learnt."""
    processor, single = processors["qwen2_5_vl"], [ROWS[0], ROWS[1], ROWS[3]]
    conversations = build(processor, parquet(single), pad_mode="right")
    names = ("prompt", "response")
    pairs = [
        {name: message["content"] for name, message in zip(names, row["messages"], strict=True)}
        | {"images": row["images"], "videos": row["videos"]}
        for row in single
    ]
    dataset = SFTDataset(parquet(pairs, "pairs.parquet"), processor.tokenizer, {"max_length": 256}, processor)
    for row in range(3):
        found, expected = dataset[row], conversations[row]
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found["loss_mask"][:-1], expected["loss_mask"][1:])
        assert found["multi_modal_inputs"].keys() == expected["multi_modal_inputs"].keys()
        assert all(torch.equal(found["multi_modal_inputs"][k], v) for k, v in expected["multi_modal_inputs"].items())
    batch = padded_batch(SFTTensorCollator("right")([dataset[row] for row in range(3)]), 0, marks_predictors=True)
    assert batch.batch["position_ids"].shape[:2] == (3, 4)
    assert "pixel_values" in batch.non_tensor_batch["multi_modal_inputs"][1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>?", "images": []}, r"row 1, column 'images'.* holds 0 images, but .* 1 <image> markers"),
        ({"prompt": "<video>?", "images": []}, r"row 1, column 'prompt': has 1 <video> markers"),
        (
            {"prompt": "<image>?", "images": [{"bytes": b"none"}]},
            r"row 1, column 'images' .*: entry 0: the image cannot",
        ),
    ],
)
def test_pairs_that_cannot_be_used_are_named(processors: Any, parquet: Any, row: Any, message: str) -> None:
    path = parquet([{"prompt": "a", "response": "b", "images": []}, {"response": "b", **row}])
    with pytest.raises(DataError, match=message):
        SFTDataset(path, processors["qwen2_5_vl"].tokenizer, {}, processors["qwen2_5_vl"])


def test_data_sets_of_text_refuse_images(processors: Any, parquet: Any) -> None:
    tokenizer = processors["qwen2_5_vl"].tokenizer
    rows = [{"prompt": "a", "response": "b", "chosen": "b", "rejected": "c", "images": []}]
    assert len(RMDataset(parquet(rows), tokenizer)) == len(SFTDataset(parquet(rows), tokenizer, {})) == 1
    path = parquet([*rows, rows[0] | {"images": [image(0)]}])
    with pytest.raises(DataError, match=r"row 1, column 'images': holds images, and this data set reads text only"):
        RMDataset(path, tokenizer)
    with pytest.raises(DataError, match=r"row 1, column 'images' .* the model has no processor"):
        SFTDataset(path, tokenizer, {})


def test_images_are_cut_to_the_patches_that_the_configuration_names(processors: Any) -> None:
    processor = processors[next(iter(VL_KINDS))]
    row = {"images": [{"image": Image.new("RGB", (130, 70)), "resized_height": 70, "resized_width": 130}]}
    encoders = [MediaEncoder(processor, DataConfig(image_patch_size=side)) for side in (None, 20)]
    sizes = [encoder.take(dict(row)).images[0].size for encoder in encoders]
    assert sizes[0] != sizes[1] == (120, 80)  # multiples of two patches
