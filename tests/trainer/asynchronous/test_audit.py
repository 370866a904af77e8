"""The audit counts the last attempt at each update, and finds prompts that are trained twice or never drawn."""

from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.ledger import Event
from verl.utils.json_types import JsonObject


def events(*entries: tuple[str, JsonObject]) -> list[Event]:
    return [Event(seq, kind, 0, facts, None) for seq, (kind, facts) in enumerate(entries, 1)]


def drawn(*numbers: int) -> list[tuple[str, JsonObject]]:
    return [("drawn", {"number": number}) for number in numbers]


def finished(number: int, version: int, *lengths: int) -> list[tuple[str, JsonObject]]:
    """Return an event for each response."""
    facts: JsonObject = {"number": number, "span": [version, version]}
    return [("finished", facts | {"sample": at, "length": length}) for at, length in enumerate(lengths or (1,))]


def batch(update: int, version: int, *numbers: int) -> tuple[str, JsonObject]:
    return "batch", {"update": update, "version": version, "numbers": list(numbers)}


def test_the_last_attempt_counts_and_every_prompt_has_a_place() -> None:
    audit = Audit.of(
        events(
            *drawn(0, 1, 2, 3, 4, 5),
            *finished(0, 0),
            *finished(1, 0),
            batch(0, 0, 0, 1),
            *finished(2, 0),
            *finished(3, 1),
            batch(1, 1, 2, 0),  # rolled back
            ("failed", {"number": 4, "reason": "its tool is away"}),
            batch(1, 1, 2, 3),
        )
    )
    assert audit.is_exact
    assert audit.updates == {0: [0, 1], 1: [2, 3]}
    assert audit.reasons == {4: "its tool is away"} and audit.left == [5]
    assert dict(audit.ages) == {0: 3, 1: 1}
    assert "3 of 0, 1 of 1" in audit.lines()[1]


def test_distributions_of_what_was_generated_and_of_what_was_trained() -> None:
    audit = Audit.of(
        events(
            *drawn(0, 1, 2),
            *finished(0, 0, 10, 20),
            *finished(1, 0, 30, 40),
            *finished(2, 0, 400, 500),
            ("dropped", {"number": 2, "reason": "it is too old"}),
            batch(0, 0, 0, 1),
            ("scored", {"number": 0, "scores": [0.0, 1.0]}),
            ("scored", {"number": 1, "scores": [1.0, 1.0]}),
        )
    )
    generated, trained, scores = audit.lines()[2:5]
    assert "mean 166.7" in generated and "median 35" in generated
    assert "mean 25, tenth 13, median 25, last tenth 37" in trained
    assert "mean 0.75" in scores


def test_faults_are_found() -> None:
    twice = Audit.of(events(*drawn(0, 1), batch(0, 0, 0), batch(1, 1, 0)))
    assert twice.twice == [0] and not twice.is_exact
    skipped = Audit.of(events(*drawn(0, 2), batch(0, 0, 0), batch(1, 1, 2)))
    assert skipped.missing == [1] and not skipped.is_exact
    unknown = Audit.of(events(*drawn(0), batch(0, 0, 1)))
    assert unknown.missing == [1] and not unknown.is_exact
