"""Times of tests by folder and by age."""

from pathlib import Path

import pytest

from scripts import suite_times

REPORT = """<testsuites><testsuite>
<testcase file="tests/algos/test_a.py" name="test_one[mean@4]@algos/test_a" time="1.5"/>
<testcase file="tests/algos/test_a.py" name="test_one[x]" time="0.5"/>
<testcase file="tests/utils/report/test_b.py" name="test_two@utils/report/test_b" time="6.0"/>
</testsuite></testsuites>"""


def test_shares_by_folder_and_by_age(tmp_path: Path, monkeypatch, capsys) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    monkeypatch.setattr(suite_times, "functions_at", lambda revision: {"test_one"})
    suite_times.main([str(report), "--depth", "1", "--since", "v1", "--slowest", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "      6.0 s  75.0 %  tests/utils",
        "      2.0 s  25.0 %  tests/algos",
        "      8.0 s 100.0 %  3 tests",
        "",
        "      6.0 s  75.0 %  tests since v1",
        "      2.0 s  25.0 %  earlier tests",
        "",
        "      6.0 s  tests/utils/report/test_b.py::test_two",
        "      1.5 s  tests/algos/test_a.py::test_one[mean@4]",
    ]


def test_a_missing_report_and_an_unknown_revision_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run scripts/test\.sh first"):
        suite_times.read(tmp_path / "none.xml")
    with pytest.raises(ValueError, match="--since no-such-revision"):
        suite_times.functions_at("no-such-revision")
