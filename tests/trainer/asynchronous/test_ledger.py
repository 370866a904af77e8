"""The ledger of asynchronous training: what it keeps after a kill, which changes it finds, and how it fails."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from verl.errors import ContractError, LedgerError, LedgerFileError
from verl.trainer.asynchronous.audit import main
from verl.trainer.asynchronous.ledger import FORMAT, KINDS, Ledger, LedgerReader
from verl.utils.faults import InjectedFault

APPENDING = """
import hashlib, json, os, sys, threading
from pathlib import Path
from verl.trainer.asynchronous.ledger import Ledger

def append(name):
    for number in range(10**9):
        payload = bytes([number % 251]) * (number * 977 % 60_000)
        facts = {"thread": name, "number": number, "sha": hashlib.sha256(payload).hexdigest()}
        seq = ledger.append("turn", facts, payload, durable=number % 16 == 0)
        os.write(1, (json.dumps([seq, facts]) + "\\n").encode())  # at once, and whole

with Ledger(Path(sys.argv[1])) as ledger:
    thread = threading.Thread(target=append, args=["second"], daemon=True)
    thread.start()
    append("first")
"""
"""A process that appends from two threads until it is killed, and tells each event whose append has returned."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger of six events, of which all but the first and the last have a payload."""
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        ledger.append("drawn", {"number": 0, "uid": "ä"})
        for version in range(2):
            ledger.append("turn", {"version": version, "log_prob": -0.1, "none": None}, bytes(range(version, 200)))
        ledger.append("scored", {"number": 0, "scores": [float("inf")]}, b"")
        ledger.append("batch", {"update": 0, "version": 0, "numbers": [0]}, b"batch", durable=True)
        ledger.append("update", {"step": 1})
    return path


def contents(path: Path) -> list[tuple[object, ...]]:
    """Return all events of a ledger without their times."""
    with LedgerReader(path) as reader:
        reader.verify()
        return [(each.seq, each.kind, each.facts, each.payload) for each in reader.events(with_payload=True)]


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_events_come_back_as_they_were_appended(path: Path) -> None:
    with LedgerReader(path) as reader:
        assert reader.last_seq == 6 and reader.base_seq == 0
        events = list(reader.events())
        assert [each.seq for each in events] == [1, 2, 3, 4, 5, 6]
        assert [each.kind for each in events] == ["drawn", "turn", "turn", "scored", "batch", "update"]
        assert events[0].facts == {"number": 0, "uid": "ä"}
        assert events[1].facts == {"version": 0, "log_prob": -0.1, "none": None}
        assert events[3].facts == {"number": 0, "scores": [float("inf")]}
        assert all(each.payload is None for each in events)
        assert [each.time_ns for each in events] == sorted(each.time_ns for each in events)
        assert [each.payload for each in reader.events("drawn", "turn", with_payload=True)] == [
            None,
            bytes(range(200)),
            bytes(range(1, 200)),
        ]
        assert [each.seq for each in reader.events("turn", "update", after=2)] == [3, 6]
        assert reader.payload(4) == b"" and reader.payload(5) == b"batch"
        with pytest.raises(LedgerError, match="event 1 has no payload"):
            reader.payload(1)
        with pytest.raises(LedgerError, match="event 7 does not exist"):
            reader.payload(7)


