"""The script that runs the commands of the docs finds those that run here, and tells which fail."""

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
    assert any(command.startswith("bash examples/grpo_trainer/run_tiny_cpu.sh") for command in found)
    assert not any("pip install" in command or "..." in command or "$HOME" in command for command in found)
    assert len(found) == len(set(found))


def test_a_command_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_docs.ROOT / "README.md"
    monkeypatch.setattr(run_docs, "runnable", lambda only: [(page, "true"), (page, "echo why >&2; exit 3")])
    assert run_docs.main([]) == 1
    shown = capsys.readouterr().out
    assert "passed" in shown and "exit code 3:\nwhy" in shown
    monkeypatch.setattr(run_docs, "runnable", lambda only: [(page, "python -c 'import verl'")])
    assert run_docs.main([]) == 0
