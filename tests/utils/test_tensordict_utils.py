"""TensorDicts with non-tensor entries."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from verl.utils import tensordict_utils as tu


def _mixed() -> TensorDict:
    jagged = torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 2, 3)], layout=torch.jagged)
    return tu.get_tensordict({"x": torch.arange(3), "j": jagged, "s": ["a", "b", "c"]}, {"meta": {"k": 1}})


def test_build_and_read() -> None:
    data = _mixed()
    assert list(data.batch_size) == [3]
    assert tu.get_non_tensor_data(data, "meta", None) == {"k": 1}
    assert tu.get_non_tensor_data(data, "absent", 5) == 5
    tu.assign_non_tensor(data, flag=True)
    assert tu.unwrap_non_tensor_data(data.get("flag")) is True
    assert list(tu.get_tensordict({}, {"k": 1}).batch_size) == []
    for bad in ({"x": [torch.zeros(1)]}, {"x": [1], "y": [1, 2]}, {"x": 3}):
        with pytest.raises(AssertionError):
            tu.get_tensordict(bad)
    with pytest.raises(AssertionError, match="'x'"):
        tu.get_tensordict({"x": [1]}, {"x": 1})


@pytest.mark.parametrize("index", [[2, 0], torch.tensor([2, 0]), [-1, 0]])
def test_index_select(index: list[int] | torch.Tensor) -> None:
    rows = tu.index_select_tensor_dict(_mixed(), index)
    assert rows["x"].tolist() == [2, 0]
    assert [part.tolist() for part in rows["j"].unbind()] == [[0, 1, 2], [0]]
    assert rows.get("s").tolist() == ["c", "a"] and tu.get_non_tensor_data(rows, "meta", None) == {"k": 1}
    assert tu.index_select_tensor_dict(None, index) is None


def test_union_pop_and_equality() -> None:
    data = _mixed()
    tu.assert_tensordict_eq(data, _mixed())
    other = tu.get_tensordict({"x": torch.arange(3), "new": torch.ones(3)}, {"meta": {"k": 1}})
    assert tu.union_tensor_dict(data, other)["new"].tolist() == [1, 1, 1]
    with pytest.raises(AssertionError, match="'x'"):
        tu.union_tensor_dict(data, tu.get_tensordict({"x": torch.zeros(3).long()}))
    popped = tu.pop(data, ["new", "s", "meta"])
    assert sorted(data.keys()) == ["j", "x"] and popped.get("s").tolist() == ["a", "b", "c"]
    assert isinstance(popped.get("meta"), NonTensorData)
    with pytest.raises(KeyError, match="absent"):
        tu.pop(data, ["x", "absent"])
    with pytest.raises(AssertionError, match="keys differ"):
        tu.assert_tensordict_eq(data, _mixed())


def test_iterate_and_pad() -> None:
    batches = list(tu.make_iterator(_mixed(), 1, 2))
    assert [batch["x"].item() for batch in batches] == [0, 1, 2, 0, 1, 2]
    padded, count = tu.pad_to_divisor(_mixed(), 4)
    assert count == 1 and padded["x"].tolist() == [0, 1, 2, 0] and padded.get("s").tolist() == ["a", "b", "c", "a"]
    tu.assert_tensordict_eq(tu.unpad(padded, count), _mixed())
