"""Digests change with any bit, and with nothing else."""

import numpy as np
import pytest
import torch

from verl.utils.observe.digest import column_digest, random_state_digest, tensor_digest, weights_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    same = torch.empty(4, 3, dtype=dtype).t().copy_(tensor)  # other strides, equal values
    assert tensor_digest(tensor) == tensor_digest(same) == tensor_digest(tensor.clone())
    other = tensor.clone()
    other[2, 3] = 0
    others = [other, tensor.reshape(4, 3), tensor.to(torch.float64), tensor[:0]]
    assert len({tensor_digest(each) for each in [tensor, *others]}) == 5


def test_one_bit_of_a_float():
    tensor = torch.tensor([1.0, -0.0])
    assert tensor_digest(tensor) != tensor_digest(torch.tensor([1.0, 0.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_digest(nan) == tensor_digest(nan.clone())


def test_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)).to(torch.bfloat16)
    before = weights_digest(model.named_parameters())
    assert before == weights_digest(model.named_parameters())
    with torch.no_grad():
        model[1].bias[1] += 0.01
    changed = weights_digest(model.named_parameters())
    with torch.no_grad():
        first, second = model[0].weight[0, 0].item(), model[0].weight[0, 1].item()
        model[0].weight[0, 0], model[0].weight[0, 1] = second, first  # neighbours change places
    assert len({before, changed, weights_digest(model.named_parameters())}) == 3
    assert weights_digest(iter(())) == weights_digest(iter(()))


@pytest.mark.parametrize("size", [0, 1, 7, 512, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_element_of_any_size_counts(size, dtype):
    generator = torch.Generator().manual_seed(size)
    whole = torch.randint(0, 200, (size + 3,), generator=generator).to(dtype)
    view, copy = whole[3:], whole[3:].clone()  # the view begins inside a word
    same = weights_digest([("w", view)])
    assert same == weights_digest([("w", copy)]) != weights_digest([("v", copy)])
    for place in {0, size // 2, size - 1} & set(range(size)):
        changed = copy.clone()
        changed[place] += 1
        assert weights_digest([("w", changed)]) != same


def test_random_state():
    state = torch.get_rng_state()
    before = random_state_digest()
    np.random.rand()  # of no run that is to be repeated
    assert before == random_state_digest()
    torch.rand(1)
    after = random_state_digest()
    torch.set_rng_state(state)
    assert after != before == random_state_digest()


def test_a_column_of_a_data_set():
    from PIL import Image

    def column():
        turns = np.array([{"role": "user", "content": "1+1"}], dtype=object)
        return [
            turns,
            {"n": np.int64(3), "x": np.arange(4.0), "t": torch.ones(2)},
            Image.new("RGB", (2, 3)),
            b"ab",
            None,
        ]

    known = column_digest(column())
    assert column_digest(np.array(column(), dtype=object)) == known
    others = [column() for _ in range(6)]
    others[0][0][0]["content"] = "1+2"
    others[1][1]["x"][3] = -1
    others[2][1]["t"][1] = 0
    others[3][2].putpixel((1, 1), (0, 0, 1))
    others[4][3] = b"ac"
    others[5].append({"a set", "of texts"})
    assert len({known, *map(column_digest, others)}) == 7
    holds_itself: list = []
    holds_itself.append(holds_itself)
    assert column_digest([holds_itself, object()]) == column_digest([holds_itself, object()])
