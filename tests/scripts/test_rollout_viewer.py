"""The viewer shows dumps that the trainer's writer wrote."""

import pytest

from scripts.rollout_viewer import main
from verl.trainer.ppo.records import dump_generations


@pytest.fixture
def folder(tmp_path):
    for step, scores in ((2, [0.0, 1.0]), (10, [1.0, 0.25, 0.0])):
        count = range(len(scores))
        inputs, outputs = [f"question {step}.{i}" for i in count], [f"answer {step}.{i} [b]" for i in count]
        dump_generations(str(tmp_path), step, inputs, outputs, ["truth"] * len(scores), scores, {"acc": scores})
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "there", "absent"),
    [
        ([], ["question 10.0", "question 10.2", "0.250", "3 of 3 samples"], ["question 2.0"]),
        (["--step", "2"], ["question 2.0", "2 of 2 samples"], ["question 10.0"]),
        (["--step", "all", "--max-score", "0"], ["question 2.0", "question 10.2", "2 of 2"], ["10.1", "2.1"]),
        (["--min-score", "0.2", "--max-score", "0.5"], ["question 10.1", "1 of 1"], ["10.0"]),
        (["--find", "answer 10.2"], ["question 10.2"], ["10.1"]),
        (["--limit", "1"], ["question 10.0", "1 of 3 samples"], ["10.1"]),
        (["--step", "10", "--show", "1"], ["question 10.1", "answer 10.1 [b]", "truth", "acc: 0.25"], ["10.2"]),
    ],
)
def test_what_is_shown(folder, capsys, arguments, there, absent):
    assert main([str(folder), *arguments]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in there) and not any(text in said for text in absent), said


def test_a_file_alone_and_errors(folder, tmp_path_factory, capsys):
    assert main([str(folder / "2.jsonl")]) == 0
    assert main([str(folder), "--step", "3"]) == 2
    assert "--step 3" in (said := capsys.readouterr().err) and "one of 2, 10" in said
    dump_generations(str(folder), 9, ["a"], ["one\u2028line"], ["truth"], [float("nan")], {})
    assert main([str(folder), "--step", "9"]) == 0 and main([str(folder), "--step", "9", "--min-score", "0"]) == 1
    assert main([str(tmp_path_factory.mktemp("empty"))]) == 2
    assert "no <step>.jsonl" in capsys.readouterr().err
    (folder / "11.jsonl").write_text('{"input": "a"}\n{"inp')
    assert main([str(folder)]) == 2
    assert "11.jsonl, line 2" in capsys.readouterr().err
    for garbage in (b"\xff\xfe", b"[1]", b'{"score": "high"}'):
        (folder / "11.jsonl").write_bytes(garbage)
        assert main([str(folder)]) == 2
        assert "11.jsonl, line 1: is not a sample" in capsys.readouterr().err
