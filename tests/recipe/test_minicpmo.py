"""Prompts for MiniCPM-o by the processor that vLLM has, with an image processor in place of the model's remote code."""

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from examples.tiny_model import SPECIAL_TOKENS, byte_tokenizer
from recipe.minicpmo.rl_dataset import PLACEHOLDER, RLHFDataset
from verl.errors import DataError
from verl.utils.import_utils import load_extern_type

processors = pytest.importorskip("vllm.transformers_utils.processors.minicpmo")

MARKS = {
    "im_start": "<image>",
    "im_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "audio_start": "<|audio_start|>",
    "audio_end": "<|audio_end|>",
    "spk_start": "<|spk_bos|>",
    "spk_end": "<|spk_eos|>",
}
QUERIES, SLICE, PATCH, LENGTH = 4, 28, 14, 64


class FakeMiniCPMImages(BaseImageProcessor):
    """Stands in for the image processor of the model's repository: every 28 x 28 pixels are a slice of four patches."""

    model_input_names = ["pixel_values"]

    def __call__(self, images, **options):
        slices = [
            torch.zeros(3, PATCH, 4 * PATCH)
            for image in images
            for _ in range(image.width // SLICE * (image.height // SLICE))
        ]
        sizes = torch.full((len(slices), 2), SLICE // PATCH, dtype=torch.int32)
        data = {
            "pixel_values": [slices],
            "image_sizes": [[image.size for image in images]],
            "tgt_sizes": [sizes],
        }
        return BatchFeature(data)

    def get_slice_image_placeholder(self, size, index, most_slices, use_image_id):
        count = size[0] // SLICE * (size[1] // SLICE)
        first = f"<image>{'_' * QUERIES}</image>"
        return first + f"<slice>{'_' * QUERIES}</slice>" * (count - 1)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer(special_tokens=[*SPECIAL_TOKENS, *MARKS.values()])
    for name, text in MARKS.items():
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    return tokenizer


@pytest.fixture(scope="module")
def processor(tokenizer):
    return processors.MiniCPMOProcessor(FakeMiniCPMImages(), WhisperFeatureExtractor(), tokenizer)


def dataset(folder, tokenizer, processor, content, images, **changes):
    row = {
        "data_source": "screens",
        "prompt": [{"role": "user", "content": content}],
        "images": [save(folder, index, image) for index, image in enumerate(images)],
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }
    pd.DataFrame([row]).to_parquet(folder / "rows.parquet")
    config = {
        "max_prompt_length": LENGTH,
        "image_key": "images",
        "filter_overlong_prompts": False,
        "truncation": "error",
        "train_files": "rows",
        "return_raw_chat": True,
    }
    return RLHFDataset(str(folder / "rows.parquet"), tokenizer, OmegaConf.create(config | changes), processor)


def save(folder, index, size):
    path = folder / f"{index}.png"
    Image.new("RGB", size, (200, 10, 10)).save(path)
    return {"path": str(path)}


def test_slices_lie_where_the_padded_prompt_has_their_tokens(tmp_path, tokenizer, processor):
    content = "a<image>b<image>c"
    row = dataset(tmp_path, tokenizer, processor, content, [(SLICE, SLICE), (2 * SLICE, SLICE)])[0]
    inputs = row["multi_modal_inputs"]
    assert sorted(inputs) == ["image_bound", "pixel_values", "tgt_sizes"]
    assert len(inputs["pixel_values"]) == 3 and inputs["tgt_sizes"].tolist() == [[2, 2]] * 3
    ids = row["input_ids"]
    assert ids.shape == row["attention_mask"].shape == row["position_ids"].shape == (LENGTH,)
    underscore = tokenizer.convert_tokens_to_ids("_")
    inside = torch.zeros(LENGTH, dtype=torch.bool)
    for start, end in inputs["image_bound"].tolist():
        assert end - start == QUERIES and ids[start:end].tolist() == [underscore] * QUERIES
        assert ids[start - 1].item() in (tokenizer.im_start_id, tokenizer.slice_start_id)
        inside[start:end] = True
    assert inside.equal(ids == underscore)
    shown = tokenizer.decode(row["raw_prompt_ids"])
    assert shown.count(PLACEHOLDER) == 2 and f"a{PLACEHOLDER}b{PLACEHOLDER}c" in shown
    assert [image.size for image in row["multi_modal_data"]["image"]] == [(SLICE, SLICE), (2 * SLICE, SLICE)]


def test_a_row_of_text_is_that_of_the_base_class(tmp_path, tokenizer, processor):
    row = dataset(tmp_path, tokenizer, processor, "hello", [])[0]
    text = dataset(tmp_path, tokenizer, None, "hello", [])[0]
    assert row["input_ids"].equal(text["input_ids"]) and row["position_ids"].equal(text["position_ids"])
    assert row["multi_modal_data"] == {} and row["multi_modal_inputs"] == {}


@pytest.mark.parametrize(("content", "count"), [("a<image>", 2), ("a<image>b<image>", 1)])
def test_markers_and_images_must_match(tmp_path, tokenizer, processor, content, count):
    with pytest.raises(DataError, match="image"):
        _ = dataset(tmp_path, tokenizer, processor, content, [(SLICE, SLICE)] * count)[0]


def test_it_is_a_class_for_the_configuration():
    assert load_extern_type("recipe/minicpmo/rl_dataset.py", "RLHFDataset").__name__ == "RLHFDataset"
