"""Conversations of several turns and their tokens as transformers writes them, by ``apply_chat_template`` on the whole.

``python -m tests.utils.chat.golden`` writes ``golden_tokens.json`` anew; it uses nothing of the library.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import SPECIAL_TOKENS, VISION_CHAT_TEMPLATE, VISION_TOKENS, byte_tokenizer, vl_processor
from tests.utils.chat.formats import FORMATS, QWEN_WORDS, Format

FILE = Path(__file__).with_name("golden_tokens.json")
FAMILIES = [
    "qwen2_5", "qwen3", "qwen3_coder", "llama3", "llama3_1", "gemma3", "mistral_v13", "deepseek_v3", "glm4_5",
    "phi4_mini", "kimi_k2",
]  # fmt: skip
VISION = "qwen2_5_vl"
WORDS = (
    "the user assistant system tool name arguments content function question answer search result number is not and of "
    "town river bridge news call parameters string type description object properties query response"
).split()
BLANKS = [
    "\n\n",
    "\n\n\n",
    "  ",
    ".\n",
    ">\n",
    ":\n",
    "</",
    "<|",
    "|>",
    '{"',
    '"}',
    '": "',
    "tool_",
    "_response",
    "im_",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Does as it is told.",
        "parameters": {"type": "object", "properties": {"say": {"type": "string"}}, "required": ["say"]},
        "strict": False,
    },
}
ANSWERS = [
    'The river\n\nruns {"a": [1, "ü"], "b": null} under the bridge.\n',
    "1 < 2 |> <| </ <tool_resp <|im_ end_of [/INS 五 🙂  \n\n\n- news",
    "no result",
]
"""What tools and users say: texts near those of control tokens, and none of them."""


def form_of(name: str) -> Format:
    """Return the format of a family."""
    (form,) = (form for form in FORMATS if form.name == name)
    return form


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens and the template of a family, and pairs that are the same for ever."""
    form = form_of(name)
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in [*WORDS, *(f" {word}" for word in WORDS), *BLANKS]:
        ((shown, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(word)
        for at in range(1, len(shown)):
            if shown[: at + 1] not in vocabulary:
                vocabulary[shown[: at + 1]] = len(vocabulary)
                merges.append((shown[:at], shown[at]))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=form.tokens[-1], bos_token=form.bos)
    special = [AddedToken(token, normalized=False, special=True) for token in form.tokens[:-1]]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in form.plain])
    tokenizer.chat_template = form.template()
    return tokenizer


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call(number: int, as_text: bool) -> dict[str, Any]:
    arguments = {"say": f"the news of town {number}"}
    function = {"name": "probe", "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": f"call{number:05d}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answered(number: int, content: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "probe", "tool_call_id": f"call{number:05d}", "content": content}


def conversations(name: str) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield conversations of a family that the model is to answer, each with the tools that it offers."""
    start = [_said("user", "What is the news?\n")]
    turns = [_said("assistant", "The river."), _said("user", ANSWERS[0]), _said("assistant", "Not the town?")]
    yield [_said("system", "Answer."), *start, *turns, _said("user", ANSWERS[1])], []
    if form_of(name).tools:
        first, second = (_call(number, as_text=name == "deepseek_v3") for number in (1, 2))
        asked = [first, _answered(1, ANSWERS[0]), second, _answered(2, ANSWERS[1])]
        yield [*start, *asked, _said("assistant", "The bridge."), _said("user", ANSWERS[2])], [TOOL]


@cache
def vision_processor() -> Any:
    """Return a small processor; it needs torchvision."""
    return vl_processor(VISION, byte_tokenizer(VISION_CHAT_TEMPLATE, SPECIAL_TOKENS + VISION_TOKENS))


def vision_conversation() -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Return a conversation in which user and tool show images."""
    images = [Image.new("RGB", size, (40, 90, 200)) for size in ((56, 56), (112, 56), (56, 84))]

    def shown(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "image"}, {"type": "text", "text": text}]}

    talk = [shown("user", "what?"), _said("assistant", "zoom"), shown("tool", ANSWERS[0]), _said("assistant", "again")]
    return [*talk, shown("tool", ANSWERS[1])], images


def whole_tokens() -> dict[str, list[list[int]]]:
    """Return the tokens of each conversation by its family."""
    tokens = {}
    for name in FAMILIES:
        tokenizer = tokenizer_of(name)
        options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True, **form_of(name).options}
        tokens[name] = [
            tokenizer.apply_chat_template(talk, tools=tools or None, **options) for talk, tools in conversations(name)
        ]
    talk, images = vision_conversation()
    text = vision_processor().apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    tokens[VISION] = [list(vision_processor()(text=[text], images=images)["input_ids"][0])]
    return tokens


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in whole_tokens().items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
