"""Dispatch modes that users add or replace."""

from typing import Any

import pytest

from verl.single_controller.base import decorator
from verl.single_controller.base.decorator import Dispatch, Execute, get_predefined_dispatch_fn

FUNCTIONS: dict[str, Any] = {
    "dispatch_fn": lambda group, *args, **kwargs: (args, kwargs),
    "collect_fn": lambda group, output: output,
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    kept = dict(decorator.DISPATCH_MODE_FN_REGISTRY)
    monkeypatch.setattr(decorator, "DISPATCH_MODE_FN_REGISTRY", kept)
    return kept


def test_a_new_mode_is_in_the_registry(registry: dict[Any, Any]) -> None:
    decorator.register_dispatch_mode("MINE", **FUNCTIONS)
    try:
        decorator._check_dispatch_mode(Dispatch.MINE)  # type: ignore[attr-defined]
        assert registry[Dispatch.MINE] == get_predefined_dispatch_fn(Dispatch.MINE) == FUNCTIONS  # type: ignore[attr-defined]
    finally:
        Dispatch.remove("MINE")
    decorator.update_dispatch_mode(Dispatch.ONE_TO_ALL, **FUNCTIONS)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL) == FUNCTIONS


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (decorator._check_dispatch_mode, "ONE_TO_ALL", "a Dispatch member or a dict"),
        (decorator._check_dispatch_mode, {"dispatch_fn": len}, "'collect_fn'"),
        (decorator._check_execute_mode, Dispatch.ONE_TO_ALL, "an Execute member"),
    ],
)
def test_other_modes_are_refused(check: Any, value: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(value)
    decorator._check_execute_mode(Execute.ALL)
