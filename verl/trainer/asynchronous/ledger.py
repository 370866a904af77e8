"""The ledger of asynchronous training: an append-only, checksummed record of what decides what is trained.

A ledger is an SQLite file with one writer. Its events form a chain: each holds a digest over the digest of the event
before it, its own number, kind, time and facts, and the digest of its payload. A segment holds a part of the events in
a file of the same form, and begins with the digest of the event before it.

``python -m verl.trainer.asynchronous.audit PATH`` checks a ledger or a segment.
"""

import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypedDict, TypeVar

from verl.errors import ContractError, LedgerError, LedgerFileError
from verl.utils.checkpoint.files import sync_folder, temporary_folder
from verl.utils.faults import fault_point
from verl.utils.json_types import JsonObject

T = TypeVar("T")

KINDS = MappingProxyType(
    {
        "drawn": "A prompt was drawn from the data.",
        "sent": "A request was sent to a rollout server.",
        "turn": "A turn was interrupted, with its tokens, log-probabilities and weight versions so far.",
        "finished": "A trajectory ended.",
        "scored": "A trajectory got its score.",
        "batch": "Trajectories were joined into a batch.",
        "update": "A batch was trained.",
        "published": "The rollout servers got a weight version.",
        "filtered": "A filter removed a group.",
        "dropped": "A setting removed a trajectory or a group.",
        "failed": "A trajectory ended with an error.",
        "checkpoint": "A checkpoint was saved.",
        "resumed": "A run went on from a checkpoint.",
    }
)
"""The kinds of events, each with its meaning."""
FORMAT = 2
"""The version of the file's form, and of the facts in it."""

