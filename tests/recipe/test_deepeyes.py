"""DeepEyes: its chat template, data set, reward and judge, and the task of its CPU script."""

import random
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image
from transformers.utils.chat_template_utils import render_jinja_template

from examples.tiny_model import byte_tokenizer, vision_tokenizer, vl_processor
from recipe.deepeyes import deepeyes, textures
from recipe.deepeyes.deepeyes import CustomRLHFDataset, JudgeError, compute_score, compute_score_batch, served_model
from recipe.deepeyes.exact_judge import Handler
from tests.recipe.genrm_server import Judge
from verl.base_config import WrongInput
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.chat import ChatFormat
from verl.utils.dataset.vision_utils import process_image
from verl.utils.net_utils import get_free_port

CONFIGS = Path(deepeyes.__file__).parent / "configs"
TEXT_TEMPLATE = Path(__file__).parents[1] / "utils/chat/templates/qwen2_5.jinja"
FAST = {"retry_delay_s": 0.01, "timeout_s": 5.0, "batch_timeout_s": 10.0}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
LOOKED = {"question": "which?", "rollout_reward_scores": {"image_zoom_in_tool": 2.0}}
CALL = {"type": "function", "function": {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 9, 9]}}}


# ---- the chat template


@pytest.fixture(scope="module")
def template() -> str:
    config = yaml.safe_load((CONFIGS / "deepeyes_multiturn_grpo.yaml").read_text())
    return str(config["actor_rollout_ref"]["model"]["custom_chat_template"])


def tools() -> list[Any]:
    made = initialize_tools_from_config(str(CONFIGS / "image_zoom_in_tool_config.yaml"))
    return [tool.get_openai_tool_schema().model_dump(exclude_none=True) for tool in made]


def written(template: str, messages: list[Any], **options: Any) -> str:
    (text,), _ = render_jinja_template([messages], chat_template=template, **options)
    return text


