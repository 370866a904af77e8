"""Chat templates that do not end: tried in a process before a run, and limited wherever a chat is rendered."""

import jinja2
import pytest

from examples.tiny_model import CHAT_TEMPLATE, byte_tokenizer
from verl.base_config import WrongInput
from verl.utils import chat_template
from verl.utils.chat import ChatFormat
from verl.utils.chat_template import ChatTemplateTimeout, check_awaits_turn, render_chat, template_problem

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize("template", [LOOP, "{{ 7 ** (7 ** 11) }}"])
def test_a_template_that_does_not_end_is_found(template):
    assert template_problem(template, 0.5) == "does not end within 0.5 s for a chat of one message"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{% for a in range(3) %}{{ a }}{% endfor %}", "{{ raise(7) }}"])
def test_a_template_that_ends_or_raises_is_none(template):
    assert template_problem(template) is None


def test_a_template_that_is_not_jinja_is_found_and_tags_of_transformers_are_left_to_it():
    assert template_problem("{{ range( }}") == "is not valid Jinja, line 1: unexpected '}', expected ')'"
    assert template_problem("a\n{% for m in messages %}") == (
        "is not valid Jinja, line 2: Unexpected end of template. Jinja was looking for the following tags: 'endfor' or "
        "'else'. The innermost block that needs to be closed is 'for'."
    )
    assert template_problem("{% generation %}{{ messages }}{% endgeneration %}") is None


def test_rendering_is_limited_and_names_the_chat(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_S", 0.2)
    tokenizer = byte_tokenizer("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}x")
    options = {"tokenize": False}
    assert render_chat(tokenizer, [{"role": "user", "content": "end"}], options) == "x"
    with pytest.raises(ChatTemplateTimeout, match=r"did not end within 0\.2 s for .*'loop'") as caught:
        render_chat(tokenizer, [{"role": "user", "content": "loop"}], options)
    assert isinstance(caught.value, jinja2.TemplateError)  # so that data sets name the row


def test_a_chat_that_an_assistant_ends_awaits_no_turn() -> None:
    asked = [{"role": "user", "content": "a"}]
    check_awaits_turn(asked)
    begun = [*asked, {"role": "assistant", "content": "So"}]
    for refuses in (check_awaits_turn, ChatFormat(byte_tokenizer()).prompt):
        with pytest.raises(WrongInput, match="ends with an assistant's message, after which the answer would be a sec"):
            refuses(begun)
