"""Requests that code of users drives: their tokens are those of an independent rendering, and sampled ones stay."""

import copy
import json
import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from examples.tiny_model import vision_tokenizer, vl_processor
from tests.experimental.agent_loop.test_later_images import transformers_positions
from tests.utils.chat.conversations import TOOLS, conversation
from tests.utils.chat.formats import FORMATS, Format, is_installed, make_tokenizer
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.chat import ControlTexts, text_tokens
from verl.utils.vision.images import MediaError
from verl.utils.vision.limits import MediaConfig
from verl.workers.rollout.schemas import (
    AsyncRolloutRequest,
    AsyncRolloutRequestStateEnum,
    FinishReasonTypeEnum,
    Message,
    TokenizationSanityCheckModeEnum,
)

FORM = {form.name: form for form in FORMATS}
SCHEMAS = [OpenAIFunctionToolSchema.model_validate(tool).model_dump(exclude_none=True) for tool in TOOLS]
WRITTEN = [form for form in FORMATS if not form.rewrites and form.name not in ("gpt_oss", "qwen3")]
"""Formats whose whole rendering has every turn as it was when it was the last one."""


def request_of(
    processing_class: Any, messages: Sequence[Any] = ({"role": "user", "content": "Hi"},), **more: Any
) -> Any:
    return AsyncRolloutRequest(
        **{"messages": messages, "max_prompt_len": 512, "processing_class": processing_class} | more
    )


def rendered(tokenizer: Any, messages: Sequence[Any], prompt: bool = True, **options: Any) -> list[int]:
    """Return the tokens that transformers makes of a whole conversation."""
    options |= {"tokenize": False, "add_generation_prompt": prompt}
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except TypeError:  # DeepSeek's template wants the arguments of calls as text
        messages = copy.deepcopy(list(messages))
        for function in [call["function"] for message in messages for call in message.get("tool_calls", ())]:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        text = tokenizer.apply_chat_template(messages, **options)
    return text_tokens(tokenizer, text)


def sampled(request: Any) -> list[int]:
    return request.input_ids[request.loss_mask == 1].tolist()