_APPLICATION_ID = 0x76_6C_65_64  # "vled", in the header of the file
_NO_EVENT = bytes(32)
"""The digest before the first event."""
_SCHEMA = f"""
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, time_ns INTEGER NOT NULL, facts TEXT NOT NULL,
    payload_digest BLOB NOT NULL, previous BLOB NOT NULL, digest BLOB NOT NULL, payload BLOB
);
CREATE TABLE ends (base_seq INTEGER, base_digest BLOB, last_seq INTEGER, last_digest BLOB);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""
_ROWS_AT_ONCE = 16
_BUSY_S = 60.0
"""Limit of a wait for another process, which repairs the file after a kill."""
_REMEDY = "free disk space, or put the file into a folder of a local disk that this process may write"


class Facts(TypedDict):
    """The facts of events that are read again; an event has some of them.

    Attributes:
        number: the place of a group in the data.
        sample, samples: the place of a response in its group, and the responses of the group.
        seeds: the sampling seed of each response.
        version: version of the weights that the servers had.
        span: the oldest and the newest version that sampled a token.
        planned: the engine's number of the weights that were to sample.
        length: tokens of a response.
        scores, failures: score of each response, and why it has none.
        reason: why a group is not trained.
        update, numbers: an update, and the groups that it trains.
        weights: digests of the weights, one per rank.
        drawn: prompts that were drawn at a checkpoint.
    """

    number: int
    sample: int
    samples: int
    seeds: list[int]
    version: int
    span: tuple[int, int]
    planned: int
    length: int
    scores: list[float]
    failures: list[str | None]
    reason: str
    update: int
    numbers: list[int]
    weights: list[str]
    drawn: int


@dataclass(frozen=True)
class Event:
    """One event of a ledger.

    Attributes:
        seq: the number of the event, from 1, without gaps.
        kind: a key of ``KINDS``.
        time_ns: the time of the append, in nanoseconds since 1970.
        payload: tensors and the like, in the caller's form; None also if the reader did not ask for it.
    """

    seq: int
    kind: str
    time_ns: int
    facts: JsonObject
    payload: bytes | None


class _Row(NamedTuple):
    """A row of the table of events; facts are JSON text."""

    seq: int
    kind: str
    time_ns: int
    facts: bytes
    payload_digest: bytes
    previous: bytes
    digest: bytes
    payload: bytes | None

    def flaw(self, seq: int, previous: bytes) -> str | None:
        """Return what is wrong with the event that must have a number and follow a digest; None if nothing is."""
        if self.seq != seq:
            return f"it stands in the place of event {seq}: an event is missing, or was added"
        if self.previous != previous:
            return "it does not follow the event before it: the order was changed"
        if self.payload_digest != _payload_digest(self.payload):
            return "its payload was changed"
        if self.digest != _digest(previous, self.seq, self.kind, self.time_ns, self.facts, self.payload_digest):
            return "its facts, kind or time were changed"
        return None


class _Ends(NamedTuple):
    """The first and the last end of a file: numbers and digests of the event before its first, and of its last."""

    base_seq: int
    base_digest: bytes
    last_seq: int
    last_digest: bytes


class LedgerReader:
    """Reads a ledger, also while another process writes it, or a segment. Any thread may call it.

    Raises: LedgerFileError if the file does not exist, is no ledger, or has the form of another version; the methods
        raise LedgerError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._reading = threading.Lock()
        if not self.path.is_file():
            raise LedgerFileError(f"{self.path}: is no file, and thus no ledger")
        with ExitStack() as opened, _named(f"{self.path}: the ledger cannot be opened"):
            self._reader = opened.enter_context(closing(_connect(self.path, "ro")))
            if _is_empty(self._reader, self.path):
                raise LedgerFileError(f"{self.path}: is empty, and thus no ledger")
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._opened.close()

    @property
    def base_seq(self) -> int:
        """The number of the event before the first one; 0 unless the file began as a later segment."""
        return self._ends().base_seq

    @property
    def last_seq(self) -> int:
        """The number of the last event; ``base_seq`` if there is none."""
        return self._ends().last_seq

    def events(self, *kinds: str, after: int = 0, with_payload: bool = False) -> Iterator[Event]:
        """Return the events of some kinds (all, if none is given) with a number above ``after``, by number.

        Those that are appended after the call are left out.

        Raises: ContractError for an unknown kind.
        """
        _check_kinds(kinds)
        return self._events(kinds, after, self.last_seq, with_payload)

    def _events(self, kinds: Sequence[str], after: int, upto: int, with_payload: bool) -> Iterator[Event]:
        for row in self._rows(kinds, after, upto, with_payload):
            try:
                facts = json.loads(row.facts)
            except ValueError as error:
                raise LedgerError(f"{self.path}: event {row.seq} ({row.kind}): its facts are no JSON") from error
            yield Event(row.seq, row.kind, row.time_ns, facts, row.payload)

    def payload(self, seq: int) -> bytes:
        """Return the payload of an event.

        Raises: LedgerError if there is no such event, or if it has no payload.
        """
        payload = self._row(seq, with_payload=True).payload
        if payload is None:
            raise LedgerError(f"{self.path}: event {seq} has no payload")
        return payload

    def verify(self, after: int = 0) -> None:
        """Check the chain of all events, or of those ``after`` a number.

        Raises: LedgerError with the first wrong event, and what is wrong with it.
        """
        if flaw := self._flaw(after):
            raise LedgerError(f"{self.path}: {flaw}")

    def _flaw(self, after: int = 0) -> str | None:
        """Return the first wrong event and what is wrong with it; None if the chain is whole."""
        ends = self._ends()
        seq = max(after, ends.base_seq)
        previous = self._digest_at(seq)
        for row in self._rows((), after or -1, ends.last_seq, with_payload=True):
            seq += 1
            if flaw := row.flaw(seq, previous):
                return f"event {row.seq} ({row.kind}): {flaw}"
            previous = row.digest
        if seq != ends.last_seq:
            return f"event {seq + 1} is missing, with all that follow, to {ends.last_seq}"
        if previous != ends.last_digest:
            return f"event {seq} is not the one that was appended last"
        if added := self._query(int, "SELECT seq FROM events WHERE seq > (SELECT last_seq FROM ends) ORDER BY seq"):
            return f"event {added[0]} was added, but not by an append"
        return None

    def export(self, target: Path, after: int, upto: int) -> None:
        """Write the events with ``after < seq <= upto`` to a segment, whole or not at all.

        A segment is a ledger of its own: after the loss of a ledger, export all events of its segment to the ledger's
        path, and open that for writing.

        Raises: ContractError if the range is not in the ledger; LedgerError if the segment cannot be written, or if one
            of the events was changed.
        """
        ends = self._ends()
        if not ends.base_seq <= after <= upto <= ends.last_seq:
            has = f"the ledger {self.path} has {ends.base_seq} < seq <= {ends.last_seq}"
            raise ContractError(f"after={after}, upto={upto}: {has}")
        if (log := _log_of(target)).exists():
            raise LedgerError(
                f"{target}: is a ledger that is open, or was never closed: remove it and {log.name} first"
            )
        with _named(f"{target}: the segment cannot be written", _REMEDY):
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary_folder(target.parent, target.name) as folder:
                unfinished = folder / target.name
                self._copy(unfinished, after, upto)
                with LedgerReader(unfinished) as written:
                    if flaw := written._flaw():
                        raise LedgerError(f"{self.path}: {flaw}")
                unfinished.replace(target)
            sync_folder(target.parent)

    def _copy(self, target: Path, after: int, upto: int) -> None:
        """Write events to a new file, which is on disk afterwards."""
        with closing(_connect(target, "rwc")) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("ATTACH ? AS source", (_uri(self.path, "ro"),))
            with _transaction(connection):
                _create(connection, after, self._digest_at(after), upto, self._digest_at(upto))
                connection.execute(
                    "INSERT INTO events SELECT * FROM source.events WHERE seq > ? AND seq <= ?", (after, upto)
                )

    def _digest_at(self, seq: int) -> bytes:
        ends = self._ends()
        if seq == ends.base_seq:
            return ends.base_digest
        return self._row(seq, with_payload=False).digest

    def _ends(self) -> _Ends:
        casts = "CAST(base_seq AS INTEGER), base_digest, CAST(last_seq AS INTEGER), last_digest"
        for ends in self._query(_Ends, f"SELECT {casts} FROM ends"):
            return ends
        raise LedgerError(f"{self.path}: the ledger does not say which events it holds")

    def _row(self, seq: int, with_payload: bool) -> _Row:
        for row in self._rows((), seq - 1, seq, with_payload):
            return row
        raise LedgerError(f"{self.path}: event {seq} does not exist")

    def _rows(self, kinds: Sequence[str], after: int, upto: int, with_payload: bool) -> Iterator[_Row]:
        """Yield rows by number, a few to a query: one that stays open keeps the write-ahead log from being emptied."""
        payload = "CAST(payload AS BLOB)" if with_payload else "NULL"
        of_kinds = f"AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        query = f"""
            SELECT seq, CAST(kind AS TEXT), CAST(time_ns AS INTEGER), CAST(facts AS BLOB),
                payload_digest, previous, digest, {payload}
            FROM events WHERE seq > ? AND seq <= ? {of_kinds} ORDER BY seq LIMIT {_ROWS_AT_ONCE}
        """
        while rows := self._query(_Row, query, after, upto, *kinds):
            yield from rows
            after = rows[-1].seq

    def _query(self, make: Callable[..., T], query: str, *values: int | str) -> list[T]:
        """Return what a function makes of the columns of each row."""
        with self._reading, _named(f"{self.path}: the ledger cannot be read"):
            return [make(*row) for row in self._reader.execute(query, values).fetchall()]


class Ledger(LedgerReader):
    """Opens or creates a ledger and is its only writer, until it is closed or its process ends.

    Raises: LedgerError if the file cannot be opened, or if another writer has it open, with the pid of that process;
        LedgerFileError if the file is no ledger, or has the form of another version.
    """

    def __init__(self, path: Path) -> None:
        self._writing = threading.Lock()
        with ExitStack() as opened, _named(f"{path}: the ledger cannot be opened for writing", _REMEDY):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            opened.enter_context(_only_writer(Path(path)))
            self._writer = opened.enter_context(closing(_connect(Path(path), "rwc")))
            is_new = _is_empty(self._writer, Path(path))
            self._writer.execute("PRAGMA journal_mode = WAL")
            if is_new:
                with _transaction(self._writer):
                    _create(self._writer, 0, _NO_EVENT, 0, _NO_EVENT)
            opened.callback(self._leave_one_file)
            super().__init__(path)
            opened.push(self._opened)
            self._opened = opened.pop_all()

    def append(self, kind: str, facts: JsonObject, payload: bytes | None = None, durable: bool = False) -> int:
        """Append an event and return its number. Any thread may call it.

        Once it has returned, the event survives a kill of the process; if ``durable``, it and all events before it
        survive a loss of power too. If it raises, the ledger does not hold the event.

        Raises: ContractError for an unknown kind, or facts that are no JSON; LedgerError if the file cannot be written.
        """
        _check_kinds([kind])
        text = _canonical(kind, facts)
        payload_digest = _payload_digest(payload)
        with self._writing, _named(f"{self.path}: an event ({kind}) cannot be appended", _REMEDY):
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with _transaction(self._writer):
                ((last_seq, previous),) = self._writer.execute("SELECT last_seq, last_digest FROM ends")
                seq = int(last_seq) + 1
                time_ns = time.time_ns()
                digest = _digest(previous, seq, kind, time_ns, text, payload_digest)
                row = (seq, kind, time_ns, text.decode(), payload_digest, previous, digest, payload)
                self._writer.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                self._writer.execute("UPDATE ends SET last_seq = ?, last_digest = ?", (seq, digest))
                fault_point("ledger_append", rank=0, step=seq)
        return seq

    def _leave_one_file(self) -> None:
        """Give up the write-ahead log, so that the file can be copied, and read in a folder that is read only."""
        with suppress(sqlite3.OperationalError):  # a reader has the file open, or the disk is full
            self._writer.execute("PRAGMA busy_timeout = 0")
            self._writer.execute("PRAGMA journal_mode = DELETE")


# ---- digests


def _canonical(kind: str, facts: JsonObject) -> bytes:
    try:
        return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ContractError(f"the facts of an event ({kind}) must be JSON: {error}") from error


def _payload_digest(payload: bytes | None) -> bytes:
    """Return the digest of a payload; none is not the same as an empty one."""
    return b"" if payload is None else hashlib.sha256(payload).digest()


def _digest(previous: bytes, seq: int, kind: str, time_ns: int, facts: bytes, payload_digest: bytes) -> bytes:
    content = b'[%d,"%s",%d,%s]' % (seq, kind.encode(), time_ns, facts)
    return hashlib.sha256(previous + content + payload_digest).digest()


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ContractError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")


# ---- the file


@contextmanager
def _named(failure: str, remedy: str = "") -> Iterator[None]:
    """Raise LedgerError with the text of a failure and its cause, in place of errors of SQLite and of files."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"{failure}: {error}{': ' * bool(remedy)}{remedy}") from error


