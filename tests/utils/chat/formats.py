"""Chat formats of model families: template, special tokens, and what their conversations may hold."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
MERGES = 700
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Format:
    """One chat format.

    Attributes:
        tokens: the special tokens of the family; the last one is ``eos_token``.
        ends: the tokens that end an assistant's turn.
        call_ends: those that end a turn with tool calls, if they are others.
        tokenizer: ``bytes`` (byte-level pairs), ``pieces`` (pieces after the manner of SentencePiece), or the name of a
            file of mistral_common.
        thinking: how thoughts are given: in the content, between tags, in a field of the message, or not at all.
        rewrites: why the template writes earlier turns differently later on, even without thoughts.
        plain: tokens of the vocabulary that are not special.
    """

    name: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    call_ends: tuple[str, ...] = ()
    bos: str | None = None
    source: str = ""
    tokenizer: str = "bytes"
    system: bool = True
    tools: bool = False
    parallel: bool = True
    alternates: bool = False
    thinking: str | None = None
    rewrites: str = ""
    swallows: bool = False
    plain: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def template(self) -> str:
        """Return the text of the template."""
        path = Path(self.source) if self.source else TEMPLATES / f"{self.name}.jinja"
        return path.read_text(encoding="utf-8")


CHATML = ("<|im_start|>", "<|endoftext|>", "<|im_end|>")
QWEN_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|eot_id|>")
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
GEMMA = ("<eos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
)
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
BOS = {"bos": "<｜begin▁of▁sentence｜>"}
AT_END: dict[str, Any] = {"ends": ("<|im_end|>",)}


def _vllm(name: str) -> str:
    spec = find_spec("vllm")
    return str(Path(str(spec.origin)).parent / "transformers_utils" / "chat_templates" / name) if spec else ""


FORMATS = [
    Format("qwen2", CHATML, **AT_END),
    Format("qwen2_5", CHATML, **AT_END, tools=True, plain=QWEN_TOOLS[:2]),
    Format("qwen3", CHATML, **AT_END, tools=True, thinking="content", plain=QWEN_TOOLS),
    Format(
        "qwen3_thinking",
        CHATML,
        **AT_END,
        tools=True,
        thinking="content",
        plain=QWEN_TOOLS,
        rewrites="the opening of a thought in the prompt is dropped",
    ),
    Format("qwen3_coder", CHATML, **AT_END, tools=True, plain=QWEN_TOOLS),
    Format("hermes", CHATML, **AT_END, tools=True, rewrites="a line break is added to the last tool result"),
    Format("internlm2", ("<|im_start|>", "</s>", "<|im_end|>"), **AT_END, bos="<s>"),
    Format("template_chatml.jinja", CHATML, **AT_END, source=_vllm("template_chatml.jinja")),
    Format(
        "template_minicpmv45.jinja",
        CHATML,
        **AT_END,
        source=_vllm("template_minicpmv45.jinja"),
        tools=True,
        thinking="content",
        options={"enable_thinking": True},
        plain=QWEN_TOOLS,
        rewrites="the opening of a thought in the prompt is dropped",
    ),
    Format("llama2", ("</s>",), ("</s>",), bos="<s>", tokenizer="tokenizer.model.v1", alternates=True),
    Format("llama3", LLAMA, ("<|eot_id|>",), bos="<|begin_of_text|>"),
    Format("llama3_1", LLAMA, ("<|eot_id|>",), bos="<|begin_of_text|>", tools=True, parallel=False),
    Format(
        "llama4",
        ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>", "<|eot|>"),
        ("<|eot|>",),
        bos="<|begin_of_text|>",
        tools=True,
    ),
    Format("mistral_v1", ("</s>",), ("</s>",), bos="<s>", tokenizer="tokenizer.model.v1", alternates=True),
    Format(
        "mistral_v3",
        ("</s>",),
        ("</s>",),
        bos="<s>",
        tokenizer="mistral_instruct_tokenizer_240323.model.v3",
        tools=True,
        alternates=True,
        rewrites="tools and system prompt move to the last question",
    ),
    Format(
        "mistral_v7",
        ("</s>",),
        ("</s>",),
        bos="<s>",
        tokenizer="mistral_instruct_tokenizer_241114.model.v7",
        tools=True,
        rewrites="tools move to the last question",
    ),
    Format(
        "mistral_v13",
        (*MISTRAL, "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"),
        ("</s>",),
        bos="<s>",
        tools=True,
        thinking="reasoning_content",
    ),
    Format("gemma2", GEMMA, ("<end_of_turn>",), bos="<bos>", tokenizer="pieces", system=False, alternates=True),
    Format("gemma3", GEMMA, ("<end_of_turn>",), bos="<bos>", tokenizer="pieces", alternates=True),
    Format("deepseek_v2", DEEPSEEK[-1:], DEEPSEEK[-1:], **BOS),
    Format("deepseek_v3", DEEPSEEK, DEEPSEEK[-1:], **BOS, tools=True),
    Format(
        "deepseek_r1",
        DEEPSEEK,
        DEEPSEEK[-1:],
        **BOS,
        tools=True,
        thinking="content",
        rewrites="the opening of a thought in the prompt is dropped",
        plain=QWEN_TOOLS[-2:],
    ),
    Format("deepseek_v3_1", DEEPSEEK, DEEPSEEK[-1:], **BOS, tools=True, plain=QWEN_TOOLS[-2:]),
    Format("glm4", GLM, ("<|user|>", "<|observation|>"), tools=True),
    Format("glm4_5", GLM, ("<|user|>", "<|observation|>"), tools=True, thinking="content", plain=QWEN_TOOLS),
    Format("phi3", (*ROLES, "<|endoftext|>", "<|end|>"), ("<|end|>",), tokenizer="pieces", swallows=True),
    Format("phi4", (*CHATML[:2], "<|im_sep|>", "<|im_end|>"), **AT_END),
    Format(
        "phi4_mini",
        (
            *ROLES,
            "<|tool|>",
            "<|/tool|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<|tool_response|>",
            "<|end|>",
            "<|endoftext|>",
        ),
        ("<|end|>",),
        tools=True,
    ),
    Format(
        "gpt_oss",
        HARMONY,
        ("<|end|>", "<|return|>"),
        call_ends=("<|call|>",),
        tools=True,
        parallel=False,
        thinking="thinking",
    ),
    Format("vicuna", ("</s>",), ("</s>",), bos="<s>", tokenizer="tokenizer.model.v1"),
    Format("zephyr", ("</s>",), ("</s>",), bos="<s>", tokenizer="tokenizer.model.v1"),
    Format("tulu3", ("<|endoftext|>",), ("<|endoftext|>",), bos="<|endoftext|>"),
    Format(
        "command_r",
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        bos="<BOS_TOKEN>",
    ),
    Format(
        "granite3",
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        ("<|end_of_text|>",),
        tools=True,
    ),
    Format(
        "kimi_k2",
        (
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|im_end|>",
        ),
        **AT_END,
        tools=True,
    ),
    Format("seed_oss", ("<seed:bos>", "<seed:eos>"), ("<seed:eos>",), tools=True, thinking="reasoning_content"),
    Format("exaone3_5", ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"), ("[|endofturn|]",)),
]
REFUSED = {
    "template_basic.jinja": "marks the end of an assistant's turn by no special token",
    "template_deepseek_vl2.jinja": "ends its generation prompt with",
}
"""Templates of vLLM that cannot be written in pieces, and the fault that the refusal names."""


def refused(name: str) -> Format:
    """Return a format whose template is refused."""
    tokens = ("<|User|>", "<|Assistant|>", "<｜end▁of▁sentence｜>")
    return Format(name, tokens, tokens[-1:], **BOS, source=_vllm(name), alternates=True)


def is_installed(chat: Format) -> bool:
    """Return whether the package is installed that a format takes its template or vocabulary from."""
    if chat.name.endswith(".jinja") and not chat.source:
        return False
    return chat.tokenizer in ("bytes", "pieces") or find_spec("mistral_common") is not None


def make_tokenizer(chat: Format) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of a format; it is made once."""
    if chat.name not in _MADE:
        _MADE[chat.name] = _made(chat)
    return _MADE[chat.name]


