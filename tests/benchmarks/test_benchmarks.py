"""What the comparison with other frameworks stands on: known response lengths, and a meter that misses no process."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "benchmarks"
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
    sys.path.append(str(BENCH))  # for the scripts of the folder that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
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
def test_costs_of_the_algorithms_are_within_their_limits() -> None:
    """A trial, not a test of every change: other work on the machine slows what is measured more than its yardstick."""
    command = [sys.executable, str(BENCH / "algos.py"), "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Load scripts that import others of their folder, whose names may be those of packages."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("countdown", "process_tree", "trl")
    known = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield load
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(known)


def test_verl_is_compared_with_the_fastest_setting_of_trl(bench: Callable[[str], ModuleType]) -> None:
    script = bench("trl")

    def row(name: str, cpu_s: float) -> dict[str, Any]:
        return {"case": "fixed", "framework": name, "length": [32.0, 32, 32]} | dict.fromkeys(script.COLUMNS, cpu_s)

    lines = script.table(
        [row("trl 32", 5.0), row("trl 8", 4.0), row("verl", 3.0), row("trl 8", 4.4), row("trl 8", 3.9)]
    )
    assert [line.split(" | ")[1] for line in lines[2:]] == ["verl", "trl 32", "trl 8", "verl / trl 8"]
    assert lines[-1].split(" | ")[2] == "0.75"


def test_cpu_seconds_are_split_by_what_is_on_the_stack(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread by its samples, a thread of C++ by its name; what was there before does not count."""
    script = bench("step_profile")
    update = "thread (7): MainThread;update_actor (/v/verl/workers/roles/actor.py:1)"
    stacks = {f"{update};backward (/t/torch/autograd/graph.py:1);_engine_run_backward (/t/graph.py:2)": 30}
    stacks |= {f"{update};optimizer_step (/v/verl/workers/engine/fsdp/engine.py:9)": 10}
    (tmp_path / "5.raw").write_text("".join(f"{stack} {count}\n" for stack, count in stacks.items()))
    recording = script.Recording("py-spy", 100, [], [], tmp_path)
    recording.names = {5: "worker", 6: "raylet"}
    recording.before = {(5, 7): ("worker", 1.0), (6, 6): ("raylet", 2.0)}
    after = {(5, 7): ("worker", 5.0), (5, 8): ("grpc_1", 0.5), (6, 6): ("raylet", 2.0)}
    monkeypatch.setattr(script, "counters", lambda processes: after)
    found = {(row["process"], row["subject"]): (row["cpu_s"], row["samples"]) for row in recording.stop()}
    assert found == {
        ("worker", "update: backward"): (3.0, 30),
        ("worker", "update: optimizer"): (1.0, 10),
        ("worker", "thread grpc_"): (0.5, 0),
        ("raylet", "thread raylet"): (0.0, 0),
    }
    table = script.table(
        [{"process": key[0], "subject": key[1], "cpu_s": each[0], "samples": each[1]} for key, each in found.items()],
        0.1,
    )
    assert table[2].startswith("| **worker** | all | **4.500** | 40 |")


def test_phases_have_the_least_seconds_of_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = load("driver_scaling")
    runs = tmp_path / "runs.jsonl"
    case = {"by_reference": False, "rows": 16, "tokens": 8, "workers": 2, "keeps_memory": True}
    moved = {phase: {"sent": 2_000_000, "received": 500_000} for phase in scaling.PHASES}
    seconds = [dict(zip(scaling.PHASES, each, strict=True)) for each in ((5, 1, 1, 1, 1), (2, 3, 1, 1, 1))]
    lines = [case | {"seconds": each, "through_bytes": moved} for each in seconds]
    runs.write_text("\n".join(map(json.dumps, [*lines, lines[0] | {"workers": 4}])))
    monkeypatch.setattr(sys, "argv", ["driver_scaling.py", "phases", str(runs)])
    scaling.main()
    printed = capsys.readouterr().out
    assert "| 16 | 8 | 2 | driver | generate | 2.000 | 2.00 | 0.50 |" in printed
    assert "| 16 | 8 | 2 | driver | infer | 1.000 | 2.00 | 0.50 |" in printed
    assert "| 16 | 8 | 2 | driver | all | 6.000 | 10.00 | 2.50 |" in printed
    assert "| 16 | 8 | 4 | driver | all | 9.000 | 10.00 | 2.50 |" in printed


@pytest.mark.full
def test_each_size_has_a_driver_of_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    command = [sys.executable, str(BENCH / "driver_scaling.py"), "measure", "--out", str(runs), "--rounds", "1"]
    command += ["--steps", "2", "--columns", "driver", "--without-ray", "--cases", "16x16x2", "512x64x8"]
    subprocess.run(command, check=True)
    found = [json.loads(line) for line in runs.read_text().splitlines()]
    assert sorted((line["rows"], line["workers"]) for line in found) == [(16, 2), (16, 2), (512, 8), (512, 8)]


def test_bytes_of_a_phase_are_those_of_its_messages() -> None:
    """In a process of its own: the columns would go to the object store where another test has started Ray."""
    run = f"from {__name__} import check_bytes_of_a_phase; check_bytes_of_a_phase()"
    done = subprocess.run([sys.executable, "-c", run], cwd=BENCH.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_bytes_of_a_phase() -> None:
    scaling = load("driver_scaling")
    sys.modules[scaling.__name__] = scaling  # its blocks are pickled by name
    through = {}
    for by_reference, tokens in ((False, 64), (True, 64), (True, 512)):
        group = scaling.InProcess(2, scaling.Account())
        step = scaling.Step(group, by_reference, 32, tokens, group.account, weighed=True)
        step.run()
        through[by_reference, tokens] = step.through
        ways = list(zip(*(moved.values() for moved in step.through.values()), strict=True))
        for counted, packed in zip(ways, zip(*group.messages, strict=True), strict=True):
            twice = 2 * sum(packed)  # both parts are of one size
            if by_reference:  # the first worker computes the formulas alone
                assert sum(packed) < sum(counted) < twice
            else:
                assert sum(counted) == pytest.approx(twice, rel=0.02)
    # the answer of generate has 7 columns; shape and finish call no worker unless columns are by reference
    plain = through[False, 64]
    assert plain["generate"]["received"] > 5 * plain["generate"]["sent"]
    assert not any(plain[phase][way] for phase in ("shape", "finish") for way in ("sent", "received"))
    assert plain["update"]["sent"] > 32 * 64 * 8 * 3 > plain["update"]["received"]
    # larger numbers take some bytes more in a pickle; a column would be eight times as large
    assert through[True, 512] == {
        phase: {way: pytest.approx(value, rel=0.1) for way, value in moved.items()}
        for phase, moved in through[True, 64].items()
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_distance_of_lengths_is_the_mean_gap_of_their_sorted_pairs(seed: int) -> None:
    asynchrony = load("asynchrony")
    draw = random.Random(seed)
    one, other = ([draw.randint(1, limit) for _ in range(20)] for limit in (50, 90))
    gaps = [abs(a - b) for a, b in zip(sorted(one), sorted(other), strict=True)]
    assert asynchrony.distance(one, other) == pytest.approx(sum(gaps) / 20)
    assert asynchrony.distance(one, one * 3) == 0