def grow(request: Any, tokenizer: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Add messages as the loop of a user does; tool messages in a row together."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message["role"] == "assistant":
            request.get_generation_prompt_ids(tokenizer)
            request.add_assistant_message(tokenizer, message["content"], tool_calls=message.get("tool_calls"))
        elif message["role"] == "user":
            request.add_user_message(tokenizer, message["content"])
        else:
            answers = [message["content"]]
            while at < len(messages) and messages[at]["role"] == "tool":
                answers.append(messages[at]["content"])
                at += 1
            answers = [answer or "none" for answer in answers]  # empty answers are not written
            request.add_tool_response_messages(tokenizer, [ToolResponse(text=answer) for answer in answers])


def filled(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": message["content"] or "none"} if message["role"] == "tool" else message
        for message in messages
    ]


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_a_conversation_has_the_tokens_of_its_whole_rendering(form: Format) -> None:
    if not is_installed(form):
        pytest.skip("the package of this format is not installed")
    tokenizer = make_tokenizer(form)
    for seed in range(2):
        tools = SCHEMAS if form.tools and seed == 0 else None
        talk = filled(conversation(random.Random(seed), form, False, tools is not None))
        start = next(at for at, message in enumerate(talk) if message["role"] == "assistant")
        request = request_of(
            tokenizer, talk[:start], tool_schemas=tools, apply_chat_template_kwargs=form.options, max_prompt_len=4096
        )
        prompt = rendered(tokenizer, talk[:start], tools=tools, **form.options)
        assert request.prompt_ids[0].tolist() == prompt
        grow(request, tokenizer, talk[start:])
        found = request.get_generation_prompt_ids(tokenizer)
        cut = ControlTexts(tokenizer).of_others
        seen = [*talk[:start], *(each if each["role"] == "assistant" else cut(each) for each in talk[start:])]
        whole = rendered(tokenizer, seen, tools=tools, **form.options)
        assert tokenizer.decode(found) == tokenizer.decode(whole) and found == whole
        assert request.input_ids[0].tolist() == whole
        said = tokenizer.decode(sampled(request))
        texts = [message["content"] for message in talk[start:] if message["role"] == "assistant"]
        assert all(text in said for text in texts)
        assert not any(
            message["content"] in said
            for message in talk[start:]
            if len(message["content"]) > 12 and message["role"] != "assistant"
        )


def test_sampled_tokens_are_never_made_anew() -> None:
    """Tokens that the tokenizer would not choose stay, and a turn that was cut gets its end from the template."""
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    request = request_of(tokenizer)
    prompt = request.get_generation_prompt_ids(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    odd = [token for letter in "the sum" for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert odd != tokenizer.encode("the sum", add_special_tokens=False)
    request.add_assistant_message(tokenizer, "the sum", torch.tensor([[*odd, end]]), log_probs=[-0.5] * (len(odd) + 1))
    request.add_user_message(tokenizer, "Go on")
    after = tokenizer.encode("\n<|im_start|>user\nGo on<|im_end|>\n", add_special_tokens=False)
    assert request.input_ids[0].tolist() == [*prompt, *odd, end, *after]
    asked = request.get_generation_prompt_ids(tokenizer)
    start = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    assert asked == [*prompt, *odd, end, *after, *start] == request.get_generation_prompt_ids(tokenizer)
    request.add_assistant_message(tokenizer, "a", odd[:2], log_probs=[-1.0, -2.0])
    request.add_tool_response_messages(tokenizer, ["x"])
    rest = tokenizer.decode(request.input_ids[0].tolist()[len(asked) + 2 :])
    assert rest == "<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
    assert sampled(request) == [*odd, end, *odd[:2]]
    request.finalize(tokenizer, {"probe": 1.0, "user_turn_rewards": [0.5]}, FinishReasonTypeEnum.LENGTH)
    assert request.response_ids[0].tolist() == request.input_ids[0].tolist()[len(prompt) :]
    probs = request.rollout_log_probs
    assert probs.shape == request.response_ids.shape
    assert probs[request.response_loss_mask == 1].tolist() == [-0.5] * (len(odd) + 1) + [-1.0, -2.0]
    assert not probs[request.response_loss_mask == 0].any()
    assert request.reward_scores == {"probe": 1.0, "user_turn_rewards": [0.5]}


def test_a_request_ends_within_its_limits() -> None:
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    size = request_of(tokenizer).prompt_ids.shape[-1]
    most = size + 20
    request = request_of(tokenizer, max_response_len=12, max_model_len=most)
    assert request.state is AsyncRolloutRequestStateEnum.PENDING
    request.add_assistant_message(tokenizer, "1 + 2 = 3 and so on")
    request.add_user_message(tokenizer, "the sum of all of them")
    request.get_generation_prompt_ids(tokenizer)  # nobody continues it
    whole = request.input_ids[0].tolist()
    request.update_metrics({"a": 1}, "probe")
    request.update_metrics({"a": 2}, "probe")
    request.finalize(tokenizer, {})
    assert request.state is AsyncRolloutRequestStateEnum.COMPLETED
    assert request.metrics == {"probe": [{"a": 1}, {"a": 2}]}
    assert request.input_ids[0].tolist() == whole[:most]
    assert request.response_ids[0].tolist() == whole[size : size + 12]
    for name in ("attention_mask", "loss_mask", "position_ids"):
        value, prompt, response = (getattr(request, each + name) for each in ("", "prompt_", "response_"))
        assert (value.shape, prompt.shape, response.shape) == ((1, most), (1, size), (1, 12))
        assert torch.equal(torch.cat([prompt, response], -1), value[:, : size + 12])
    assert torch.equal(request.position_ids, torch.arange(most)[None]) and request.attention_mask.all()
    assert request.rollout_log_probs is None  # the turn came without

    untouched = request_of(tokenizer)
    untouched.get_generation_prompt_ids(tokenizer)
    untouched.finalize(tokenizer, {})
    assert untouched.response_ids.shape == (1, 0) and torch.equal(untouched.input_ids, untouched.prompt_ids)


def test_the_generation_prompt_is_dropped_where_nobody_continued_it() -> None:
    tokenizer = make_tokenizer(FORM["llama3_1"])
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    request = request_of(tokenizer, talk[:1])
    grow(request, tokenizer, talk[1:])
    request.get_generation_prompt_ids(tokenizer)
    request.finalize(tokenizer, {})
    assert request.input_ids[0].tolist() == rendered(tokenizer, talk, prompt=False)


def test_messages_before_the_first_turn_belong_to_the_prompt() -> None:
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    talk = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "there"}]
    request = request_of(tokenizer, [Message(**talk[0])])
    request.add_user_message(tokenizer, "there")
    assert request.prompt_ids[0].tolist() == rendered(tokenizer, talk) == request.get_generation_prompt_ids(tokenizer)


def test_a_prompt_of_tokens_stays() -> None:
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    ids = torch.tensor([rendered(tokenizer, [{"role": "user", "content": "other"}])])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None]}
    request = request_of(tokenizer, **given)
    assert request.get_generation_prompt_ids(tokenizer) == ids[0].tolist()
    with pytest.raises(ValueError, match="its prompt was given as input_ids: add messages after the first turn"):
        request.add_user_message(tokenizer, "b")
    request.add_assistant_message(tokenizer, "a")
    request.add_user_message(tokenizer, "b")
    found = tokenizer.decode(request.input_ids[0, ids.shape[1] :].tolist())
    assert found == "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    assert torch.equal(request.prompt_ids, ids)


def test_the_engine_may_see_the_whole_template_anew() -> None:
    """Qwen3's template drops the thoughts of earlier turns; the trajectory keeps them."""
    tokenizer = make_tokenizer(FORM["qwen3"])
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\na"},
        {"role": "user", "content": "b"},
    ]
    request = request_of(tokenizer, talk[:1], use_inference_chat_template=True)
    ids = tokenizer.encode(talk[1]["content"] + "<|im_end|>", add_special_tokens=False)
    request.add_assistant_message(tokenizer, talk[1]["content"], ids)
    request.add_user_message(tokenizer, "b")
    assert request.get_generation_prompt_ids(tokenizer) == rendered(tokenizer, talk)
    assert "long" in tokenizer.decode(request.input_ids[0].tolist()) and sampled(request) == ids


