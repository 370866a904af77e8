"""Digests change with any bit, and with nothing else."""

import random

import numpy as np
import pytest
import torch

from verl.utils.digest import random_state_digest, tensor_digest, weights_digest


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


def test_random_state():
    torch.manual_seed(0)
    before = random_state_digest()
    assert before == random_state_digest()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    drawn = []
    for draw in (lambda: torch.rand(1), np.random.rand, random.random):
        draw()
        drawn.append(random_state_digest())
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    assert len({before, *drawn}) == 4 and random_state_digest() == before