def test_the_digest_is_the_one_of_its_definition(path: Path) -> None:
    """The form of the file: a ledger of today is checked by later versions."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT seq, kind, time_ns, facts, payload, digest FROM events ORDER BY seq"
        ).fetchall()
    previous = bytes(32)
    for seq, kind, time_ns, facts, payload, digest in rows:
        content = json.dumps([seq, kind, time_ns, json.loads(facts)], sort_keys=True, separators=(",", ":"))
        of_payload = b"" if payload is None else hashlib.sha256(payload).digest()
        previous = hashlib.sha256(previous + content.encode() + of_payload).digest()
        assert digest == previous


def test_a_ledger_goes_on_where_it_was_closed(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.last_seq == 6
        assert ledger.append("published", {"version": 1}) == 7
        ledger.verify()
    assert len(contents(path)) == 7


def test_more_events_than_one_query_returns(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        for number in range(1, 101):
            assert ledger.append("turn" if number % 7 else "batch", {"number": number}) == number
        assert [each.facts["number"] for each in ledger.events()] == list(range(1, 101))
        assert [each.seq for each in ledger.events("batch", after=7)] == list(range(14, 101, 7))


def test_a_loop_over_events_may_append(path: Path) -> None:
    with Ledger(path) as ledger:
        events = ledger.events()
        assert len([ledger.append("failed", {"of": each.seq}) for each in events]) == 6


def test_a_reader_follows_a_living_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger, LedgerReader(path) as reader:
        assert reader.last_seq == 0 and list(reader.events()) == []
        ledger.append("drawn", {"uid": "a"}, b"1")
        started = reader.events(with_payload=True)
        ledger.append("drawn", {"uid": "b"}, b"2")
        assert [each.payload for each in started] == [b"1"]
        assert reader.last_seq == 2 and reader.payload(2) == b"2"
        reader.verify()
    with LedgerReader(path) as reader, Ledger(path) as again:
        again.append("drawn", {"uid": "c"})
        assert reader.last_seq == 3


def test_appends_of_several_threads_form_one_chain(tmp_path: Path) -> None:
    seqs: list[int] = []
    with Ledger(tmp_path / "ledger.db") as ledger:

        def append(name: str) -> None:
            seqs.extend(
                ledger.append("turn", {"thread": name}, name.encode(), durable=number == 5) for number in range(40)
            )
            assert {each.facts["thread"] for each in ledger.events()} >= {name}

        threads = [threading.Thread(target=append, args=[name]) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ledger.verify()
        assert sorted(seqs) == list(range(1, 121)) == [each.seq for each in ledger.events()]
        assert all(each.payload == str(each.facts["thread"]).encode() for each in ledger.events(with_payload=True))


def test_durable_events_are_committed_with_a_flush(path: Path) -> None:
    """Usual events are not: a flush costs more than all the rest."""
    with Ledger(path) as ledger:
        commits: list[str] = []
        ledger._writer.set_trace_callback(commits.append)
        ledger.append("turn", {})
        ledger.append("checkpoint", {}, durable=True)
        ledger.append("turn", {})
        assert [each.split()[-1] for each in commits if "synchronous" in each] == ["NORMAL", "FULL", "NORMAL"]


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["UPDATE events SET payload = x'00' || substr(payload, 2) WHERE seq = 3"], r"event 3 \(turn\): its payload"),
        (["UPDATE events SET payload = NULL WHERE seq = 4"], r"event 4 \(scored\): its payload"),
        (["UPDATE events SET payload = x'' WHERE seq = 1"], r"event 1 \(drawn\): its payload"),
        (["UPDATE events SET payload = 7 WHERE seq = 5"], r"event 5 \(batch\): its payload"),
        (
            ["UPDATE events SET facts = replace(facts, '\"version\":0', '\"version\":1') WHERE seq = 2"],
            r"event 2 \(turn\): its facts, kind or time",
        ),
        (["UPDATE events SET facts = facts || ' ' WHERE seq = 6"], r"event 6 \(update\): its facts, kind or time"),
        (["UPDATE events SET facts = CAST(x'ff' AS TEXT) WHERE seq = 6"], r"event 6 \(update\): its facts"),
        (["UPDATE events SET kind = 'finished' WHERE seq = 2"], r"event 2 \(finished\): its facts, kind or time"),
        (["UPDATE events SET time_ns = time_ns + 1 WHERE seq = 6"], r"event 6 \(update\): its facts, kind or time"),
        (["UPDATE events SET digest = x'00' WHERE seq = 2"], r"event 2 \(turn\): its facts, kind or time"),
        (["DELETE FROM events WHERE seq = 1"], r"event 2 \(turn\): it stands in the place of event 1"),
        (["DELETE FROM events WHERE seq = 4"], r"event 5 \(batch\): it stands in the place of event 4"),
        (["DELETE FROM events WHERE seq >= 5"], "event 5 is missing, with all that follow, to 6"),
        (["DELETE FROM events WHERE seq = 6", "UPDATE ends SET last_seq = 5"], "event 5 is not the one that was"),
        (
            [f"UPDATE events SET seq = {new} WHERE seq = {old}" for old, new in ((2, 99), (3, 2), (99, 3))],
            r"event 2 \(turn\): it does not follow the event before it: the order",
        ),
        (
            ["INSERT INTO events SELECT 7, kind, time_ns, facts, payload_digest, digest, digest, NULL FROM events"
             " WHERE seq = 6"],
            "event 7 was added",
        ),
        (
            ["INSERT INTO events SELECT 0, kind, time_ns, facts, payload_digest, previous, digest, NULL FROM events"
             " WHERE seq = 1"],
            r"event 0 \(drawn\): it stands in the place of event 1",
        ),
        (["DELETE FROM ends"], "does not say which events it holds"),
        (["DROP TABLE events"], "cannot be read: no such table: events"),
    ],
    ids=str,
)  # fmt: skip
def test_a_change_is_found(path: Path, statements: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(path, *statements)
    with LedgerReader(path) as reader, pytest.raises(LedgerError, match=f"{path}: .*{message}"):
        reader.verify()
    assert main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        for number in range(40):
            ledger.append("turn", {"number": number}, os.urandom(3000))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
    path.write_bytes(content)
    with LedgerReader(path) as reader, pytest.raises(LedgerError, match=str(path)):
        reader.verify()


def test_a_segment_holds_its_part_of_the_chain(path: Path, tmp_path: Path) -> None:
    segment = tmp_path / "checkpoint" / "segment.db"
    with Ledger(path) as ledger:
        ledger.export(segment, after=2, upto=5)
        ledger.export(segment, after=2, upto=5)  # a checkpoint that is saved again
        ledger.append("published", {"version": 1})
        for after, upto in ((-1, 3), (4, 3), (0, 8)):
            with pytest.raises(ContractError, match=f"after={after}, upto={upto}.*0 < seq <= 7"):
                ledger.export(tmp_path / "other.db", after, upto)
        ledger.export(tmp_path / "none.db", after=7, upto=7)
    assert contents(segment) == contents(path)[2:5]
    assert [each.name for each in segment.parent.iterdir()] == ["segment.db"]
    assert contents(tmp_path / "none.db") == []
    change(segment, "UPDATE events SET previous = x'00' WHERE seq = 3")
    with LedgerReader(segment) as reader:
        assert (reader.base_seq, reader.last_seq) == (2, 5)
        with pytest.raises(LedgerError, match=r"event 3 \(turn\): it does not follow the event before it"):
            reader.verify()


def test_a_ledger_goes_on_from_a_segment(path: Path, tmp_path: Path) -> None:
    segment, restored, whole = (tmp_path / name for name in ("segment.db", "restored.db", "whole.db"))
    with LedgerReader(path) as reader:
        reader.export(segment, after=2, upto=5)
    with LedgerReader(segment) as reader:
        reader.export(restored, reader.base_seq, reader.last_seq)
    with Ledger(restored) as ledger:
        assert ledger.append("resumed", {"step": 1}) == 6
        ledger.export(whole, after=2, upto=6)
    assert contents(whole) == contents(restored) == [*contents(path)[2:5], (6, "resumed", {"step": 1}, None)]


def test_no_segment_is_written_of_changed_events(path: Path, tmp_path: Path) -> None:
    change(path, "DELETE FROM events WHERE seq = 4")
    with LedgerReader(path) as reader:
        with pytest.raises(LedgerError, match=rf"{path}: event 5 \(batch\)"):
            reader.export(tmp_path / "segment.db", after=2, upto=6)
        with pytest.raises(LedgerError, match=rf"{path}: event 4 does not exist"):
            reader.export(tmp_path / "segment.db", after=2, upto=4)
        reader.export(tmp_path / "earlier.db", after=0, upto=3)
    assert {each.name for each in tmp_path.iterdir()} == {"ledger.db", "ledger.db.lock", "earlier.db"}


def test_a_segment_does_not_replace_an_open_ledger(path: Path, tmp_path: Path) -> None:
    with LedgerReader(path) as reader, Ledger(tmp_path / "open.db"):
        with pytest.raises(LedgerError, match="open.db: is a ledger that is open.*remove it and open.db-wal first"):
            reader.export(tmp_path / "open.db", 0, 6)


def test_a_segment_that_cannot_be_written_is_named(path: Path) -> None:
    with LedgerReader(path) as reader, pytest.raises(LedgerError, match=f"{path}/segment.db: .*cannot be written"):
        reader.export(path / "segment.db", 0, 6)


def test_a_closed_ledger_is_one_file_without_a_log(path: Path) -> None:
    """SQLite reads it in a folder that is read only, where it could not make the files of a write-ahead log."""
    assert {each.name for each in path.parent.iterdir()} == {"ledger.db", "ledger.db.lock"}
    assert path.read_bytes()[18:20] == b"\1\1"  # the header's versions for writing and reading; 2 is a log


@pytest.mark.parametrize("name", ["missing.db", "text.db", "sqlite.db", "empty.db", "newer.db", "older.db", "."])
def test_a_file_that_is_no_ledger_is_refused(
    path: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.db").write_text("no database, but as long as the header of one" * 10)
    (tmp_path / "empty.db").touch()
    change(tmp_path / "sqlite.db", "CREATE TABLE events (seq INTEGER)")
    for other, version in (("newer.db", FORMAT + 1), ("older.db", FORMAT - 1)):
        shutil.copy(path, tmp_path / other)
        change(tmp_path / other, f"PRAGMA user_version = {version}")
    file = tmp_path / name
    with pytest.raises(LedgerFileError, match=str(file)):
        LedgerReader(file)
    assert main([str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    if name not in ("missing.db", "empty.db"):  # they become ledgers
        before = file.read_bytes() if file.is_file() else b""
        with pytest.raises(LedgerError, match=str(file)):
            Ledger(file)
        assert not file.is_file() or file.read_bytes() == before


def test_a_path_with_signs_of_a_uri_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=ro#%41.db"
    with Ledger(path) as ledger:
        ledger.append("drawn", {})
        ledger.export(tmp_path / "s?.db", 0, 1)
    assert len(contents(path)) == len(contents(tmp_path / "s?.db")) == 1


def test_wrong_arguments_are_refused(path: Path) -> None:
    with Ledger(path) as ledger:
        with pytest.raises(ContractError, match="kind='drwan': must be one of drawn, sent"):
            ledger.append("drwan", {})
        with pytest.raises(ContractError, match="kind='drwan'"):
            ledger.events("turn", "drwan")
        with pytest.raises(ContractError, match=r"facts of an event \(turn\) must be JSON: .*set"):
            ledger.append("turn", {"tokens": {1, 2}})  # type: ignore[dict-item]
        assert ledger.append("turn", {}) == 7
        ledger.verify()


def test_a_closed_ledger_refuses_an_append(path: Path) -> None:
    with Ledger(path) as ledger:
        pass
    ledger.close()
    with pytest.raises(LedgerError, match=f"{path}: an event .drawn. cannot be appended.*closed"):
        ledger.append("drawn", {})


def test_a_ledger_has_one_writer(path: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    with Ledger(path) as ledger:
        for again in (path, link):
            with pytest.raises(LedgerError, match=f"{again}: process {os.getpid()} writes this ledger"):
                Ledger(again)
        opening = f"from verl.trainer.asynchronous.ledger import *; Ledger(Path({str(path)!r}))"
        done = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True)
        assert f"LedgerError: {path}: process {os.getpid()} writes this ledger" in done.stderr
        assert ledger.append("drawn", {}) == 7
    with Ledger(path) as ledger:
        assert ledger.append("drawn", {}) == 8


def test_a_forked_child_of_a_killed_writer_keeps_nobody_out(path: Path) -> None:
    """A data loader's worker lives on for some seconds."""
    forking = f"""
import os, sys
from verl.trainer.asynchronous.ledger import *
ledger = Ledger(Path({str(path)!r}))
if os.fork() == 0:
    print("forked", flush=True)
sys.stdin.read()
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", forking], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "forked\n"
        process.kill()
        process.wait()
        with Ledger(path) as ledger:
            assert ledger.append("resumed", {}) == 7
        process.stdin.close()
        assert process.stdout.read() == ""  # the child has ended


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match=f"{tmp_path}/file/ledger.db: .*cannot be opened for writing: .*local disk"):
        Ledger(tmp_path / "file" / "ledger.db")


@pytest.fixture
def file_limit() -> Iterator[int]:
    """A limit to the size of files, which stands for a full disk while it is set."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield limits[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_leaves_the_ledger_whole(tmp_path: Path, file_limit: int) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, file_limit))
        with pytest.raises(LedgerError, match=rf"{path}: an event \(turn\) cannot be appended: .*: free disk space"):
            for _ in range(100):
                ledger.append("turn", {}, bytes(10_000))
        last = ledger.last_seq
        with pytest.raises(LedgerError, match="segment.db: the segment cannot be written: .*: free disk space"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, file_limit))
            ledger.export(tmp_path / "segment.db", 0, last)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        assert not (tmp_path / "segment.db").exists()
        assert 0 < last < 100 and ledger.append("turn", {}, b"there is space again") == last + 1
    assert len(contents(path)) == last + 1