@pytest.mark.parametrize(("mode", "warnings"), [("disable", 0), ("strict", 2), ("ignore_strippable", 1)])
def test_differences_from_the_whole_conversation_are_logged(
    mode: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    for text, said in ((" a", "a"), ("b", "other")):  # a blank, and another text
        request = request_of(tokenizer, tokenization_sanity_check_mode=mode)
        end = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        request.add_assistant_message(tokenizer, said, end)
        with caplog.at_level(logging.WARNING, logger="verl.compat.rollout_requests"):
            request.finalize(tokenizer, {})
    assert len(caplog.records) == warnings
    assert all("they stay as they are" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_images_of_prompt_and_tools(kind: str) -> None:
    """Tokens, positions and inputs are those that processor and model of transformers make of the whole."""
    tokenizer = vision_tokenizer(kind)
    processor = vl_processor(kind, tokenizer)
    patch = 2 * processor.image_processor.patch_size
    images = [Image.new("RGB", (side * patch, 2 * patch), "red") for side in (2, 3, 4)]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    request = request_of(processor, prompt, multi_modal_data={"image": images[:1]})
    end = tokenizer.eos_token_id
    pad = tokenizer.convert_tokens_to_ids(processor.image_token)
    request.add_assistant_message(processor, "a", [*tokenizer.encode("a", add_special_tokens=False), end])
    answers = [ToolResponse(text="b" + processor.image_token, image=images[1:2]), ToolResponse(image=images[2:])]
    request.add_tool_response_messages(processor, answers)
    asked = request.get_generation_prompt_ids(processor)
    assert asked.count(pad) == 3
    text = tokenizer.decode(asked)
    whole = dict(processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))
    assert torch.equal(request.input_ids, whole["input_ids"])
    assert request.position_ids.shape == (4, request.input_ids.shape[1])
    assert torch.equal(request.position_ids[0], torch.arange(request.input_ids.shape[1]))
    assert torch.equal(request.position_ids[1:], transformers_positions(kind, whole))
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(request.multi_modal_inputs[name], whole[name])
    small = request_of(processor, media=MediaConfig(max_pixels=16))
    small.add_assistant_message(processor, "a", [end])
    for image, message in ((images[0], "max_pixels=16"), ("http://1.1.1.1/a.png", "names the address 'http://1.1.1.1")):
        with pytest.raises(MediaError, match=message):
            small.add_tool_response_messages(processor, [ToolResponse(image=[image])])
    with pytest.raises(ValueError, match="has images or videos: give the processor"):
        other = request_of(tokenizer)
        other.add_assistant_message(tokenizer, "a")
        other.add_tool_response_messages(tokenizer, [ToolResponse(image=images)])


def test_what_a_request_needs() -> None:
    tokenizer = make_tokenizer(FORM["qwen2_5"])
    for name in ("messages", "max_prompt_len", "processing_class"):
        with pytest.raises(ValueError, match=f"^{name} is required"):
            request_of(**{"processing_class": tokenizer, name: None})
    request = request_of(tokenizer)
    with pytest.raises(ValueError, match="3 tokens and 1 log-probabilities"):
        request.add_assistant_message(tokenizer, "a", [5, 6, 7], log_probs=[0.0])
    with pytest.raises(ValueError, match="finish reason tool_calls does not end a request"):
        request.finalize(tokenizer, {}, FinishReasonTypeEnum.TOOL_CALL)
    with pytest.raises(ValueError, match="'abort' is unknown: it must be one of length, stop, tool_calls"):
        FinishReasonTypeEnum.from_str("abort")
    assert [str(state) for state in AsyncRolloutRequestStateEnum] == [
        *("pending", "running", "completed", "failed", "tool_calling", "interacting")
    ]
    assert [str(mode) for mode in TokenizationSanityCheckModeEnum] == ["disable", "strict", "ignore_strippable"]
    twin = copy.deepcopy(request)
    twin.add_assistant_message(tokenizer, "a")
    assert len(request.messages) == 1 and twin.input_ids.shape != request.input_ids.shape
    before = request.input_ids
    request.add_tool_response_messages(tokenizer, [ToolResponse(), ToolResponse(text="")])
    assert request.input_ids is before and len(request.messages) == 1


def test_a_long_prompt_is_told(caplog: pytest.LogCaptureFixture) -> None:
    request_of(make_tokenizer(FORM["qwen2_5"]), max_prompt_len=3, batch_data_id=7)
    assert "(row 7): its prompt has" in caplog.text and "max_prompt_len is 3" in caplog.text


def test_a_template_that_cannot_be_written_in_pieces_is_refused() -> None:
    tokenizer = copy.deepcopy(make_tokenizer(FORM["qwen2_5"]))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="marks the end of an assistant's turn by no special token"):
        request_of(tokenizer)
