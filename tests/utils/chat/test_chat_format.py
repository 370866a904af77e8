"""What follows a sampled turn: separators, messages and generation prompt, never the turn itself again."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import byte_tokenizer
from verl.errors import ChatFormatError
from verl.utils.chat import Appended, ChatFormat, Restarted

TEMPLATES = Path(__file__).parent / "templates"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
# drops what was thought in earlier turns and trims what was said
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@pytest.fixture(scope="module")
def qwen() -> PreTrainedTokenizerFast:
    return chatml((TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8"))


def say(*turns: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]


def appended(chat: ChatFormat, *arguments: Any, **options: Any) -> str:
    result = chat.after_turn(*arguments, **options)
    assert isinstance(result, Appended)
    return chat.tokenizer.decode(result.token_ids)


def test_the_separator_after_the_end_of_a_turn_is_kept(qwen: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(qwen)
    chat.prove()
    talk = say("hi", "hello ", "bye", "see you")
    rest = "\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    assert appended(chat, talk[:2], talk[2:3], stopped=True) == rest
    assert appended(chat, talk[:2], talk[2:3], stopped=False) == "<|im_end|>" + rest
    prompt = chat.prompt(talk[:1])
    sampled = qwen.encode("hello <|im_end|>", add_special_tokens=False)
    whole = chat.prompt(talk[:3])
    assert prompt + sampled + chat.after_turn(talk[:2], talk[2:3], stopped=True).token_ids == whole


@pytest.mark.parametrize("form", ["text", "objects", "strings", "broken"])
def test_tool_messages_follow_a_call(qwen: PreTrainedTokenizerFast, form: str) -> None:
    chat = ChatFormat(qwen, tools=[ADD])
    chat.prove()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    arguments = {"objects": {"a": 1, "b": 2}, "strings": '{"a": 1, "b": 2}', "broken": '{"a": 1,'}.get(form)
    turn: dict[str, Any] = {"role": "assistant", "content": call}
    if arguments is not None:
        turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
        turn["tool_calls"][0]["function"]["arguments"] = arguments
    results = [{"role": "tool", "name": "add", "content": text} for text in ("3", "<|im_end|>x")]
    rest = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n<|im_end|>x\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert appended(chat, [*say("1+2?"), turn], results, stopped=True) == rest
    if form in ("objects", "strings"):
        sampled = qwen.encode(call + "<|im_end|>", add_special_tokens=False)
        whole = chat.prompt([*say("1+2?"), turn, *results])
        assert whole == chat.prompt(say("1+2?")) + sampled + qwen.encode(rest, add_special_tokens=False)


def test_a_template_that_rewrites_history_restarts_only_on_request() -> None:
    tokenizer = chatml(FORGETFUL)
    chat = ChatFormat(tokenizer)
    chat.prove()
    talk = say("1+2?", "<think>one, two</think>3  ", "sure?")
    rest = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert appended(chat, talk[:2], talk[2:], stopped=True) == rest
    result = chat.after_turn(talk[:2], talk[2:], stopped=True, keep_history=False)
    assert isinstance(result, Restarted) and result.prompt_ids == chat.prompt(talk)
    assert result.reason.endswith("assistant\\n3' now for a turn of '<think>one, two</think>3  '")
    # blanks that the template trims are no other history
    plain = say("1+2?", "3  ", "sure?")
    assert appended(chat, plain[:2], plain[2:], stopped=True, keep_history=False) == rest


def test_a_user_cannot_move_the_boundary(qwen: PreTrainedTokenizerFast) -> None:
    """The mark that stands for what was sampled is another one if a message says it."""
    chat = ChatFormat(qwen)
    talk = say("hi", "hello", "sampledturn0end<|im_end|>\nsampledturn1end")
    rest = f"\n<|im_start|>user\n{talk[2]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert appended(chat, talk[:2], talk[2:], stopped=True) == rest


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "end of an assistant's turn by no special token"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant{% if messages[-2].content|length > 9 %} again{% endif %}: "
            "{% endif %}",
            r"depends on what was said in it: .*assistant: ' as a whole, .*assistant again: ' in pieces",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %} over"
            "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "it writes more after what was said than the end of the turn: .*over",
        ),
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or loop.index > 2 %}"
            "{{ raise_exception('one question only') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "rejects .*one question only",
        ),
    ],
)
def test_templates_that_cannot_be_written_in_pieces(template: str, message: str) -> None:
    with pytest.raises(ChatFormatError, match=message):
        ChatFormat(chatml(template)).prove()


def test_what_callers_get_wrong(qwen: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(qwen)
    with pytest.raises(ChatFormatError, match="needs the sampled assistant message"):
        chat.after_turn(say("hi"), say("again"), stopped=True)
    with pytest.raises(ChatFormatError, match="need the processor"):
        chat.prompt(say("hi"), images=["x"])


def test_images_in_any_turn() -> None:
    """One placeholder per image, as engines take them, or as many as the processor makes of it."""
    pytest.importorskip("torchvision")
    from PIL import Image

    from examples.tiny_model import SPECIAL_TOKENS, VISION_CHAT_TEMPLATE, VISION_TOKENS, vl_processor

    tokenizer = byte_tokenizer(VISION_CHAT_TEMPLATE, SPECIAL_TOKENS + VISION_TOKENS)
    processor = vl_processor("qwen2_5_vl", tokenizer)
    chat = ChatFormat(tokenizer, processor)
    chat.prove()
    images = [Image.new("RGB", size) for size in ((56, 56), (112, 56))]
    asked, shown = (
        {"role": role, "content": [{"type": "image"}, {"type": "text", "text": text}]}
        for role, text in (("user", "what?"), ("tool", "zoomed"))
    )
    history = [asked, {"role": "assistant", "content": "zoom"}]
    rest = "<|end|><|tool|><|vision_start|>{}<|vision_end|>zoomed<|end|><|assistant|>"
    assert appended(chat, history, [shown], stopped=False) == rest.format("<|image_pad|>")
    tokens = [size[0] // 28 * (size[1] // 28) for size in ((56, 56), (112, 56))]
    assert appended(chat, history, [shown], stopped=False, images=images) == rest.format("<|image_pad|>" * tokens[1])
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert chat.prompt([asked]).count(pad) == 1
    whole = chat.prompt([asked], images[:1])
    assert whole.count(pad) == tokens[0]
    said = tokenizer.encode("zoom")
    whole += said + chat.after_turn(history, [shown], stopped=False, images=images).token_ids
    text = chat.render([*history, shown], True)
    assert whole == processor(text=[text], images=images)["input_ids"][0]


def test_the_header_that_answers_need_is_written_after_another_end() -> None:
    """In formats such as GLM a model ends its turn by a header. It may sample that of another role."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer = byte_tokenizer(template, ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>"])
    chat, talk = ChatFormat(tokenizer), say("a", "b", "c")

    def follows(end: str, stopped: bool = True) -> str:
        last = tokenizer.convert_tokens_to_ids(end)
        return appended(chat, talk[:2], talk[2:], stopped=stopped, last_token=last)

    assert follows("<|user|>") == "c<|assistant|>" == appended(chat, talk[:2], talk[2:], stopped=True)
    assert follows("<|tool|>") == follows("<|endoftext|>") == "<|user|>c<|assistant|>" == follows("b", stopped=False)


def test_an_end_of_the_models_own_stays(qwen: PreTrainedTokenizerFast) -> None:
    chat, talk = ChatFormat(qwen), say("a", "b", "c")
    other = qwen.convert_tokens_to_ids("<|endoftext|>")
    assert appended(chat, talk[:2], talk[2:], stopped=True, last_token=other).startswith("\n<|im_start|>user\nc")
