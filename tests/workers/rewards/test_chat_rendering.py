"""Conversations of a policy in the chat template of a reward model: their turns, with the ends between them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.utils.chat.conversations import text
from tests.utils.chat.formats import FORMATS, Format, is_installed, make_tokenizer
from tests.workers.roles.reward_cases import reward_tokenizer
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto
from verl.utils.chat import Appended, ChatFormat, written_turn
from verl.workers.rewards.chat_rendering import ChatRenderer, response_texts

OTHERS = {
    "deepseek_r1": "the template leaves out the opening of the thought that its generation prompt has",
    "qwen3_thinking": "likewise, and the line break before the end of the thought becomes one token with it",
    "gpt_oss": "the template refuses the markup of channels in what was said",
}
"""Formats whose templates do not show a conversation as its tokens are."""
UNKNOWN_TURNS = {**OTHERS, "llama2": "the template writes a blank before the end, which a policy samples"}


class Talk:
    """A trajectory: its messages, and its tokens as a rollout appends them."""

    def __init__(self, chat: ChatFormat, first: str) -> None:
        self.chat = chat
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        self.prompt = chat.prompt(self.messages)
        self.response: list[int] = []
        self.turns: list[dict[str, Any]] = []

    def says(self, said: str) -> None:
        self.messages.append({"role": "assistant", "content": said})
        self._append(written_turn(self.chat, self.messages), role="assistant", text=None, calls=[])

    def asks(self, asked: str) -> None:
        self._follow([{"role": "user", "content": asked}], role="user", text=asked, calls=[])

    def answers(self, *answers: str) -> None:
        named = [{"name": "add", "tool_call_id": f"call{at:05d}"} for at in range(len(answers))]
        messages = [{"role": "tool", "content": each, **name} for each, name in zip(answers, named, strict=True)]
        calls = [{"name": "add", "arguments": "{}", "text": each} for each in answers]
        self._follow(messages, role="tool", text=None, calls=calls)

    def _follow(self, messages: list[dict[str, Any]], **turn: Any) -> None:
        messages = [self.chat.control.of_others(message) for message in messages]
        added = self.chat.after_turn(self.messages, messages, stopped=True)
        assert isinstance(added, Appended)
        self._append(added.token_ids, **turn)
        self.messages += messages

    def _append(self, token_ids: list[int], **turn: Any) -> None:
        start = len(self.response)
        self.response += token_ids
        self.turns.append({**turn, "start": start, "end": len(self.response)})

    def row(self, has_turns: bool = True) -> DataProto:
        ids = torch.tensor([[*self.prompt, *self.response]])
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": ids[:, len(self.prompt) :],
        }
        columns: dict[str, Any] = {"raw_prompt": np.empty(1, dtype=object), TURNS_COLUMN: np.empty(1, dtype=object)}
        columns["raw_prompt"][0], columns[TURNS_COLUMN][0] = self.messages[:1], self.turns if has_turns else None
        return DataProto.from_dict(tensors, columns)


def renderer(source: Any, target: Any, *ends: str) -> ChatRenderer:
    target.pad_token = target.pad_token or target.eos_token
    return ChatRenderer(source, target, None, "right", source.convert_tokens_to_ids(list(ends)))


@pytest.mark.parametrize("has_turns", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "deepseek_v3"])
def test_texts_of_others_stay_texts(name: str, has_turns: bool) -> None:
    """A reward model reads what a tool or a user, or the policy itself, has written like control tokens as text."""
    (form,) = (form for form in FORMATS if form.name == name)
    tokenizer = make_tokenizer(form)
    talk = Talk(ChatFormat(tokenizer), "Hello")
    texts = "".join(talk.chat.control.texts)
    talk.says("I see.")
    talk.asks(f"{texts} and more")
    talk.says("Yes.")
    rows, _ = renderer(tokenizer, tokenizer, *form.ends)(talk.row(has_turns))
    wanted = [*talk.prompt, *talk.response]
    found = rows["input_ids"][0, : len(wanted)].tolist()
    assert talk.chat.control.count(found) == talk.chat.control.count(wanted) and found == wanted


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_same_template_gives_the_tokens_of_the_policy(form: Format) -> None:
    if not is_installed(form):
        pytest.skip("the package of this format is not installed")
    tokenizer = make_tokenizer(form)
    rng = random.Random(0)
    talk = Talk(ChatFormat(tokenizer), text(rng, 0))
    for _ in range(2):
        talk.says(text(rng, 0))
        talk.asks(text(rng, 0))
    talk.says(text(rng, 0))
    wanted = [*talk.prompt, *talk.response]
    for has_turns, others in ((True, OTHERS), (False, UNKNOWN_TURNS)):
        if form.name in others:
            continue
        rows, _ = renderer(tokenizer, tokenizer, *form.ends)(talk.row(has_turns))
        assert rows["input_ids"][0, : len(wanted)].tolist() == wanted, has_turns


def reward_text(talk: Talk, target: Any, **options: Any) -> str:
    rows, _ = renderer(talk.chat.tokenizer, target, "<|im_end|>")(talk.row(**options))
    return str(target.decode(rows["input_ids"][0]))


def test_another_template_shows_turns_and_tools() -> None:
    talk = Talk(ChatFormat(make_tokenizer(next(form for form in FORMATS if form.name == "qwen2_5"))), "q")
    talk.says("call")
    talk.answers("4", "5")
    talk.says("9 ")
    target = reward_tokenizer()
    asked = "<s>[user] q</s>[assistant] call</s>"
    assert reward_text(talk, target) == asked + "[tool] 4</s>[tool] 5</s>[assistant] 9</s>"
    knows_none = "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    for start in (knows_none, "{% if m['role'] == 'tool' %}{% continue %}{% endif %}"):
        target.chat_template = reward_tokenizer().chat_template
        target.chat_template = target.chat_template.replace("m['role']", "message['role']").replace(
            "{% for message in messages %}", "{% for message in messages %}" + start.replace("m[", "message[")
        )
        assert reward_text(talk, target) == asked + "[user] 4\n5</s>[assistant] 9</s>"
    raw = "call<|im_end|>\n<|im_start|>user\n"
    assert raw in reward_text(talk, reward_tokenizer(), has_turns=False)  # a loop that keeps no turns
    tokenizer = talk.chat.tokenizer
    assert response_texts(talk.row(), tokenizer, [tokenizer.eos_token_id])[0].startswith(raw)


def test_a_turn_without_tokens_is_no_turn() -> None:
    """The last words of a user end a conversation, and nobody reads them."""
    talk = Talk(ChatFormat(make_tokenizer(next(form for form in FORMATS if form.name == "qwen2_5"))), "q")
    talk.says("a")
    talk._append([], role="user", text="thanks", calls=[])
    assert reward_text(talk, reward_tokenizer()) == "<s>[user] q</s>[assistant] a</s>"


def test_a_turn_that_the_prompt_has_begun_is_one_turn() -> None:
    talk = Talk(ChatFormat(make_tokenizer(next(form for form in FORMATS if form.name == "qwen2_5"))), "q")
    talk.says("fine")
    row = talk.row()
    row.non_tensor_batch["raw_prompt"][0] = [*talk.messages[:1], {"role": "assistant", "content": "I am "}]
    target = reward_tokenizer()
    rows, _ = renderer(talk.chat.tokenizer, target, "<|im_end|>")(row)
    assert target.decode(rows["input_ids"][0]) == "<s>[user] q</s>[assistant] I am fine</s>"