_MADE: dict[str, PreTrainedTokenizerFast] = {}


def _made(chat: Format) -> PreTrainedTokenizerFast:
    if chat.tokenizer not in ("bytes", "pieces"):
        return _mistral(chat)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(chat.tokenizer)), eos_token=chat.tokens[-1], bos_token=chat.bos
    )
    special = [AddedToken(token, rstrip=chat.swallows, normalized=False, special=True) for token in chat.tokens[:-1]]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in chat.plain])
    tokenizer.chat_template = chat.template()
    return tokenizer


def _mistral(chat: Format) -> PreTrainedTokenizerFast:
    spec = find_spec("mistral_common")
    assert spec is not None
    with TemporaryDirectory() as folder:
        shutil.copy(Path(str(spec.origin)).parent / "data" / chat.tokenizer, Path(folder, "tokenizer.model"))
        config = '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'
        Path(folder, "tokenizer_config.json").write_text(config, encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat.template()
    return tokenizer


@cache
def _trained(kind: str) -> str:
    """Return a vocabulary with pairs learnt from the templates, in which blanks and line breaks merge with others."""
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if kind == "pieces" else []
    trainer = trainers.BpeTrainer(
        vocab_size=MERGES + 512, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(_texts(), trainer)
    return made.to_str()


def _texts() -> Iterator[str]:
    for path in sorted(TEMPLATES.glob("*.jinja")):
        yield from path.read_text(encoding="utf-8").splitlines(keepends=True)
    yield from ("\n\n", "\n\n\n", "  ", "   ", ".\n", ">\n", " \n") * 50
