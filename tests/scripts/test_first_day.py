"""The commands of the first day on GPUs, which no test runs: each passes the checks of a run."""

import os
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from scripts import first_day
from scripts.first_day import CASES, Case, chosen_cases, figures_of, keys_of, outcome, table, words_of
from tests.special_sanity.test_examples import check, composed, use_files_of_the_test

ALL = [pytest.param(case, id=f"{suite}-{case.name}") for suite, cases in CASES.items() for case in cases]
RUNS = [param for param in ALL if param.values[0].commands is None]


@cache
def base(name: str) -> DictConfig:
    """Compose a configuration once for all cases."""
    return composed("verl.trainer.main_ppo", [], name)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("case", RUNS)
def test_a_run_passes_the_checks_before_the_start(case: Case, device: str, tmp_path: Path) -> None:
    _, _, module, flag, *words = words_of(case, device, tmp_path, tmp_path / "models")
    assert (module, flag) == ("verl.trainer.main_ppo", f"--config-name={case.config_name}")
    config = deepcopy(base(case.config_name))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(words), config)
    use_files_of_the_test(config, tmp_path)
    if "tool_config_path" in str(case.keys):
        first_day.write_tool(tmp_path)
    check(config, "verl.trainer.main_ppo")
    assert config.trainer.device == device and config.trainer.n_gpus_per_node == case.workers_on(device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_tests_that_a_case_runs_are_there(device: str) -> None:
    """Each expression chooses a test of its file; pytest itself would start engines to tell."""
    commands = [case.commands(device, 1) for cases in CASES.values() for case in cases if case.commands]
    of_tests = [words for words in commands if "pytest" in words]
    assert len(of_tests) == 4
    for words in of_tests:
        (file,) = [word for word in words if word.endswith(".py")]
        text = (first_day.ROOT / file).read_text()
        expression = words[words.index("-k") + 1].split(" and ")
        named = expression[2 if "hybrid" in expression else 1]
        assert named == "not full" or re.search(rf"def test_\w*{named}", text), (file, named)


def test_a_table_of_what_came_out(tmp_path: Path) -> None:
    """The worst gap and checksum, the figures of the last step, and the memory of the first three."""
    lines = [
        '{"step": 1, "data": {"training/rollout_probs_diff_max": 0.2, "weight_sync/checksum_ok": 1, '
        '"perf/max_memory_allocated_gb": 10.0}}',
        '{"step": 2, "data": {"training/rollout_probs_diff_max": 0.01, "weight_sync/checksum_ok": 1, '
        '"perf/mfu/actor": 0.4, "perf/max_memory_allocated_gb": 12.25}}',
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(lines))
    found = figures_of(run / "metrics.jsonl", "cuda")
    assert (found["gap"], found["checksum"], found["MFU"], found["GiB 1, 2, 3"]) == (0.2, 1, 0.4, "10.0, 12.2")
    log = tmp_path / "case.log"
    log.write_text("$ python\nError: CUDA out of memory | here")
    rows = [
        {"case": "a", **outcome(Case("case", ""), 0, log, run, "cuda")},
        {"case": "b", **outcome(Case("case", "", limit=0.3), 0, log, run, "cuda")},
        {"case": "c", **outcome(Case("case", ""), 1, log, run, "cuda")},
        {"case": "d", **outcome(Case("case", "", killed="kill:update_actor"), 1, log, run, "cuda")},
    ]
    assert table(rows).splitlines() == [
        "| case | result | gap | checksum | MFU | GiB 1, 2, 3 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | failed: gap above 0.1 | 0.2 | 1 | 0.4 | 10.0, 12.2 |",
        "| b | passed | 0.2 | 1 | 0.4 | 10.0, 12.2 |",
        "| c | failed: Error: CUDA out of memory / here |  |  |  |  |",
        "| d | failed: the run outlived its worker |  |  |  |  |",
    ]


HANGS = Case("hangs", "", commands=lambda device, workers: [sys.executable, "-c", "import time; time.sleep(600)"])
FAILS = Case("fails", "", commands=lambda device, workers: [sys.executable, "-c", "raise SystemExit('no GPU')"])


def test_what_hangs_leaves_its_stacks_and_no_process(tmp_path: Path) -> None:
    row = first_day.run(HANGS, "cpu", tmp_path, tmp_path, limit_s=2)
    assert row["result"] == "hung: hangs.stacks"
    stacks = (tmp_path / "hangs.stacks").read_text()
    assert "py-spy" in stacks and "nvidia-smi" in stacks


def test_a_node_stops_at_the_first_failure_and_one_gpu_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(first_day, "make_files", lambda folder: None)
    monkeypatch.setattr(first_day, "versions", lambda device: "versions")
    for suite, rows in (("node", 1), ("gpu", 2)):
        assert first_day.run_all(suite, [FAILS, FAILS], "cpu", tmp_path / suite, tmp_path) == 1
        written = (tmp_path / suite / "table.md").read_text()
        assert written.count("| fails | failed: no GPU |") == rows and "versions" in written


def test_a_model_that_cannot_be_written_fails_its_case_and_leaves_no_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(first_day, "make_files", lambda folder: None)
    monkeypatch.setattr(first_day, "versions", lambda device: "versions")
    case = Case("trains", "", model="unknown")
    assert first_day.run_all("gpu", [case], "cpu", tmp_path / "out", tmp_path / "models") == 1
    assert "| trains | failed: the model unknown could not be written" in (tmp_path / "out/table.md").read_text()
    assert not (tmp_path / "models/unknown").exists()


def test_a_resumed_case_brings_the_one_that_it_continues() -> None:
    assert [case.name for case in chosen_cases("node", ["resumed-after-update"])] == [
        "killed-in-update",
        "resumed-after-update",
    ]
    with pytest.raises(SystemExit, match="unknown cases"):
        list(chosen_cases("gpu", ["resumed"]))
    (resumed,) = [case for case in CASES["node"] if case.continues == "killed-in-update"]
    assert keys_of(resumed, "cuda")["trainer.default_local_dir"] == "OUT/killed-in-update"


@pytest.mark.parametrize("script", ["first_gpu.sh", "first_node.sh"])
def test_the_scripts_list_their_commands(script: str) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    words = ["bash", str(first_day.ROOT / "scripts" / script), "--list", "--device", "cpu"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("# ") == len(CASES[script[6:-3]])