def test_text_is_written_as_qwen2_5_does(template: str) -> None:
    said = {"role": "assistant", "content": "so"}
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "what?"}]
    turns = [{**said, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = TEXT_TEMPLATE.read_text()
    for messages in (asked, [*asked, *turns, said], [*asked, {**turns[0], "content": ""}, *turns[1:]]):
        for options in ({}, {"tools": tools()}, {"tools": tools(), "add_generation_prompt": True}):
            assert written(template, messages, **options) == written(text, messages, **options)


def test_images_stand_in_any_turn_and_pieces_make_the_whole(template: str) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer = byte_tokenizer(template, [*special, "<|video_pad|>", "<|end|>"])
    tokenizer.eos_token = "<|im_end|>"
    chat = ChatFormat(tokenizer, vl_processor("qwen2_5_vl", tokenizer), tools=tools())
    chat.prove()
    shown = [{"type": "image"}, {"type": "text", "text": "near"}]
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    text = chat.render([asked], generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools") and '"bbox_2d"' in text
    assert text.endswith(f"<|im_start|>user\n{IMAGE}what?<|im_end|>\n<|im_start|>assistant\n")
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    grown = chat.after_turn([asked, turn], [{"role": "tool", "content": shown}], stopped=True)
    assert chat.decode(grown.token_ids) == (
        f"\n<|im_start|>user\n<tool_response>\n{IMAGE}near\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


# ---- the data set


def test_rows_give_their_image_to_the_tool(tmp_path: Path) -> None:
    picture = textures.as_png(Image.new("RGB", (60, 90), "red"))
    prompt = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "<image>\nwhat?"}]
    row = {"data_source": "vstar", "prompt": prompt, "images": [{"bytes": picture}]}
    row |= {"reward_model": {"ground_truth": "a cat"}, "extra_info": {"index": "7", "question": "what?"}}
    own = {"image_zoom_in_tool": {"create_kwargs": {"image": {"bytes": b"own"}}}}
    rows = [row, {**row, "extra_info": {**row["extra_info"], "tools_kwargs": own}}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    tokenizer = vision_tokenizer("qwen2_5_vl")
    options = {"max_prompt_length": 512, "return_raw_chat": True, "filter_overlong_prompts": False}
    processor = vl_processor("qwen2_5_vl", tokenizer)
    dataset = CustomRLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, options, processor)
    first, second = dataset[0], dataset[1]
    assert first["agent_name"] == "tool_agent" and first["raw_prompt"][0]["content"] == deepeyes.SYSTEM
    assert first["raw_prompt"][1]["content"] == [{"type": "image"}, {"type": "text", "text": "\nwhat?"}]
    given = first["tools_kwargs"]["image_zoom_in_tool"]["create_kwargs"]["image"]
    assert process_image(given).size == first["multi_modal_data"]["image"][0].size  # regions are in its pixels
    assert second["tools_kwargs"]["image_zoom_in_tool"]["create_kwargs"]["image"]["bytes"] == b"own"


# ---- the reward


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of the judge of the CPU script."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def said(answer: str, thought: str = "<think>hm</think>") -> str:
    return f"{thought}<answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("solution", "info", "score"),
    [
        (said("A cat"), LOOKED, 0.8 + 1.2),
        (said("A cat"), {"rollout_reward_scores": {"image_zoom_in_tool": 0.0}}, 0.8),  # a call that showed nothing
        (said("A cat"), {}, 0.8),
        (said("a dog"), LOOKED, 0.0),
        (said("A cat", thought="<think>hm"), LOOKED, 0.8 + 1.2 - 0.2),
        (said("A cat", thought="from the prompt on</think>"), LOOKED, 0.8 + 1.2),
        (said("A cat", thought="from the prompt on</think><think>hm</think>"), LOOKED, 0.8 + 1.2),
        (said("A cat", thought="from the prompt on</think></think>"), LOOKED, 0.8 + 1.2 - 0.2),
        (said("a dog") + said("A cat", thought=""), LOOKED, 0.8 + 1.2 - 0.2),
        ("<think><answer>A cat</answer></think>A cat", LOOKED, -0.2),  # the answer is a thought
        (said("A cat " * 200), LOOKED, -0.2),
        (said(""), LOOKED, -0.2),
    ],
)
def test_reward_by_hand(solution: str, info: Any, score: float, judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_AS_A_JUDGE_BASE", judge)
    found = compute_score("vstar", solution, "a cat", info, **FAST)
    assert found["score"] == pytest.approx(score)
    assert found["acc"] == float(score > 0.5) and found["looked"] == float(info == LOOKED)


def test_a_batch_keeps_its_order_and_names_the_model_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_AS_A_JUDGE_API_KEY", "secret")
    with Judge(lambda handler, text, times: "It says the same: CORRECT." if "7" in text else "wrong") as server:
        answers = [said(str(number)) for number in range(6, 9)] + ["no answer"]
        infos = [{"question": "how many?"}] * 4
        options = {"base_url": server.url, "model": "big", **FAST}
        scores = compute_score_batch(["vstar"] * 4, answers, ["seven"] * 4, infos, **options)
    assert [score["acc"] for score in scores] == [0.0, 1.0, 0.0, 0.0]
    assert len(server.requests) == 3 and server.keys == {"Bearer secret"} and server.requests[0]["model"] == "big"
    assert "Question: how many?\nReference: seven\nAnswer: " in server.requests[0]["messages"][0]["content"]


def test_without_a_judge_or_a_verdict_the_reason_is_told(judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_AS_A_JUDGE_BASE", raising=False)
    with pytest.raises(WrongInput, match="LLM_AS_A_JUDGE_BASE is not set: start an OpenAI-compatible server"):
        compute_score("vstar", said("x"), "x", {})
    assert served_model(judge, "", 5.0) == "exact"
    gone = f"http://127.0.0.1:{get_free_port()}/v1"
    with pytest.raises(JudgeError, match=r"/v1/models names no model: .*set reward_kwargs\.model"):
        compute_score("vstar", said("x"), "x", {}, base_url=gone)
    with Judge(lambda handler, text, times: "Hm.") as server:
        with pytest.raises(JudgeError, match="replied neither CORRECT nor WRONG; its reply ends with 'Hm.'"):
            compute_score("vstar", said("x"), "x", {}, base_url=server.url, model="big", **FAST)
        server.answer = lambda handler, text, times: handler.send(401, {"error": "no key"})
        (score,) = compute_score_batch(["v"], [said("y")], ["y"], [{}], base_url=server.url, model="big", **FAST)
        assert isinstance(score, JudgeError) and "HTTP 401" in str(score)


# ---- the task of the CPU script


def test_the_small_copy_does_not_show_what_the_picture_does() -> None:
    half = textures.SMALL // 2
    for seed in range(20):
        rng = random.Random(seed)
        letters = "".join(rng.choice(textures.TEXTURES) for _ in textures.PLACES)
        picture = textures.draw(letters, rng)
        copy = np.asarray(process_image(textures.small(picture)))[:, :, 0].astype(int)
        for letter, place in zip(letters, textures.PLACES, strict=True):
            x, y = (half * index for index in textures.PLACES[place])
            assert np.ptp(copy[y + 3 : y + half - 3, x + 3 : x + half - 3]) <= 2
            shown = np.asarray(process_image(picture.crop(textures.box_of(place))))[:, :, 0].astype(float)
            centre = shown[20:36, 20:36]
            spread = [float(centre.mean(axis=axis).std()) for axis in (1, 0)]
            lines = "".join(name for name, size in zip("HV", spread, strict=True) if size > 20)
            assert lines or ("C" if centre.std() > 20 else "P") == letter
            assert not lines or lines == letter


def test_supervised_rows_look_as_the_tool_shows() -> None:
    tables = textures.tables(seed=0)
    looks = [row for row in tables["sft_train"] if len(row["messages"]) == 4]
    assert len(looks) / len(tables["sft_train"]) == pytest.approx(0.4, abs=1e-3)
    asked, call, shown, answer = looks[0]["messages"]
    assert call["content"].startswith(textures.HEAD)
    assert shown["content"].startswith("<image>Zoomed in on the image to the region [")
    right = [
        row for row in looks if str(textures.box_of(row["messages"][0]["content"][7:])) in row["messages"][2]["content"]
    ]
    assert 0.55 < len(right) / len(looks) < 0.7  # half of them, and a quarter of the others by chance
    row = tables["train"][0]
    picture = row["extra_info"]["tools_kwargs"]["image_zoom_in_tool"]["create_kwargs"]["image"]
    assert picture["bytes"] == row["images"][0]["bytes"]
    assert process_image(row["images"][0]).size == (textures.SMALL,) * 2 and process_image(picture).size == (112, 112)
