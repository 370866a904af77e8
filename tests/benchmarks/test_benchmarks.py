"""What the comparison with other frameworks stands on: known response lengths, and a meter that misses no process."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from verl import DataProto

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


def test_the_model_of_the_driver_is_fitted_without_the_runs_that_it_predicts() -> None:
    scaling = load("driver_scaling")
    costs = {False: [3e-3, 8e-4, 3e-4, 2e-6, 1.5e-3, 2e-2, 0.0, 1e-7], True: [1e-2, 2e-2, 1e-6, 1e-4, 2e-4, 1e-7]}
    fitted = [(64, 32, 8), (512, 64, 8), (512, 64, 64), (512, 512, 4), (1024, 256, 8), (2048, 32, 128), (64, 512, 8)]
    held_out = [(1024, 64, 16), (256, 512, 2), (4096, 32, 32)]

    def line(kind: str, by_reference: bool, case: tuple[int, int, int], factor: float = 1.0) -> dict[str, Any]:
        seconds = {
            phase: factor * float(sum(a * b for a, b in zip(costs[by_reference], terms, strict=True)))
            for phase in scaling.PARTS
            for terms in [scaling.features(phase, by_reference, *case)]
        }
        rows, tokens, workers = case
        return {"kind": kind, "by_reference": by_reference, "rows": rows, "tokens": tokens, "workers": workers,
                "seconds": seconds}  # fmt: skip

    for by_reference in (False, True):
        lines = [line("fit", by_reference, case) for case in fitted]
        noisy = [line("fit", by_reference, case, 1.5) for case in fitted]  # a round on a busy machine
        seen = [line("predict", by_reference, case) for case in held_out]
        wrong = [line("predict", by_reference, case, 7.0) for case in held_out]
        found = scaling.fit(scaling.summaries([*noisy, *lines, *seen]), by_reference)
        other = scaling.fit(scaling.summaries([*lines, *wrong]), by_reference)
        for phase, values in found.items():
            assert (values >= 0).all() and (values == other[phase]).all()
            for held in seen:
                predicted = float(values @ scaling._features(phase, held))
                assert predicted == pytest.approx(held["seconds"][phase], rel=1e-3, abs=1e-6), (by_reference, phase)


def test_a_size_has_the_median_of_its_steady_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = load("driver_scaling")
    case = {"kind": "fit", "by_reference": True, "rows": 8, "tokens": 8, "workers": 1, "work_s": 0.0}

    def line(seconds: float, steady: float | None, **more: float) -> dict[str, Any]:
        found = {**case, "seconds": dict.fromkeys(scaling.PARTS, seconds), **more}
        return found if steady is None else found | {"steady_seconds": dict.fromkeys(scaling.PARTS, steady)}

    (one,) = scaling.summaries([line(6.0, 2.0), line(3.0, 1.0), line(8.0, 4.0)])
    assert one["seconds"] == dict.fromkeys(scaling.PARTS, 2.0) and one["slowness"] == 3.0
    (one,) = scaling.summaries([line(6.0, None), line(3.0, None), line(8.0, None)])
    assert one["seconds"] == dict.fromkeys(scaling.PARTS, 3.0) and "slowness" not in one
    runs = tmp_path / "runs.jsonl"
    other = line(3.0, None) | {"rows": 16}
    runs.write_text("\n".join(map(json.dumps, [line(6.0, 2.0), other])))
    monkeypatch.setattr(sys, "argv", ["driver_scaling.py", "model", str(runs)])
    with pytest.raises(SystemExit, match="mix steady and other CPU seconds"):
        scaling.main()
    runs.write_text(json.dumps(line(6.0, 2.0) | {"kind": "large"}))
    with pytest.raises(SystemExit, match="without --large"):
        scaling.main()
    # steps with work are compared with the wall
    (one,) = scaling.summaries([line(6.0, 2.0, work_s=1.0), line(3.0, 1.0, work_s=1.0)])
    assert one["seconds"] == dict.fromkeys(scaling.PARTS, 3.0) and one["slowness"] == 3.0


def test_seconds_of_a_slow_core_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = load("core_speed")
    cpu = SimpleNamespace(s=0.0, probe_s=speed.PROBE_S)

    def probe() -> float:
        cpu.s += 0.5  # not counted
        return cpu.probe_s

    monkeypatch.setattr(speed, "INTERVAL_S", 1000.0)  # no signal during the test
    monkeypatch.setattr(speed, "probe", probe)
    monkeypatch.setattr(time, "process_time", lambda: cpu.s)
    with speed.SteadyClock() as clock:
        assert (clock.now(), clock.spent) == (0.0, 0.5)
        cpu.s += 3.0
        assert clock.now() == 3.0
        clock._tick()
        cpu.probe_s *= 3
        cpu.s += 8.0
        assert clock.now() == 3.0 + 8.0  # the speed of the last probe, until the next
        clock._tick()
        assert clock.now() == 3.0 + 8.0 / 2  # between both speeds
        cpu.s += 6.0
        assert clock.now() == 7.0 + 6.0 / 3
        assert clock.spent == 3 * 0.5


def test_probes_run_while_the_process_does_and_end_with_the_clock() -> None:
    speed = load("core_speed")
    handler = signal.getsignal(signal.SIGPROF)
    with pytest.raises(KeyError), speed.SteadyClock() as clock:
        first = clock.spent
        began = time.process_time()
        while time.process_time() - began < 0.3:
            pass
        assert clock.spent > first > 0
        assert clock.now() > 0
        raise KeyError
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is handler


def test_a_signal_during_a_probe_is_not_another_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = load("core_speed")
    probes = []

    def probe() -> float:
        probes.append(speed.PROBE_S)
        clock._tick()
        return speed.PROBE_S

    monkeypatch.setattr(speed, "probe", probe)
    monkeypatch.setattr(speed, "INTERVAL_S", 1000.0)
    clock = speed.SteadyClock()
    with clock:
        clock._tick()
    assert len(probes) == 2


def test_the_queue_of_the_driver_by_hand() -> None:
    queue = load("driver_scaling").queue
    assert queue(8.0, 4.0, 0.0, 4) == 12.0  # the driver alone
    assert queue(8.0, 0.0, 10.0, 4) == 18.0  # the last part is sent after 8 s
    assert queue(8.0, 4.0, 10.0, 4) == 19.0  # three answers while others work
    assert queue(8.0, 40.0, 10.0, 4) == 12.0 + 40.0  # answers from 12 s on, one after the other
    assert queue(8.0, 4.0, 10.0, 1) == 22.0  # one worker: nothing overlaps
    assert queue(8.0, 4.0, 1.0, 4) == 12.0  # the driver has no pause: the last worker ends after 9 s
    assert queue(0.0, 4.0, 10.0, 4) == 14.0  # all workers end at the same time


def test_the_step_of_a_driver_by_hand() -> None:
    step_s = load("driver_scaling").step_s
    seconds = {"generate": 6.0, "infer": 9.0, "shape": 2.0, "update": 3.0, "finish": 1.0, "answers": 8.0, "sends": 8.0}
    # 5 s between calls, and two calls that send for 4 s and end 1 s after the work of their last worker
    assert step_s(seconds, 2, 20.0, 4) == 5.0 + 2 * (4.0 + 10.0 + 1.0)
    del seconds["sends"]
    assert step_s(seconds, 2, 20.0, 4) == 2 * (6.5 + 10.0 + 1.0)


@pytest.mark.full  # the test of waiting times measures a size in this process
def test_each_size_has_a_driver_of_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    command = [sys.executable, str(BENCH / "driver_scaling.py"), "measure", "--out", str(runs), "--rounds", "1"]
    command += ["--steps", "2", "--columns", "driver", "--without-ray", "--cases", "16x16x2", "512x64x8"]
    subprocess.run(command, check=True)
    found = [json.loads(line) for line in runs.read_text().splitlines()]
    assert sorted((line["kind"], line["rows"], line["workers"]) for line in found) == [
        ("fit", 512, 8), ("fit", 512, 8), ("predict", 16, 2), ("predict", 16, 2)
    ]  # fmt: skip


def test_a_simulated_worker_works_from_when_its_part_was_sent() -> None:
    scaling = load("driver_scaling")
    worker = scaling.SimulatedWorker.__new__(scaling.SimulatedWorker)
    worker.work_for(0.1)
    sent_at = time.monotonic()
    worker.update_actor(DataProto(), sent_at=sent_at)
    assert time.monotonic() - sent_at >= 0.1
    assert worker.late_answers() == 0
    worker.update_actor(DataProto(), sent_at=sent_at)
    assert worker.late_answers() == 1


def test_waiting_times_are_compared_with_those_of_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = load("driver_scaling")
    runs = tmp_path / "runs.jsonl"
    command = ["driver_scaling.py", "measure", "--out", str(runs), "--cases", "16x16x2", "--rounds", "1"]
    command += ["--columns", "driver"]
    monkeypatch.setattr(sys, "argv", [*command, "--without-ray"])
    scaling.main()
    quick = json.loads(runs.read_text()) | {"kind": "fit"}
    assert quick["work_s"] == 0.0 < quick["wall_s"]
    wall = {"work_s": 3.0, "late_answers": 0, "ready_s": 0.1, "last_answers_s": 0.2}
    slow, fast = ({**quick, **wall, "wall_s": wall_s} for wall_s in (3.75, 3.5))
    found = scaling.summaries([quick, slow, fast])
    assert [(scaling.worked(line), line["wall_s"]) for line in found] == [(0.0, quick["wall_s"]), (3.0, 3.5)]
    other = {**fast, "seconds": dict.fromkeys(quick["seconds"], 7.0)}
    plain, with_work = (scaling.fit(lines, False) for lines in ([quick], [quick, other]))
    assert all((plain[phase] == with_work[phase]).all() for phase in scaling.PARTS)
    scaling.compare_waiting([fast], {False: plain}, print)
    header, _, row = ([cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.split("\n")[1:4])
    cells = dict(zip(header, row, strict=True))
    assert (cells["work s"], cells["wall s"], cells["added s"]) == ("3", "3.50", "0.50")
    expected = scaling.step_s(quick["seconds"], quick["calls"], 3.0, 2)
    assert float(cells["predicted s"]) == pytest.approx(expected, abs=0.006)
    monkeypatch.setattr(sys, "argv", [*command, "--without-ray", "--work-s", "1"])
    with pytest.raises(SystemExit, match="needs Ray"):
        scaling.main()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_takes_at_least_the_work_of_its_workers(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    command = [sys.executable, str(BENCH / "driver_scaling.py"), "measure", "--out", str(runs), "--cases", "16x16x2"]
    command += ["--rounds", "1", "--actors", "1", "--store-mb", "100", "--work-s", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    through_driver, by_reference = map(json.loads, runs.read_text().splitlines())
    for line in (through_driver, by_reference):
        assert line["work_s"] == 1.5 <= line["wall_s"]
        assert 0 < line["seconds"]["sends"] < sum(line["seconds"][phase] for phase in ("generate", "infer", "update"))
    assert "steady_seconds" not in through_driver
    assert all(seconds > 0 for seconds in by_reference["steady_seconds"].values())


def test_messages_are_those_of_a_step() -> None:
    scaling = load("driver_scaling")
    sizes = scaling.messages(16, 64, 1)
    assert len(sizes) == sum(scaling.CALLS.values())
    prompts, responses = 16 * 8, 16 * 56
    # int64 ids and masks, all below the size from which they are narrowed; fp32 log-probabilities
    assert sizes[0][0] == pytest.approx(16 * prompts, rel=0.5)
    assert sizes[0][1] == pytest.approx(8 * (prompts + 2 * responses + 3 * 16 * 64) + 4 * responses, rel=0.1)
    assert scaling.messages(8192, 64, 1)[2][1] == pytest.approx(8 * 8192 * 56, rel=0.01)  # two columns of fp32


def test_a_message_holds_the_token_counts_of_all_rows() -> None:
    scaling = load("driver_scaling")
    group = scaling.InProcess(64, scaling.Account())
    scaling.Step(group, False, 4096, 16).run()
    for found, expected in zip(group.messages, scaling.messages(4096, 16, 64), strict=True):
        assert found == pytest.approx(expected, rel=0.02, abs=100)
    assert group.messages[-1][0] > 2 * 4096  # two bytes of each count, in a part of 64 rows


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
