"""Random conversations, and the comparison of pieces with the whole."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.utils.chat.formats import Format
from verl.utils.chat import Appended, ChatFormat

WORDS = (
    *(
        "a",
        "the sum",
        "1 + 2 = 3",
        "Straße",
        "été",
        "数学",
        "مرحبا",
        "🙂",
        "e\u0301",
        "n\n\nm",
        "{}",
        '{"k": [1, "ü"]}',
    ),
    *(
        "<tool_response>",
        "[/INST]",
        "User:",
        "\tx",
        "- a\n- b",
        "`code`",
        "x  y",
        "</s",
        "<|",
        "don't",
        "0.5",
        "\u200b",
    ),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call {name}",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
        },
    }
    for name in ("add", "look_up")
]


def text(rng: random.Random, empty: float = 0.15) -> str:
    """Return words of many scripts, without blanks at the edges; sometimes none."""
    if rng.random() < empty:
        return ""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6))).strip()


def conversation(rng: random.Random, chat: Format, thoughts: bool, tools: bool) -> list[dict[str, Any]]:
    """Return a conversation that ends with a user or tool message; assistant's texts end with their number."""
    messages: list[dict[str, Any]] = []
    if chat.system and rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng, 0)})
    messages.append({"role": "user", "content": text(rng)})
    number = 0
    for _ in range(rng.randint(1, 4)):
        for _ in range(rng.randint(0, 2) if tools else 0):
            messages += _calls(rng, chat, thoughts, number)
            number += 1
        turn: dict[str, Any] = {"role": "assistant", "content": text(rng)}
        if turn["content"]:
            turn["content"] += f" ~{number}"
        number += 1
        _think(rng, chat, turn, thoughts)
        messages += [turn, {"role": "user", "content": text(rng)}]
        if not chat.alternates and rng.random() < 0.1:
            messages.append({"role": "user", "content": text(rng)})
    return messages


def _think(rng: random.Random, chat: Format, turn: dict[str, Any], thoughts: bool) -> None:
    if not thoughts or rng.random() < 0.3:
        return
    thought = text(rng, 0)
    if chat.thinking == "content":
        turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
    else:
        turn[str(chat.thinking)] = thought


def _calls(rng: random.Random, chat: Format, thoughts: bool, number: int) -> list[dict[str, Any]]:
    calls, results = [], []
    for at in range(rng.randint(1, 3) if chat.parallel else 1):
        name = rng.choice(TOOLS)["function"]["name"]
        last = f"{text(rng)} ~{number}"
        call_id = f"c{number:03d}{at:05d}"
        arguments = {"a": rng.randint(0, 99), "b": last}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        results.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": text(rng)})
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    _think(rng, chat, turn, thoughts)
    return [turn, *results]


@dataclass
class Outcome:
    """What the conversations of a format gave.

    Attributes:
        turns: boundaries that were compared.
        restarted: of them, those after which the template writes earlier turns differently.
        differences: each as (conversation, turn, text of the pieces, text of the whole).
    """

    turns: int = 0
    restarted: int = 0
    differences: list[tuple[int, int, str, str]] = field(default_factory=list)


def compare(chat: ChatFormat, form: Format, messages: list[dict[str, Any]], seed: int, into: Outcome) -> None:
    """Let a conversation grow turn by turn; sampled tokens are those of the whole rendering between prompt and end.

    The expectation comes from whole renderings only: at which token the turn ends is looked up there.
    """
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, at in enumerate(turns):
        stop = turns[number + 1] if number + 1 < len(turns) else len(messages)
        history, added = messages[: at + 1], messages[at + 1 : stop]
        ends = form.call_ends or form.ends if history[-1].get("tool_calls") else form.ends
        ids_of_ends = [chat.tokenizer.convert_tokens_to_ids(end) for end in ends]
        shown, whole = chat.render(messages[:at], True), chat.render(messages[:stop], True)
        ids, state = chat.encode(whole), chat.encode(shown)
        into.turns += 1

        def check(got: list[int], expected: list[int], turn: int = number) -> None:
            if got != expected:
                into.differences.append((seed, turn, chat.decode(got), chat.decode(expected)))

        kept = _kept(chat, form, at, messages[:stop], shown, whole)
        result = chat.after_turn(history, added, stopped=True, keep_history=False)
        if isinstance(result, Appended) != kept:
            into.differences.append((seed, number, type(result).__name__, "history kept" if kept else "rewritten"))
        if isinstance(result, Appended):
            sampled_end = next(i for i, token in enumerate(ids) if i >= len(state) and token in ids_of_ends) + 1
            cut = chat.after_turn(history, added, stopped=False)
            assert isinstance(cut, Appended)
            check(state + ids[len(state) : sampled_end] + result.token_ids, ids)
            check(state + ids[len(state) : sampled_end - 1] + cut.token_ids, ids)
        else:
            into.restarted += 1
            check(result.prompt_ids, ids)
        always = chat.after_turn(history, added, stopped=True)
        assert isinstance(always, Appended)
        said = whole.rfind(f" ~{_number(history[-1])}")
        if said >= 0:
            end = min(found for token in ends if (found := whole.find(token, said)) >= 0)
            check(always.token_ids, chat.encode(whole[end:])[1:])


def _number(message: dict[str, Any]) -> str:
    if message.get("tool_calls"):
        return str(message["tool_calls"][-1]["function"]["arguments"]["b"]).rpartition("~")[2]
    return str(message["content"]).rpartition("~")[2] if "~" in message["content"] else "none"


def _kept(chat: ChatFormat, form: Format, at: int, messages: list[dict[str, Any]], shown: str, whole: str) -> bool:
    """Return whether the whole begins with the prompt of the turn, and would show another thought of it."""
    turn = messages[at]
    other = turn
    if form.thinking == "content" and "</think>" in turn["content"]:
        other = {**turn, "content": "<think>\nsomething else\n</think>" + turn["content"].split("</think>")[1]}
    elif form.thinking and turn.get(form.thinking):
        other = {**turn, form.thinking: "something else"}
    shows = "something else" in chat.render([*messages[:at], other, *messages[at + 1 :]], True)
    return whole.startswith(shown) and (other is turn or shows)