def test_a_fault_within_an_append_takes_it_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FAULT", "raise:ledger_append:step=8")
    with Ledger(path) as ledger:
        ledger.append("turn", {})
        with pytest.raises(InjectedFault):
            ledger.append("turn", {"lost": True}, b"lost")
        assert ledger.append("turn", {"lost": False}) == 8
    assert contents(path)[7:] == [(8, "turn", {"lost": False}, None)]


def kept_after_a_kill(path: Path, told: list[str]) -> None:
    """Compare a ledger with what its killed writer has told."""
    kept = {seq: (facts, payload) for seq, _, facts, payload in contents(path)}
    for line in told:
        seq, facts = json.loads(line)
        assert kept[seq][0] == facts


def test_a_kill_between_insert_and_commit_leaves_the_events_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    environment = {**os.environ, "VERL_FAULT": "kill:ledger_append:step=5"}
    done = subprocess.run([sys.executable, "-c", APPENDING, path], env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    kept_after_a_kill(path, done.stdout.splitlines())
    with Ledger(path) as ledger:
        assert ledger.append("resumed", {}) == 5


def test_kills_at_random_points_lose_no_event_that_was_told(tmp_path: Path) -> None:
    """One ledger, written by four processes after another; the log is emptied about every 150 events."""
    path = tmp_path / "ledger.db"
    chance = random.Random(0)
    told: list[str] = []
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", APPENDING, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told += [process.stdout.readline() for _ in range(chance.randrange(1, 400))]
            process.kill()
            told += [line for line in process.stdout if line.endswith("\n")]
        kept_after_a_kill(path, told)
    assert len({json.loads(line)[0] for line in told}) == len(told)
    with Ledger(path) as ledger:
        assert ledger.append("resumed", {}) in (len(told) + 1 + lost for lost in range(9))  # two threads, four kills


def test_the_command_counts_events_by_kind(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LedgerReader(path) as reader:
        reader.export(path.with_name("segment.db"), after=2, upto=6)
    assert main([str(path)]) == main([str(path.with_name("segment.db"))]) == 0
    whole, segment = capsys.readouterr().out.split("ledger.db")[1].split(f"{path.parent}")
    assert "6 events from number 1 on, unchanged" in whole and "4 events from number 3 on" in segment
    assert [line.split()[:2] for line in whole.splitlines()[1:6]] == [
        ["drawn", "1"],
        ["turn", "2"],
        ["scored", "1"],
        ["batch", "1"],
        ["update", "1"],
    ]
    assert [line.split()[0] for line in segment.splitlines()[5:]] == ["first", "last"]
    assert "updates: 1, of 1 groups" in whole and "updates" not in segment  # a segment is no whole run


def test_the_command_finds_a_prompt_that_was_trained_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        ledger.append("drawn", {"number": 0})
        for update in range(2):
            ledger.append("batch", {"update": update, "version": update, "numbers": [0]})
    assert main([str(path)]) == 1 and "trained twice: [0]" in capsys.readouterr().out


def test_help_explains_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "exit code is 1 if an event was changed" in " ".join(
        capsys.readouterr().out.split()
    )


def test_each_kind_has_one_line_of_meaning() -> None:
    assert list(KINDS) == (
        "drawn sent turn finished scored batch update published filtered dropped failed checkpoint resumed".split()
    )
    assert all(meaning.endswith(".") and len(meaning) < 100 for meaning in KINDS.values())
    with pytest.raises(TypeError):
        KINDS["other"] = "x"  # type: ignore[index]
