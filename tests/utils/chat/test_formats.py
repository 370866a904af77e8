"""Chat formats of model families: a conversation written in pieces has the tokens of the whole rendering."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.utils.chat.conversations import TOOLS, Outcome, compare, conversation, text
from tests.utils.chat.formats import FORMATS, REFUSED, Format, is_installed, make_tokenizer, refused
from verl.errors import ChatFormatError
from verl.utils.chat import Appended, ChatFormat, pieces, written_turn

PAGE = Path(__file__).with_name("formats_results.md")
FEW, MANY = 3, 200
ENDS_WITH_THE_NEXT_TURN = ("glm4", "glm4_5", "template_chatml.jinja")
"""Formats whose templates write the end of a turn only where another turn follows."""


def outcome(form: Format, count: int, thoughts: bool) -> Outcome:
    """Return what ``count`` conversations give; every second one has tools, if the format knows them."""
    tokenizer = make_tokenizer(form)
    chats = [ChatFormat(tokenizer, options=form.options, tools=tools) for tools in (TOOLS, ())]
    for chat in chats if form.tools else chats[1:]:
        chat.prove()
    found = Outcome()
    for seed in range(count):
        with_tools = form.tools and seed % 2 == 0
        talk = conversation(random.Random(seed), form, thoughts, with_tools)
        compare(chats[0 if with_tools else 1], form, talk, seed, found)
    return found


def checked(form: Format, count: int) -> str:
    """Return the row of a format in the page."""
    if not is_installed(form):
        pytest.skip("the package of this format is not installed")
    plain = outcome(form, count, thoughts=False)
    assert plain.differences == []
    assert plain.turns >= count and (plain.restarted == 0 or form.rewrites)
    thoughtful = outcome(form, count, thoughts=True) if form.thinking else None
    if thoughtful is not None:
        assert thoughtful.differences == []
    cells = [plain.turns, plain.restarted, *([thoughtful.turns, thoughtful.restarted] if thoughtful else ["–", "–"]), 0]
    return f"| `{form.name}` | " + " | ".join(str(cell) for cell in cells) + " |"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_pieces_equal_the_whole(form: Format) -> None:
    checked(form, FEW)


@pytest.mark.full
def test_200_conversations_of_each_format_give_the_table_of_the_page() -> None:
    rows = [checked(form, MANY) for form in FORMATS]
    assert len(rows) >= 20
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_last_turn_of_a_supervised_row_ends_as_in_a_rollout(form: Format) -> None:
    if not is_installed(form):
        pytest.skip("the package of this format is not installed")
    chat = ChatFormat(make_tokenizer(form), options=form.options, tools=TOOLS if form.tools else ())
    for seed in range(FEW):
        talk = conversation(random.Random(seed), form, bool(form.thinking), form.tools)
        for at in (at for at, message in enumerate(talk) if message["role"] == "assistant"):
            last, turn = pieces(chat, talk[: at + 1])[-1], written_turn(chat, talk[: at + 1])
            assert chat.encode_after(last.before, last.text)[: len(turn)] == turn
            ends = form.call_ends or form.ends if talk[at].get("tool_calls") else form.ends
            assert chat.decode(turn[-1:]).strip() in ends
            assert bool(last.added_end) == (form.name in ENDS_WITH_THE_NEXT_TURN)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    form = refused(name)
    if not is_installed(form):
        pytest.skip("vLLM is not installed")
    with pytest.raises(ChatFormatError, match=REFUSED[name]):
        ChatFormat(make_tokenizer(form)).prove()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_was_sampled_does_not_change_what_follows(form: Format) -> None:
    """Blanks that a template trims, thoughts that it drops, and a turn of nothing leave the tokens after it alone."""
    if not is_installed(form):
        pytest.skip("the package of this format is not installed")
    chat = ChatFormat(make_tokenizer(form), options=form.options)
    for seed in range(2):
        rng = random.Random(seed)
        question, added = ({"role": "user", "content": text(rng)} for _ in range(2))
        said = text(rng, 0)
        results = []
        for content in (said, f"  {said} \n", f"<think>\n{text(rng)}\n</think>\n\n{said}\n\n", "", None):
            turn = {"role": "assistant", "content": content}
            results.append(chat.after_turn([question, turn], [added], stopped=False))
        assert all(isinstance(result, Appended) and result == results[0] for result in results)


@pytest.mark.parametrize("name", ["mistral_v1", "mistral_v3", "mistral_v7"])
def test_mistral_equals_mistral_common(name: str) -> None:
    """Mistral's own encoder gives the same tokens for the same conversation."""
    pytest.importorskip("mistral_common")
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    (form,) = (form for form in FORMATS if form.name == name)
    own = MistralTokenizer.from_file(str(Path(str(mistral_common.__file__)).parent / "data" / form.tokenizer))
    chat = ChatFormat(make_tokenizer(form), tools=TOOLS if form.tools else ())
    words = ("how many", "été 数学", "🙂 x", "a\nb", "The sum: 3")
    for seed in range(10):
        rng = random.Random(seed)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if seed % 2 else []
        state: list[int] = []
        for number in range(3):
            added: list[dict[str, Any]] = [{"role": "user", "content": rng.choice(words)}]
            if form.tools and number == 1:
                call_id = f"abcdefg{seed:02d}"
                call = {"name": "add", "arguments": {"a": seed, "b": rng.choice(words)}}
                messages[-1] = {"role": "assistant", "tool_calls": [{"id": call_id, "function": call}]}
                added = [{"role": "tool", "name": "add", "tool_call_id": call_id, "content": rng.choice(words)}]
            if number:
                result = chat.after_turn(messages, added, stopped=True, keep_history=False)
                whole = chat.prompt([*messages, *added])
                state = state + _sampled(whole, state) + result.token_ids if isinstance(result, Appended) else whole
            messages += added
            state = state or chat.prompt(messages)
            request = ChatCompletionRequest(messages=[_strings(m) for m in messages], tools=list(chat.tools) or None)
            assert state == own.encode_chat_completion(request).tokens
            messages.append({"role": "assistant", "content": rng.choice(words)})


def _sampled(whole: list[int], state: list[int]) -> list[int]:
    assert whole[: len(state)] == state
    return whole[len(state) : whole.index(2, len(state)) + 1]  # 2 is </s>


def _strings(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as text, as the protocol wants them."""
    import json

    if "tool_calls" not in message:
        return message
    (call,) = message["tool_calls"]
    function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
    return {**message, "tool_calls": [{**call, "function": function}]}
