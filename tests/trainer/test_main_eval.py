"""``main_eval``: means per row and source, scorers of one's own, and errors that name row and file."""

import json
import logging
from pathlib import Path

import datasets
import pytest
from hydra import compose, initialize_config_dir

from verl.trainer import main_eval
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.config.invocation import call
from verl.trainer.run import launch

GSM8K = "openai/gsm8k"


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    monkeypatch.setattr(launch, "catch_signals", lambda: None)


def row(source, responses, truth, **more):
    return {"data_source": source, "responses": responses, "reward_model": {"ground_truth": truth}} | more


ROWS = [
    row(GSM8K, ["#### 4", "#### 5"], "4"),
    row(GSM8K, ["#### 1", "no"], "7"),
    row("lighteval/MATH", ["so \\boxed{3}", "\\boxed{3}"], "3"),
]


def build(folder: Path, rows, *more: str, scorer: str | None = None):
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    options = [f"data.path={folder}/rows.parquet", f"hydra.run.dir={folder}", *more]
    if scorer is not None:
        (folder / "scorer.py").write_text(scorer)
        options.append(f"custom_reward_function.path={folder}/scorer.py")
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose("evaluation", options)


def said(caplog) -> dict:
    return json.loads(caplog.messages[-1])


@pytest.fixture
def console(caplog, monkeypatch):
    from verl.utils.observe.console import get_console

    monkeypatch.setattr(get_console(), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def test_means_by_the_built_in_scorers(ray_cluster, tmp_path, console):
    main_eval.run_eval(build(tmp_path, ROWS))
    # half of the first row is right, none of the second; all of the third
    assert said(console) == {f"test_score/{GSM8K}": 0.25, "test_score/lighteval/MATH": 1.0}


def test_a_scorer_of_ones_own_over_many_rows(ray_cluster, tmp_path, console):
    """Rows keep their order over batches; the score of row i is i, by whichever process."""
    rows = [row("mine", [str(i), str(i)], None, extra_info={"plus": i % 2}) for i in range(100)]
    scorer = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    scorer += "    return {'score': int(solution_str) + extra_info['plus'], 'more': 1}\n"
    config = build(tmp_path, rows, scorer=scorer)
    path, read, function = main_eval.prepare(config)
    assert [each.mean() for each in main_eval.score_on_ray(path, read, function)] == [i + i % 2 for i in range(100)]
    main_eval.run_eval(config)
    assert said(console) == {"test_score/mine": 50.0}


def test_a_scorer_that_fails_is_told_with_row_and_file(ray_cluster, tmp_path, capsys):
    scorer = "def compute_score(data_source, solution_str, ground_truth):\n    return 1 / (int(solution_str) - 3)\n"
    rows = [row("mine", [str(i)], None) for i in range(6)]
    with pytest.raises(SystemExit) as exit:
        main_eval.run_eval(build(tmp_path, rows, scorer=scorer))
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert f"{tmp_path}/rows.parquet, row 3: " in message and "ZeroDivisionError" in message


def test_a_response_that_takes_too_long_costs_its_own_score_alone(ray_cluster, tmp_path, console):
    """Waiting and computing are ended alike; the rest of the row and the rows behind it are scored."""
    scorer = "import time\ndef compute_score(data_source, solution_str, ground_truth):\n"
    scorer += "    if solution_str == 'wait': time.sleep(600)\n"
    scorer += "    while solution_str == 'compute': pass\n    return float(solution_str)\n"
    rows = [row("mine", ["1", "wait"], None), row("mine", ["compute", "2", "3"], None), row("other", ["4"], None)]
    main_eval.run_eval(build(tmp_path, rows, "scoring.timeout_s=1", "scoring.failure_score=-2", scorer=scorer))
    # the first row -1/2, the second 1
    assert said(console) == {"test_score/mine": 0.25, "test_score/other": 4.0, "timed_out/mine": 2}


def test_a_late_response_is_as_bad_as_the_lowest_score():
    """The lowest that the scorer states, else the smaller of 0 and the lowest of its own data source."""
    rows = [main_eval.Row(0, source, ["x"] * 2, "1", None) for source in ("math_dapo", "mine", "yours")]
    scores = [main_eval.RowScore([1.0], 1), main_eval.RowScore([-3.0], 1), main_eval.RowScore([2.0], 1)]
    stated = {"math_dapo": -1.0}.get
    found = main_eval.summarise(rows, scores, stated)
    assert found["test_score/math_dapo"] == 0.0
    assert (found["test_score/mine"], found["test_score/yours"]) == (-3.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([row("mine", ["x"], "1")], [], r"row 0, column 'data_source': no scorer for 'mine'.*custom_reward_function"),
        ([ROWS[0], row(GSM8K, [], "1")], [], r"row 1, column 'responses' .*is empty"),
        ([ROWS[0], row(GSM8K, ["a", None], "1")], [], r"row 1, column 'responses' .*holds a null"),
        ([ROWS[0], row(None, ["a"], "1")], [], r"row 1, column 'data_source'.*is null"),
        ([row(GSM8K, "text", "1")], [], r"row 0, column 'responses'.*must be a list of strings"),
        (ROWS, ["data.response_key=answers"], r"column 'answers' \(data\.response_key\): is missing"),
        (ROWS, ["data.reward_model_key=data_source"], r"column 'data_source': must be a dict with ground_truth"),
        (ROWS, ["data.path=/nowhere.parquet"], r"data\.path=.*nowhere.*no such file"),
        (ROWS, ["custom_reward_function.path=/nowhere.py"], r"/nowhere\.py"),
        (ROWS, ["scoring.timeout_s=0"], r"scoring\.timeout_s=0: must be a positive number of seconds"),
        (ROWS, ["scoring.failure_score=none"], r"scoring\.failure_score=none: must be a finite number"),
    ],
)
def test_what_is_refused_before_ray(tmp_path, capsys, rows, more, message):
    import re

    with pytest.raises(SystemExit) as exit:
        main_eval.run_eval(build(tmp_path, rows, *more))
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_check_passes_and_scores_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(call, "only_checks", True)
    with pytest.raises(SystemExit) as exit:
        main_eval.run_eval(build(tmp_path, ROWS))
    assert exit.value.code == 0 and "passed all checks" in capsys.readouterr().out.splitlines()
