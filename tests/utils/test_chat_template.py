"""Chat templates that do not end: tried in a process before a run, and limited wherever a chat is rendered."""

import jinja2
import pytest

from examples.tiny_model import CHAT_TEMPLATE, byte_tokenizer
from verl.base_config import WrongInput
from verl.utils import chat_template
from verl.utils.chat import ChatFormat
from verl.utils.chat_template import (
    ChatTemplateOutput,
    ChatTemplateTimeout,
    check_awaits_turn,
    check_template,
    render_chat,
    template_problem,
)

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


DOUBLED = (
    "{% set all = namespace(text='abcdefghij') %}" + "{% set all.text = all.text ~ all.text %}" * 34 + "{{ all.text }}"
)
ONE, THREE = "a chat of one message", "a chat of three messages"


@pytest.mark.parametrize("template", [LOOP, "{{ 7 ** (7 ** 11) }}", "{{ '%0999999999d' % 1 }}"])
def test_a_template_that_does_not_end_is_found(template):
    assert template_problem(template, 0.5) == f"does not end within 0.5 s for {ONE}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (DOUBLED, f"takes more than 1024 MB of memory for {ONE}"),
        ("{% if tools %}" + DOUBLED + "{% endif %}", f"takes more than 1024 MB of memory for {THREE} and a tool"),
        ("{% if messages | length > 2 %}" + DOUBLED + "{% endif %}", f"takes more than 1024 MB of memory for {THREE}"),
        ("{{ messages[0].content | center(99999999999) }}", f"takes more than 1024 MB of memory for {ONE}"),
        ("{{ 'a' * 2000000 }}", f"writes more than 1048576 characters for {ONE}"),
        ("{{ messages[0].content * 3000 }}", f"writes more than 1361800 characters for {THREE}"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", f"recurses without end for {ONE}"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recurses without end"),
    ],
    ids=["doubled", "with-tools", "with-messages", "filter", "long", "longer", "macro", "nested"],
)
def test_a_template_that_takes_too_much_is_found(template, problem):
    assert template_problem(template) == problem


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        "{% for a in range(3) %}{{ a }}{% endfor %}",
        "{{ raise(7) }}",
        "{% if tools %}{{ raise_exception('takes no tools') }}{% endif %}{{ strftime_now('%Y') }}",
        "{{ 'a' * 1000000 }}",
        "{{ messages | tojson }}{{ messages[0].content * 90 }}",
    ],
)
def test_a_template_that_ends_or_raises_is_none(template):
    assert template_problem(template) is None


def test_texts_far_longer_than_their_chat_are_refused_wherever_one_is_rendered():
    tokenizer = byte_tokenizer("{{ messages[0].content * 150 }}")
    assert len(render_chat(tokenizer, [{"role": "user", "content": "a" * 6000}], {"tokenize": False})) == 900_000
    with pytest.raises(ChatTemplateOutput, match="it writes 3000000 characters for a chat that may give 20"):
        render_chat(tokenizer, [{"role": "user", "content": "a" * 20_000}], {"tokenize": False})


def test_a_template_that_recurses_raises_an_error_of_templates():
    tokenizer = byte_tokenizer("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(jinja2.TemplateError, match="recurses without end"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}], {"tokenize": False})


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


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "the chat template 'tool_use' is not valid Jinja"),
        ({"chat_template": "rag"}, "the chat template 'rag' is not valid Jinja"),
        ({"chat_template": "default"}, None),
        ({"chat_template": "{{ range( }}"}, "the chat template is not valid Jinja"),
        ({"chat_template": "text"}, None),
    ],
)
def test_of_several_templates_those_that_can_be_used_are_tried(options, fault):
    several = {"default": "{{ messages }}", "tool_use": "{{ range( }}", "rag": "{{ range( }}"}
    if fault is None:
        check_template(options, several)
    else:
        with pytest.raises(WrongInput, match=fault):
            check_template(options, several)
