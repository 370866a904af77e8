"""Conversations without control texts have the tokens that transformers gives to the whole, bit for bit."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.utils.chat.golden import (
    ANSWERS,
    FAMILIES,
    FILE,
    VISION,
    conversations,
    form_of,
    tokenizer_of,
    vision_conversation,
    vision_processor,
)
from verl.utils.chat import Appended, ChatFormat

GOLDEN: dict[str, list[list[int]]] = json.loads(FILE.read_text(encoding="utf-8"))


def grown(chat: ChatFormat, talk: list[dict[str, Any]], whole: Sequence[int], images: Sequence[Any] = ()) -> list[int]:
    """Let a conversation grow turn by turn as a rollout does; the sampled tokens are those of ``whole``."""
    shown = [chat.control.of_others(each) if each["role"] in ("user", "tool") else each for each in talk]
    *turns, last = [at for at, message in enumerate(talk) if message["role"] == "assistant"] + [len(talk)]
    ids = chat.prompt(shown[: turns[0]], images[: _count(shown[: turns[0]])])
    for at, following in zip(turns, [*turns[1:], last], strict=True):
        history, added = shown[: at + 1], shown[at + 1 : following]
        end = chat.encode(chat.boundary(history, added).end + chat.boundary(history, added).after)[0]
        ids = [*ids, *whole[len(ids) : whole.index(end, len(ids)) + 1]]
        more = chat.after_turn(history, added, stopped=True, images=images[: _count(shown[:following])])
        assert isinstance(more, Appended)
        ids = [*ids, *more.token_ids]
    return ids


def _count(talk: Sequence[dict[str, Any]]) -> int:
    return sum(isinstance(message["content"], list) for message in talk)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_grows_has_the_golden_tokens(name: str) -> None:
    for (talk, tools), whole in zip(conversations(name), GOLDEN[name], strict=True):
        chat = ChatFormat(tokenizer_of(name), options=form_of(name).options, tools=tools)
        assert grown(chat, talk, whole) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_are_texts_without_control_tokens(name: str) -> None:
    control = ChatFormat(tokenizer_of(name)).control
    assert [control.cut(text) for text in ANSWERS] == ANSWERS


def test_a_conversation_with_images_has_the_golden_tokens() -> None:
    pytest.importorskip("torchvision")
    processor = vision_processor()
    talk, images = vision_conversation()
    (whole,) = GOLDEN[VISION]
    assert grown(ChatFormat(processor.tokenizer, processor), talk, whole, images) == whole
