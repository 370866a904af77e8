"""Guards around code that raises errors of any class."""

import logging
from concurrent.futures import Future

import pytest

from verl.errors import CheckpointError, WrongInput
from verl.utils.failures import on_failure, only_warning, replacing_errors, settle

ENDS = [ValueError("no"), KeyboardInterrupt("ctrl-c"), SystemExit(3)]


def raising(error: BaseException):
    raise error


@pytest.mark.parametrize("error", ENDS)
def test_those_who_wait_get_the_error(error):
    outcome: Future[int] = Future()
    settle(outcome, lambda: raising(error))
    assert outcome.exception(timeout=0) is error


def test_those_who_wait_get_the_result():
    outcome: Future[int] = Future()
    settle(outcome, lambda: 3)
    assert outcome.result(timeout=0) == 3


@pytest.mark.parametrize("error", ENDS)
def test_what_is_undone_on_failure(error):
    seen = []
    with pytest.raises(type(error)) as raised, on_failure(seen.append):
        raise error
    assert raised.value is error and seen == [error]
    with on_failure(seen.append):
        pass
    assert seen == [error]


def test_an_error_of_any_class_is_replaced():
    with pytest.raises(WrongInput, match="at 3: no") as raised:
        with replacing_errors(lambda error: WrongInput(f"at 3: {error}"), passes=(CheckpointError,)):
            raise ArithmeticError("no")
    assert isinstance(raised.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("error", [CheckpointError("it says so itself"), KeyboardInterrupt()])
def test_errors_that_are_not_replaced(error):
    with pytest.raises(type(error)) as raised:
        with replacing_errors(lambda error: WrongInput("another"), passes=(CheckpointError,)):
            raise error
    assert raised.value is error


@pytest.mark.parametrize("trace", [False, True])
def test_only_a_warning(caplog, trace):
    with only_warning(logging.getLogger("verl"), "100 %% of %s", "a part", trace=trace):
        raise OSError("is lost")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().startswith("100 % of a part")
    assert bool(record.exc_info) is trace
    assert record.getMessage().endswith("OSError: is lost") is not trace


def test_an_interrupt_is_no_warning():
    with pytest.raises(KeyboardInterrupt):
        with only_warning(logging.getLogger("verl"), "lost"):
            raise KeyboardInterrupt
