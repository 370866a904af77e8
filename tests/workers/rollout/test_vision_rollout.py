"""Rollouts of prompts with images and videos score what they sample as transformers does, before and after a sync."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.workers.rollout import tiny, vision
from verl.errors import WrongInput
from verl.protocol import DataProto
from verl.utils.dataset.vision_utils import encoded_media
from verl.utils.py_functional import object_array
from verl.utils.vision.multi_modal import concat_multi_modal_inputs
from verl.utils.vision.positions import config_rope
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.engine_settings import media_settings
from verl.workers.rollout.expansion import check_expansion
from verl.workers.rollout.server import TokenOutput
from verl.workers.rollout.sglang_rollout.importing import import_sglang
from verl.workers.rollout.sglang_rollout.media import MediaForm
from verl.workers.rollout.vllm_rollout.engine_args import build_engine_args
from verl.workers.rollout.vllm_rollout.media import requests_of

pytest.importorskip("torchvision")
CASES = [
    ("hf", "qwen2_vl"),
    ("hf", "qwen2_5_vl"),
    ("hf", "qwen3_vl"),
    ("hf", "glm4v"),
    ("vllm", "qwen2_5_vl"),
    ("sglang", "qwen2_5_vl"),
    pytest.param("vllm", "glm4v", marks=pytest.mark.full),
    pytest.param("vllm", "qwen2_vl", marks=pytest.mark.full),
    pytest.param("vllm", "qwen3_vl", marks=pytest.mark.full),
    pytest.param("sglang", "qwen2_vl", marks=pytest.mark.full),
    pytest.param("sglang", "qwen3_vl", marks=pytest.mark.full),
    pytest.param("sglang", "qwen3_vl_moe", marks=pytest.mark.full),
    pytest.param("sglang", "glm4v", marks=pytest.mark.full),
]


def check_log_probs(rollout: BaseRollout, model: Any, asked: DataProto) -> torch.Tensor:
    """Generate, and hold the log-probabilities to transformers' forward pass; returns the latter."""
    output = rollout.generate_sequences(asked)
    expected = vision.reference_log_probs(model, asked, output, tiny.TEMPERATURE)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)
    width = vision.PROMPT_LENGTH
    positions = output.batch["position_ids"]
    assert positions.shape == (len(asked), 4, width + tiny.RESPONSE_LENGTH)
    assert torch.equal(positions[..., :width], asked.batch["position_ids"])
    assert (positions[..., width - 1 :].diff(dim=-1) == 1).all()
    assert not output.non_tensor_batch  # what generation reads does not travel back
    return expected


def check_rollout(rollout: BaseRollout, model: Any, asked: DataProto, other: DataProto) -> None:
    """Generate with some weights, with those of the tower changed, and with other images in the same prompts."""
    vision.load_all(rollout, model)
    first = check_log_probs(rollout, model, asked)

    # a change of the vision tower alone: the rollout must not go on with what the old tower saw of the same images
    tiny.disturb(model.model.visual, 0.1, seed=5)
    vision.load_all(rollout, model, version=2)
    second = check_log_probs(rollout, model, asked)
    assert (first[2:] - second[2:]).abs().amax(dim=1).min() > 0.05
    assert torch.equal(first[:2], second[:2])  # text does not go through the tower
    held = rollout.weights_checksum()
    assert rollout.unverified == 0
    for name, value in vision.pairs_of(rollout, model):
        found = rollout.source_checksum(name, value)
        assert found is not None and held[found[0]] == int(found[1]), name

    # other images in the same prompts: the rows answer to what they show
    mixed = asked[:4]
    for column in ("multi_modal_data", "multi_modal_inputs"):
        kept, shown = asked.non_tensor_batch[column][:2], other.non_tensor_batch[column][2:4]
        mixed.non_tensor_batch[column] = np.concatenate([kept, shown])
    third = check_log_probs(rollout, model, mixed)
    assert (third[2:] - second[2:4]).abs().max() > 0.05


