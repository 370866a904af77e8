"""Before the start each chat template that a run can use is tried, and options that none reads are told."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import byte_tokenizer
from verl.errors import WrongInput
from verl.trainer.config.validation import examined_config
from verl.trainer.main_ppo import TaskRunner
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


CONFIG = {"model_type": "qwen2", "max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
WHOLE, BROKEN = "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}", "{{ range( }}"
FAULT = "is not valid Jinja, line 1"


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("broken", ["default", "tool_use", "rag"])
def test_each_template_that_a_run_can_use_is_tried(composed: Any, tmp_path: Path, in_files: bool, broken: str) -> None:
    """transformers takes ``tool_use`` where there are tools, and another name only if the options give it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = dict.fromkeys(("default", "tool_use", "rag"), WHOLE) | {broken: BROKEN}
    tokenizer.save_pretrained(tmp_path, save_jinja_files=in_files)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def check(*options: str) -> None:
        path = f"actor_rollout_ref.model.path={tmp_path}"
        check_chat_template(examined_config(composed(path, *options)).checked())

    name = "" if broken == "default" else f"{broken!r} "
    fault = rf"model\.path={tmp_path}/.*: the chat template {name}{FAULT}"
    with pytest.raises(WrongInput, match=fault):
        check(f"+{OPTIONS}.chat_template={broken}")
    check(f"+{OPTIONS}.chat_template={'default' if broken == 'rag' else 'rag'}")
    if broken == "rag":
        check()
    else:
        with pytest.raises(WrongInput, match=fault):
            check()


def test_options_of_a_template_with_a_name_are_looked_for_in_it(
    composed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "rag": WHOLE}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = [f"actor_rollout_ref.model.path={tmp_path}", f"+{OPTIONS}.enable_thinking=false"]
    check_chat_template(examined_config(composed(*options, f"+{OPTIONS}.chat_template=rag")).checked())
    assert "chat template" not in caplog.text
    check_chat_template(examined_config(composed(*options)).checked())
    assert "the chat template does not read enable_thinking=false" in caplog.text


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json", "preprocessor_config.json"])
def test_the_template_of_a_processor_is_tried_beside_that_of_its_tokenizer(
    composed: Any, tmp_path: Path, file: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": WHOLE}))
    (tmp_path / file).write_text(json.dumps({"chat_template": BROKEN}))
    run = examined_config(composed(f"actor_rollout_ref.model.path={tmp_path}")).checked()
    with pytest.raises(WrongInput, match=rf"{file}: the chat template {FAULT}"):
        check_chat_template(run)


def test_the_template_of_a_model_that_the_run_downloads_is_tried(
    composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks before the start cannot read it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = BROKEN
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = composed("actor_rollout_ref.model.path=someone/model", "actor_rollout_ref.model.tokenizer_path=null")
    check_chat_template(examined_config(config).checked())
    monkeypatch.setattr("verl.utils.hub.model_folder", lambda name: str(tmp_path))
    with pytest.raises(WrongInput, match=f"the chat template {FAULT}"):
        TaskRunner()._build_trainer(config, None, None)  # type: ignore[arg-type]
