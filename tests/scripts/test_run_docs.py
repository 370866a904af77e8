"""The script that runs the commands of the docs finds those that run here, and tells which fail."""

import re
from pathlib import Path

import pytest

from scripts import run_docs


def test_commands_of_a_page_are_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\n# first\npython a.py \\\n    --b 1  # why\n\nls\n```\n```python\nx = 1\n```\n")
    assert list(run_docs.commands(page)) == ["python a.py --b 1", "ls"]


def test_what_needs_a_gpu_a_download_or_files_is_left_out() -> None:
    found = [command for _, command in run_docs.runnable()]
    assert "bash scripts/quickstart.sh" in found and "python -m verl.utils.doctor" in found
    assert any("bash examples/grpo_trainer/run_tiny_cpu.sh" in command for command in found)
    assert not any("pip install" in command or "..." in command or "$HOME" in command for command in found)
    assert len(found) == len(set(found))


def test_no_run_of_the_pages_resumes_another() -> None:
    """A second run in the folder of the first would find its last step done, and train nothing."""
    launches = [command for _, command in run_docs.runnable() if "bash examples/" in command]
    scripts = [(re.findall(r"OUT_DIR=\S+", each), re.findall(r"examples/\S+", each)) for each in launches]
    assert len(launches) > 8 and all(scripts.count(each) == 1 for each in scripts)


def test_names_of_pages_stand_for_what_the_quick_start_has_made(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\npython -m x RUN_DIR --to merged\npython -m y checkpoints/project/run/global_step_100/actor\n```\n"
    )
    assert list(run_docs.commands(page)) == [
        "python -m x outputs/quickstart/grpo --to outputs/quickstart/merged",
        "python -m y outputs/quickstart/grpo/global_step_40/actor",
    ]
    found = " ".join(command for _, command in run_docs.runnable())
    assert "verl.utils.report compare outputs/" in found and "verl.model_merger test" in found


def test_a_command_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_docs.ROOT / "README.md"
    monkeypatch.setattr(run_docs, "runnable", lambda only: [(page, "true"), (page, "echo why >&2; exit 3")])
    assert run_docs.main([]) == 1
    shown = capsys.readouterr().out
    assert "passed" in shown and "exit code 3:\nwhy" in shown
    monkeypatch.setattr(run_docs, "runnable", lambda only: [(page, "python -c 'import verl'")])
    assert run_docs.main([]) == 0