def check_stray_placeholder(rollout: BaseRollout, model: Any, asked: DataProto) -> None:
    """A placeholder without an image, as a model may have sampled in an earlier turn, is text to the engine."""
    text = asked[:2]
    ids = text.batch["input_ids"].clone()
    ids[:, -3] = model.config.image_token_id
    text.batch["input_ids"] = ids
    mask = text.batch["attention_mask"].bool()
    text.non_tensor_batch["raw_prompt_ids"] = object_array([ids[row][mask[row]].tolist() for row in range(2)])
    output = rollout.generate_sequences(text)
    for row in range(2):
        whole = output.batch["input_ids"][row][output.batch["attention_mask"][row].bool()][None]
        places = torch.arange(whole.shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            logits = model(input_ids=whole, position_ids=places, attention_mask=torch.ones_like(whole)).logits[0]
        size = int(output.batch["response_mask"][row].sum())
        scores = torch.log_softmax(logits[-size - 1 : -1] / tiny.TEMPERATURE, dim=-1)
        expected = scores.gather(-1, whole[0, -size:, None])[:, 0]
        torch.testing.assert_close(output.batch["rollout_log_probs"][row, :size], expected, atol=1e-4, rtol=0)


def check_turns(rollout: BaseRollout, model: Any, asked: DataProto, unseen: DataProto) -> None:
    """Images of several turns; a cached prefix counts for the same images only, whatever their tokens are."""
    params = {"max_tokens": tiny.RESPONSE_LENGTH, "temperature": tiny.TEMPERATURE, "seed": 3, "logprobs": True}
    raw, media, inputs = (
        asked.non_tensor_batch[name] for name in ("raw_prompt_ids", "multi_modal_data", "multi_modal_inputs")
    )

    def ask(ids: list[int], images: list[Any]) -> TokenOutput:
        return asyncio.run(rollout.generate(ids, params, "turn", multi_modal_data={"image": images}))

    def check(output: TokenOutput, shown: list[dict[str, Any]]) -> None:
        ids = torch.tensor(output.expanded_prompt_ids + output.token_ids)
        size = len(output.token_ids)
        due = vision.log_probs_of_end(model, ids, size, concat_multi_modal_inputs(shown), tiny.TEMPERATURE)
        torch.testing.assert_close(torch.tensor(output.log_probs), due, atol=1e-4, rtol=0)

    first = ask(list(raw[2]), media[2]["image"])
    check(first, [inputs[2]])
    said = [*raw[2], *first.token_ids, *raw[4]]
    second = ask(said, media[2]["image"] + media[4]["image"])
    check(second, [inputs[2], inputs[4]])
    assert second.expanded_prompt_ids[: len(first.expanded_prompt_ids)] == first.expanded_prompt_ids
    assert second.num_cached_tokens >= len(first.expanded_prompt_ids)
    third = ask(said, unseen.non_tensor_batch["multi_modal_data"][2]["image"] + media[4]["image"])
    check(third, [unseen.non_tensor_batch["multi_modal_inputs"][2], inputs[4]])
    assert third.num_cached_tokens <= list(raw[2]).index(model.config.image_token_id)
    with pytest.raises(ValueError, match="tokens for 1 images, and 2 come with it"):
        ask(list(raw[2]), media[4]["image"])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_log_probs_of_images_and_videos(name: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name != "hf":
        pytest.importorskip(name)
    if name == "sglang":
        import_sglang()  # it changes transformers
        request.getfixturevalue("ray_cluster")
    model, model_config = vision.make_model(tmp_path / "model", kind)
    rollout = vision.start(name, model, model_config)
    try:
        asked, other, unseen = (vision.prompts(model_config, tmp_path, seed=seed) for seed in (0, 50, 90))
        check_rollout(rollout, model, asked, other)
        if name != "hf":
            check_stray_placeholder(rollout, model, asked)
        if name == "sglang":
            check_turns(rollout, model, asked, unseen)
    finally:
        if name != "hf":
            rollout.shutdown()


def test_other_tokens_of_an_image_are_refused() -> None:
    pixels = SimpleNamespace()
    asked = DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[0, 5, 6], [9, 9, 7]]),
            "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        },
        non_tensors={"multi_modal_data": object_array([{}, {"image": [pixels]}])},
    )
    requests = requests_of(asked, [[5, 6], [9, 7]])
    assert requests == [
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": [9, 7], "multi_modal_data": {"image": [pixels]}},
    ]
    check_expansion(asked, [None, [9, 9, 7]], "vllm")
    with pytest.raises(RuntimeError, match=r"prompts\[1\]: .* has 4 tokens in the rollout engine and 3 in"):
        check_expansion(asked, [None, [9, 9, 9, 7]], "vllm")
    frames = ({"video": [(np.zeros((2, 3, 4, 4)), {"fps": 1.0})]},)
    asked = DataProto.from_dict(
        tensors={"input_ids": torch.ones(1, 1)}, non_tensors={"multi_modal_data": object_array(frames)}
    )
    assert requests_of(asked, [[1]])[0]["mm_processor_kwargs"] == {"do_sample_frames": False}


def test_arguments_for_a_model_that_sees(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    _, model_config = vision.make_model(tmp_path / "model", "qwen2_5_vl")
    settings = {"engine_kwargs": {"vllm": {"mm_processor_kwargs": {"max_pixels": 12544}}}}
    args = build_engine_args(tiny.rollout_config("vllm", limit_images=3, **settings), model_config)
    assert args["limit_mm_per_prompt"] == {"image": 3}
    assert args["mm_processor_kwargs"] == {"max_pixels": 12544}
    assert args["skip_tokenizer_init"] is False
    assert "limit_mm_per_prompt" not in build_engine_args(tiny.rollout_config("vllm"), model_config)


def test_settings_of_the_processor_with_sglang(tmp_path: Path) -> None:
    _, model_config = vision.make_model(tmp_path / "model", "qwen2_5_vl")
    given = {"mm_process_config": {"image": {"max_pixels": 28 * 56}}, "limit_mm_data_per_request": {"image": 1}}
    limits, kwargs = media_settings("sglang", given)
    image = Image.new("RGB", (112, 112))
    sizes = [encoded_media(model_config.processor, {"image": [image]}, each)["image_grid_thw"] for each in (kwargs, {})]
    assert [int(size.prod()) for size in sizes] == [4, 64]
    form = MediaForm(model_config.processor, config_rope(model_config.hf_config), limits, kwargs)
    with pytest.raises(WrongInput, match="the prompt has 2 images, and the engine takes 1: raise "):
        form.expand([5, 6], {"image": [image, image]})
    with pytest.raises(WrongInput, match="the prompt has tokens for 0 images, and 1 come with it"):
        form.expand([5, 6], {"image": [image]})
