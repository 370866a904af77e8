"""Options that a chat template does not read are told before the start."""

from pathlib import Path
from typing import Any

import pytest

from verl.trainer.config.validation import examined_config
from verl.trainer.preflight import check_chat_template

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
OPTIONS = "data.apply_chat_template_kwargs"


@pytest.mark.parametrize("place", ["file", f"{OPTIONS}.chat_template", "actor_rollout_ref.model.custom_chat_template"])
def test_a_misspelled_option_has_one_notice(
    composed: Any, small_run: list[str], caplog: pytest.LogCaptureFixture, place: str
) -> None:
    path = next(each.partition("=")[2] for each in small_run if each.startswith("actor_rollout_ref.model.path"))
    file = Path(path, "chat_template.jinja")
    own = [] if place == "file" else [f'++{place}="{TEMPLATE}"']
    file.write_text(TEMPLATE if place == "file" else "{{ messages[0]['content'] }}", encoding="utf-8")
    options = [
        f"+{OPTIONS}.{name}" for name in ("enable_thinkng=false", "enable_thinking=false", "add_generation_prompt=true")
    ]
    try:
        check_chat_template(examined_config(composed(*options, *own)).checked())
    finally:
        file.unlink()
    (notice,) = [text for text in caplog.messages if "chat template" in text]
    assert notice.startswith(f"{OPTIONS}: the chat template does not read enable_thinkng=false: without effect")
