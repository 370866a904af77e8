"""The sandbox decides as plain execution does, on programs in the shapes of common tasks."""

import pytest

from tests.utils.sandbox.corpus import bounds_missed, compare, plain_verdict, programs
from verl.utils.sandbox import isolation_problem

isolated = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")


def test_plain_execution_tells_right_from_wrong():
    corpus = programs()
    assert [f"{each.shape} {each.name} {each.right}" for each in corpus if plain_verdict(each) != each.right] == []
    assert sum(each.right for each in corpus) >= 200 and sum(not each.right for each in corpus) >= 200


@isolated
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.full)])
def test_verdicts_are_those_of_plain_execution(every):
    rows, lines = compare(programs()[::every])
    assert bounds_missed(rows) == [], lines
