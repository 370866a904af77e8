"""The pace keeps its bound whatever the delays are, and never stops a run."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.asynchronous.pacing import Pace, Waiting


def simulate(pace: Pace, num_updates: int, seed: int) -> list[list[int]]:
    """Run a pace over servers that finish groups in any order; return the ages of the groups of each update."""
    source = random.Random(seed)
    in_flight: list[int] = []
    finished: list[Waiting] = []
    ages: list[list[int]] = []
    order = 0
    version = 0
    for update in range(num_updates):
        if update % pace.updates == 0:
            version = pace.version(update)
        while True:
            if pace.drops:
                finished = [group for group in finished if not pace.is_late(group.version, update)]
            in_flight += [version] * pace.room(version, update, len(in_flight) + len(finished))
            chosen = pace.choose(update, finished, in_flight)
            if chosen is not None:
                break
            assert in_flight, "the update waits, and nothing is under way"
            finished.append(Waiting(order, in_flight.pop(source.randrange(len(in_flight)))))
            order += 1
        finished = [group for group in finished if group not in chosen]
        ages.append([pace.version(update) - group.version for group in chosen])
        in_flight += [version] * pace.room(version, update + 1, len(in_flight) + len(finished))
        for _ in range(source.randint(0, len(in_flight))):  # some finish during the update
            finished.append(Waiting(order, in_flight.pop(source.randrange(len(in_flight)))))
            order += 1
    return ages


paces = st.builds(
    Pace,
    groups=st.integers(1, 6),
    updates=st.integers(1, 4),
    ahead=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.5]),
    bound=st.one_of(st.none(), st.integers(0, 4)),
    drops=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(pace=paces, seed=st.integers(0, 2**32))
def test_no_group_is_older_than_the_bound_and_every_update_gets_its_groups(pace: Pace, seed: int) -> None:
    ages = simulate(pace, 40, seed)
    assert [len(each) for each in ages] == [pace.groups] * 40
    if pace.bound is not None:
        assert max(map(max, ages)) <= pace.bound


def test_without_a_lead_every_group_has_the_newest_version() -> None:
    assert {age for each in simulate(Pace(4, 2, 0.0), 30, 1) for age in each} == {0}


@pytest.mark.parametrize("bound", [1, 4])
def test_the_bound_is_used(bound: int) -> None:
    """A pace that keeps its bound by sending little would not reach it."""
    ages = simulate(Pace(4, 1, 8.0, bound), 200, 2)
    assert max(map(max, ages)) == bound


def test_groups_that_are_dropped_hold_up_neither_sending_nor_training() -> None:
    pace = Pace(groups=1, updates=1, ahead=3.0, bound=1, drops=True)
    assert pace.room(version=0, next_update=0, outstanding=0) == 4  # and 2 if work waits
    newer = Waiting(order=0, version=3)
    assert pace.choose(3, [newer], in_flight=[2]) == [newer]
    assert [pace.is_late(version, 3) for version in (3, 2, 1, 0)] == [False, False, True, True]
    assert not Pace(1, 1, 3.0, drops=True).is_late(0, 99)


def test_the_oldest_groups_are_trained_first_and_a_slow_one_is_waited_for() -> None:
    pace = Pace(groups=1, updates=1, ahead=1.0, bound=1)
    newer = Waiting(order=0, version=3)
    assert pace.choose(3, [newer], in_flight=[]) == [newer]
    # One of version 2 must be in update 3: the newer one waits for it.
    assert pace.choose(3, [newer], in_flight=[2]) is None
    older = Waiting(order=1, version=2)
    assert pace.choose(3, [newer, older], in_flight=[]) == [older]


def test_without_a_bound_the_first_to_finish_are_trained() -> None:
    pace = Pace(groups=2, updates=4, ahead=0.5)
    finished = [Waiting(0, 5), Waiting(1, 1), Waiting(2, 0)]
    assert pace.choose(20, finished, in_flight=[0]) == finished[:2]
    assert pace.choose(20, finished[:1], in_flight=[0]) is None


def test_room() -> None:
    pace = Pace(groups=10, updates=4, ahead=0.1)
    assert pace.room(version=0, next_update=0, outstanding=0) == 44
    assert pace.room(version=0, next_update=3, outstanding=14) == 0
    assert pace.room(version=0, next_update=3, outstanding=10) == 4
    assert pace.room(version=0, next_update=4, outstanding=4) == 0  # the next version is not published yet
    assert pace.room(version=1, next_update=4, outstanding=4) == 40
    assert Pace(10, 4, 0.1, bound=0).room(0, 0, 0) == 40


def test_late_groups_by_hand() -> None:
    pace = Pace(groups=2, updates=1, ahead=1.0, bound=1)
    # Before update 5 version 4 may still be trained now, and version 5 also in update 6.
    assert pace.late([5, 4, 4, 3, 5, 5], first_update=5) == [3, 5]
    assert pace.late([5, 4, 4, 5], first_update=5) == []
    assert Pace(2, 1, 1.0).late([0, 0, 0], first_update=9) == []
