"""Names and folders of a run, before anything is written."""

import pytest

from verl.trainer.config.rules.files import folder_rules, name_rules


@pytest.mark.parametrize("name", ["../..", "..", "a/../../b", "/tmp/x", "~root/x", "./../x"])
def test_a_name_that_leads_out_is_refused(name):
    (violation,) = name_rules({"trainer.experiment_name": name})
    assert str(violation).startswith(f"trainer.experiment_name={name}: leads out")


@pytest.mark.parametrize("name", ["team/run", "run 3", "a/../b", "..hidden", "v1.0", 7, None])
def test_a_name_may_hold_subfolders(name):
    assert not [*name_rules({"trainer.project_name": name})]


def test_a_file_in_the_way_is_named_at_any_depth(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/a", "file/a/b/c"):
        (violation,) = folder_rules({"trainer.default_local_dir": str(tmp_path / folder)})
        assert violation.expected == f"must be a folder: {tmp_path}/file is a file"
    assert not [*folder_rules({"a": str(tmp_path / "new" / "deep"), "b": None, "c": "hdfs://x"})]
