"""The sanity check of a finished trajectory: which differences from the whole conversation count in which mode."""

import time

import pytest
from transformers import PreTrainedTokenizerFast

from tests.utils.chat.test_chat_format import FORGETFUL, chatml, say
from verl.utils.chat import ChatFormat, whole_differences
from verl.utils.chat.compare import _differences

ENDINGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|end|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trajectory(chat: ChatFormat, texts: tuple[str, ...], stopped: bool = True) -> list[int]:
    """Return the tokens of a conversation whose assistant's turns were sampled."""
    talk = say(*texts)
    ids = chat.prompt(talk[:1])
    end = [int(chat.tokenizer.eos_token_id)]
    for at in range(1, len(talk), 2):
        ids += chat.tokenizer.encode(talk[at]["content"]) + end * (stopped or at < len(talk) - 1)
        if at + 1 < len(talk):
            ids += chat.after_turn(talk[: at + 1], talk[at + 1 : at + 2], stopped=True).token_ids  # type: ignore[union-attr]
    return ids


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("template", [FORGETFUL, ENDINGS])
def test_a_right_trajectory_has_no_difference(template: str, stopped: bool) -> None:
    tokenizer: PreTrainedTokenizerFast = chatml(template)
    tokenizer.eos_token = "<|end|>" if template is ENDINGS else "<|im_end|>"
    chat = ChatFormat(tokenizer)
    texts = ("1+2?", "3", "sure?", "yes")
    ids = trajectory(chat, texts, stopped)
    assert whole_differences(chat, say(*texts), ids, "strict") == []
    assert whole_differences(chat, say(*texts, "more"), [*ids, 5], "disable") == []


def test_differences_by_mode() -> None:
    chat = ChatFormat(chatml(FORGETFUL))
    texts = ("1+2?", "<think>one</think>3  ", "sure?", "yes")
    ids = trajectory(chat, texts)
    strict = whole_differences(chat, say(*texts), ids, "strict")
    assert [(one.text, one.whole_text) for one in strict] == [("<think>one</think>", ""), ("  ", "")]
    assert chat.tokenizer.decode(ids[strict[0].start :]).startswith("<think>one</think>3")
    loose = whole_differences(chat, say(*texts), ids, "ignore_strippable")
    assert [one.text for one in loose] == ["<think>one</think>"]
    assert "'<think>one</think>' in the trajectory, '' in the whole conversation" in str(loose[0])


def test_a_dropped_separator_and_a_changed_text_are_found() -> None:
    chat = ChatFormat(chatml(FORGETFUL))
    texts = ("1+2?", "3", "sure?", "yes")
    ids = trajectory(chat, texts)
    newline = chat.tokenizer.encode("\n")[0]
    after_end = ids.index(int(chat.tokenizer.eos_token_id), len(chat.prompt(say("1+2?")))) + 1
    assert ids[after_end] == newline
    dropped = ids[:after_end] + ids[after_end + 1 :]
    assert [one.whole_text for one in whole_differences(chat, say(*texts), dropped, "strict")] == ["\n"]
    assert whole_differences(chat, say(*texts), dropped, "ignore_strippable") == []
    changed = whole_differences(chat, say("1+2?", "4", "sure?", "yes"), ids, "ignore_strippable")
    assert [(one.text, one.whole_text) for one in changed] == [("3", "4")]
    broken = "{% for m in messages %}{{ m.content }}<|im_end|>{{ raise_exception('no') }}{% endfor %}"
    (failed,) = whole_differences(ChatFormat(chatml(broken)), say(*texts), ids, "strict")
    assert "rejects the conversation: no" in str(failed)


def test_monotonous_tokens_do_not_take_long() -> None:
    """Thousands of pairs of equal tokens are one difference; told apart they take a minute."""
    chat = ChatFormat(chatml(ENDINGS))
    started = time.process_time()
    found = _differences(chat, [5, 6] * 1500, [5, 7] * 1500)
    assert len(found) == 1 and time.process_time() - started < 5