def _uri(path: Path, mode: str) -> str:
    return f"{path.resolve().as_uri()}?mode={mode}"


def _log_of(path: Path) -> Path:
    """Return the path of a ledger's write-ahead log, which exists while it is open, and after a kill."""
    return path.with_name(f"{path.name}-wal")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(_uri(path, mode), uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _create(
    connection: sqlite3.Connection, base_seq: int, base_digest: bytes, last_seq: int, last_digest: bytes
) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO ends VALUES (?, ?, ?, ?)", (base_seq, base_digest, last_seq, last_digest))


def _is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether a file holds nothing yet.

    Raises: LedgerFileError unless the file is empty, or a ledger that this version can read.
    """
    try:
        ((application,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        ((tables,),) = connection.execute("SELECT COUNT(*) FROM sqlite_master")
    except sqlite3.DatabaseError as error:
        raise LedgerFileError(f"{path}: the file cannot be read as a ledger: {error}") from error
    if application != _APPLICATION_ID and (application or tables):
        raise LedgerFileError(f"{path}: the file is no ledger of asynchronous training")
    if application and version != FORMAT:
        raise LedgerFileError(
            f"{path}: the ledger has format {version}, and this verl {FORMAT}: use the one that wrote it"
        )
    return not tables


_writers: set[tuple[int, Path]] = set()
"""Process and file of each open ledger; with the process, since a forked child inherits the set and writes nothing."""
_changing_writers = threading.Lock()


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Keep out all other writers of a ledger; the system ends this with the process.

    A record lock (``lockf``) is not inherited by forked children, so a worker of a data loader that outlives a killed
    driver does not keep out the next one. It does not hold within a process either: the set does that.
    """
    writer = (os.getpid(), path.resolve())
    with _changing_writers:
        if writer in _writers:
            raise _second_writer(path, str(os.getpid()))
        _writers.add(writer)
    try:
        with Path(f"{path.resolve()}.lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                raise _second_writer(path, file.read()) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
    finally:
        _writers.remove(writer)


def _second_writer(path: Path, pid: str) -> LedgerError:
    return LedgerError(
        f"{path}: process {pid or 'unknown'} writes this ledger, and a ledger has one writer: end it first"
    )
