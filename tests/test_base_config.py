"""The base of configuration nodes: mapping, freezing, checks of types and rules."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest

from verl.base_config import (
    MOST_INTEGER,
    MOST_SEED,
    BaseConfig,
    ConfigError,
    NodeReader,
    UnsupportedConfigError,
    Violation,
    setting,
)


@dataclass
class Inner(BaseConfig):
    size: int = 2


@dataclass
class Node(BaseConfig):
    _mutable_fields = frozenset({"count"})

    count: int | None = None
    rate: float = 0.5
    flag: bool = False
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    anything: Any = None
    inner: Inner = field(default_factory=Inner)

    def rules(self) -> Iterator[Violation]:
        if not 0 <= self.rate <= 1:
            yield Violation("rate", self.rate, "must be in [0, 1]")
        if self.count == 13:
            yield Violation.unsupported("count", 13, "is not supported: write 12")


def test_it_is_a_read_only_mapping():
    node = Node(count=3)
    assert node["count"] == node.get("count") == node.count == 3
    assert node.get("absent", 7) == 7
    assert list(node) == ["_target_", "count", "rate", "flag", "names", "pair", "anything", "inner"]
    assert len(node) == 8 and "rate" in node and "absent" not in node
    assert {**node}["inner"]["size"] == 2
    with pytest.raises(AttributeError):
        node["absent"]


def test_a_node_whose_class_cannot_be_imported_keeps_its_values():
    """A default in the place of a value would be refused as if the user had written it."""
    reader = NodeReader()
    node = reader.node({"inner": {"_target_": "no.such.Class", "size": 3, "own": 1}}, "inner", Inner)
    (told,) = reader.violations
    assert told.key == "inner._target_" and "No module named" in told.expected
    assert isinstance(node, Inner) and node.size == 3


def test_fields_are_set_once_unless_named_mutable():
    node = Node()
    node.count = 4
    assert node.count == 4
    with pytest.raises(FrozenInstanceError, match="Node.rate"):
        node.rate = 0.1
    with pytest.raises(FrozenInstanceError):
        del node.rate
    assert pickle.loads(pickle.dumps(node)) == node == copy.deepcopy(node)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "3"}, "count=3: must be an integer or null"),
        ({"count": True}, "count=true: must be an integer or null"),
        ({"rate": "high"}, "rate=high: must be a number"),
        ({"flag": 1}, "flag=1: must be true or false"),
        ({"names": "a"}, "names=a: must be a list whose items are each a string"),
        ({"names": ["a", 1]}, r"names=\[a,1\]: must be a list"),
        ({"pair": [0, None]}, r"pair=\[0,null\]: must be a list whose items are each a number"),
        ({"inner": 3}, "inner=3: must be a mapping"),
        ({"rate": 2}, r"rate=2: must be in \[0, 1\]"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Node(**values)


def test_integers_are_numbers_and_tuples_are_lists():
    node = Node(rate=1, names=("a",), pair=[0.1, 0.2], inner={"size": 1})
    assert node.rate == 1 and node.names == ("a",)


def test_errors_list_everything_and_are_the_established_types():
    with pytest.raises(ConfigError) as info:
        Node(count="3", flag="no")
    assert str(info.value) == (
        "2 problems:\n  - count=3: must be an integer or null\n  - flag=no: must be true or false"
    )
    assert isinstance(info.value, ValueError) and isinstance(info.value, AssertionError)
    again = pickle.loads(pickle.dumps(info.value))
    assert again.violations == info.value.violations
    assert again.violations[0].under("a.b").key == "a.b.count"
    with pytest.raises(UnsupportedConfigError) as unsupported:
        Node(count=13)
    assert isinstance(unsupported.value, NotImplementedError) and isinstance(unsupported.value, ConfigError)


@dataclass
class Numbers(BaseConfig):
    rate: float = setting(0.5, at_least=0)
    seed: int = setting(1, at_most=MOST_SEED)
    steps: int | None = setting(None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": float("inf")}, "rate=inf: must be a number of 0 or more, and at most 1e+30 in magnitude"),
        ({"rate": 10**400}, "must be a number of 0 or more, and at most 2147483647 in magnitude"),
        ({"seed": 2**70}, f"seed={2**70}: must be an integer of at most {MOST_SEED}"),
        ({"seed": -(2**70)}, f"at most {MOST_SEED} in magnitude"),
        ({"steps": 2**40}, f"steps={2**40}: must be an integer or null, and at most 2147483647 in magnitude"),
    ],
)
def test_every_number_is_finite_and_has_a_limit(values, message):
    with pytest.raises(ConfigError) as caught:
        Numbers(**values)
    assert message in str(caught.value)
    assert Numbers(rate=1e29, seed=-MOST_SEED, steps=MOST_INTEGER).seed == -MOST_SEED


def test_a_long_value_is_cut_in_the_message():
    assert len(str(Violation("name", "x" * 5000, "must be short"))) < 250
