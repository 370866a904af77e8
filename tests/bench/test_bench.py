"""What the comparison with other frameworks stands on: known response lengths, and a meter that misses no process."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
PARENT = """
import subprocess, sys, time
burn = "import time; start = time.process_time()\\nwhile time.process_time() - start < {}: pass"
for step in range(2):
    subprocess.run([sys.executable, "-c", burn.format(0.4)], check=True)
    time.sleep(0.2)
    with open(sys.argv[1], "a") as file:
        file.write("line\\n")
time.sleep(0.3)
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes(**changes: Any) -> SimpleNamespace:
    usual = {"hidden": 64, "layers": 2, "vocab": 200, "prompts": 4, "prompt_length": 8, "seed": 3}
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize("shortest, longest, limit, expected", [(4, 20, 20, range(4, 21)), (13, 16, 10, [10])])
def test_responses_have_the_lengths_that_were_asked_for(
    tmp_path: Path, shortest: int, longest: int, limit: int, expected: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    countdown = load("countdown")
    countdown.make_inputs(tmp_path, sizes(shortest=shortest, longest=longest), steps=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompts = [line.split('"')[3] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    ids = torch.tensor(tokenizer(prompts)["input_ids"])
    assert ids.shape == (4, 8)
    torch.manual_seed(0)
    rows = ids.repeat_interleave(64, 0)
    answers = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=limit, do_sample=True, top_k=0)[
        :, 8:
    ]
    ended = (answers == countdown.END).cumsum(1)
    lengths = ((ended == 0).sum(1) + (ended > 0).any(1)).tolist()
    assert set(lengths) <= set(expected)
    assert {min(lengths), max(lengths)} == {min(expected), max(expected)}
    assert sum(lengths) / len(lengths) == pytest.approx(sum(expected) / len(expected), rel=0.1)


def test_the_score_is_the_share_of_even_words() -> None:
    assert load("countdown").compute_score("countdown", "<w4><w7><w10><w12><end>", "") == 0.75


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_meter_counts_children_that_have_ended(tmp_path: Path) -> None:
    meter = load("process_tree")
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    progress = tmp_path / "progress"
    command = [sys.executable, str(script), str(progress)]
    result = meter.run_measured(command, {}, progress, tmp_path / "log", timeout_s=60)
    first, second = (sum(cpu.values()) for _, cpu in result["marks"])
    assert 0.35 < second - first < 0.8
    assert result["peak_rss"] >= result["peak_pss"] > 0


def test_a_failed_command_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit 3.*\n.*the reason"):
        load("process_tree").run_measured(
            [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {}, tmp_path / "p", tmp_path / "log", 60
        )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_costs_of_the_algorithms_are_within_their_limits() -> None:
    """A trial, not a test of every change: other work on the machine slows what is measured more than its yardstick."""
    command = [sys.executable, str(BENCH / "algos.py"), "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_costs_above_a_limit_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    algos = load("algos")
    work = lambda: torch.ones(2000, 2000).exp()  # noqa: E731
    cases = [
        algos.Case("demo, cheap", lambda: None, 1.0),
        algos.Case("free", work),
        algos.Case("demo, dear", work, 0.001),
    ]
    results = [algos.measure(case, 1) for case in cases]
    assert [row["over"] for row in results] == [False, False, True]
    monkeypatch.setattr(algos, "advantage_cases", lambda: iter(cases))
    monkeypatch.setattr(sys, "argv", ["algos.py", "--check", "--json", "--repeats", "1", "--only", "demo"])
    assert algos.main() == 1
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["demo, cheap", "demo, dear"]
