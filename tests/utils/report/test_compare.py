"""A comparison names the first step and phase in which two records differ."""

import copy

import pytest

from verl.errors import WrongInput
from verl.utils.report.__main__ import main
from verl.utils.report.compare import compare_runs


def test_the_first_difference_is_named(records, tmp_path, capsys):
    entries = records.healthy(steps=4)
    records.write(tmp_path / "a", entries)
    other = copy.deepcopy(entries)
    other[2]["data"]["timing_s/step"] = 9.0  # time is no difference
    records.write(tmp_path / "b", other)
    result = compare_runs(tmp_path / "a", tmp_path / "b")
    assert result.difference is None and result.by_digests and result.steps == (1, 2, 3, 4)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0

    other[3]["phases"]["weights"]["actor_rollout, rank 0"] = "f" * 16
    other[4]["phases"]["generate"]["responses"] = "e" * 16
    records.write(tmp_path / "b", other)
    assert str(compare_runs(tmp_path / "a", tmp_path / "b").difference) == (
        "step 3, phase weights: actor_rollout, rank 0 differ"
    )
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "over 4 common steps, 1 to 4: step 3, phase weights: actor_rollout, rank 0" in capsys.readouterr().out


def test_a_random_state_that_nothing_has_seeded_is_no_difference(records, tmp_path):
    entries = records.healthy(steps=3)
    other = copy.deepcopy(entries)
    for step in entries:
        entries[step]["phases"]["random state"] = {"rank 0": "a", "rank 1": "b"}
        other[step]["phases"]["random state"] = {"rank 0": "a", "rank 1": "c"}
    other[3]["phases"]["random state"]["rank 0"] = "d"
    records.write(tmp_path / "a", entries)
    records.write(tmp_path / "b", other)
    assert str(compare_runs(tmp_path / "a", tmp_path / "b").difference) == (
        "step 3, phase random state: rank 0, rank 1 differ"
    )
    other[3]["phases"]["random state"]["rank 0"] = "a"
    records.write(tmp_path / "b", other)
    assert compare_runs(tmp_path / "a", tmp_path / "b").difference is None


def test_records_without_digests_are_compared_by_metrics(records, tmp_path):
    entries = records.healthy(steps=3)
    records.write(tmp_path / "a", entries)
    for entry in entries.values():
        del entry["phases"]
    entries[2]["data"]["actor/grad_norm"] = 7.0
    records.write(tmp_path / "b", entries)
    result = compare_runs(tmp_path / "a", tmp_path / "b")
    assert not result.by_digests
    assert str(result.difference) == "step 2, phase metrics: actor/grad_norm differ"


def test_a_run_that_resumed_in_a_folder_of_its_own_equals_one_that_did_not_stop(records, tmp_path, capsys):
    """Its record starts with a validation of the loaded weights, at a step that the other run trained."""
    entries = records.healthy(steps=6)
    entries[3]["data"]["val-core/sums/acc/mean@1"] = 0.5
    resumed = {step: copy.deepcopy(entry) for step, entry in entries.items() if step > 3}
    resumed[3] = {"data": {"val-core/sums/acc/mean@1": 0.5, "val-aux/sums/acc/std@2": 0.1}}
    resumed[5]["data"]["val-core/sums/acc/mean@1"] = 0.6  # validated at other steps
    records.write(tmp_path / "a", entries)
    records.write(tmp_path / "b", resumed)
    result = compare_runs(tmp_path / "a", tmp_path / "b")
    assert result.difference is None and result.by_digests and result.steps == (3, 4, 5, 6) and result.alone == (2, 0)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"over 4 common steps, 3 to 6; 2 more only in {tmp_path / 'a'}" in capsys.readouterr().out
    for step, phase in ((5, "weights"), (3, "metrics")):
        if phase == "weights":
            resumed[5]["phases"]["weights"]["actor_rollout, rank 0"] = "f" * 16
        else:
            resumed[3]["data"]["val-core/sums/acc/mean@1"] = 0.4
        records.write(tmp_path / "b", resumed)
        difference = compare_runs(tmp_path / "a", tmp_path / "b").difference
        assert (difference.step, difference.phase) == (step, phase)


def test_ranks_of_other_layouts_are_not_listed(records, tmp_path):
    entries = records.healthy(steps=2)
    other = copy.deepcopy(entries)
    for rank in range(8):
        other[1]["phases"]["weights"][f"actor_rollout, rank {rank}"] = f"{rank:016x}"
    records.write(tmp_path / "a", entries)
    records.write(tmp_path / "b", other)
    text = str(compare_runs(tmp_path / "a", tmp_path / "b").difference)
    assert text == "step 1, phase weights: actor_rollout (1 and 8 ranks) differ"
    for name in "abcdefghijkl":
        other[1]["phases"]["generate"][name] = name
    records.write(tmp_path / "b", other)
    assert str(compare_runs(tmp_path / "a", tmp_path / "b").difference).endswith("f, g, h and 4 more differ")


def test_validations_alone_are_compared_by_metrics(records, tmp_path):
    for name in "ab":
        records.write(tmp_path / name, {0: {"data": {"val-core/x/acc/mean@1": 0.5}}})
    result = compare_runs(tmp_path / "a", tmp_path / "b")
    assert result.steps == (0,) and not result.by_digests and result.difference is None


def test_what_cannot_be_compared(records, tmp_path, capsys):
    entries = records.healthy(steps=2)
    records.write(tmp_path / "a", {1: entries[1]})
    records.write(tmp_path / "b", {2: entries[2]})
    with pytest.raises(WrongInput, match="no step in common"):
        compare_runs(tmp_path / "a", tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "give the trainer.default_local_dir" in capsys.readouterr().err
