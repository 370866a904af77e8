"""Established helpers of sharded modules: construction without storage, and weights read once for all ranks."""

import abc
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard

from verl.utils import fsdp_utils as F
from verl.utils.device.gloo import use_one_thread


class Tied(nn.Module):
    """An embedding that is the head as well, and a buffer that a checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def write(folder):
    """Write a checkpoint in two files, the tied weight once and under its second name; returns the module."""
    torch.manual_seed(3)
    module = Tied()
    module.body[1].running_mean.normal_()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items() if name != "embed.weight"}
    files = {name: f"part-{1 + name.startswith('body')}.safetensors" for name in state}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return module


def load(folder):
    states = F.parallel_load_safetensors(str(folder))
    with torch.device("meta"):
        module = Tied()
        module.head.weight = module.embed.weight
    fill = F.parallel_init_module_fn(module, states)
    for part in module.children():
        assert fill(part) is part
    return states, module


def check_loaded(folder, expected):
    states, module = load(folder)
    assert module.head.weight is module.embed.weight
    for name, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    return states


def test_one_process_reads_everything(tmp_path):
    expected = write(tmp_path)
    assert all(isinstance(state, torch.Tensor) for state in check_loaded(tmp_path, expected).values())
    states = F.parallel_load_safetensors(str(tmp_path))
    del states["body.0.bias"]
    with torch.device("meta"):
        module = Tied()
    with pytest.raises(ValueError, match=r"the checkpoint lacks 'body\.0\.bias'"):
        F.parallel_init_module_fn(module, states)(module)


def check_two_ranks(rank, folder, expected):
    """Each rank has read a file, and knows who has read the other; ``test_collectives`` runs this."""
    states = check_loaded(folder, expected)
    held = {name for name, state in states.items() if isinstance(state, torch.Tensor)}
    assert held == {name for name in states if name.startswith("body") == bool(rank)}
    assert all(state == 1 - rank for name, state in states.items() if name not in held)


@pytest.mark.parametrize(
    ("policy", "units", "ignored"),
    [
        ({"min_num_params": 0, "disable": False, "transformer_layer_cls_to_wrap": ["Linear"]}, 2, None),
        ({"min_num_params": 6, "transformer_layer_cls_to_wrap": ["Linear"]}, 3, "wrap=.*: min_num_params=6 decides"),
        ({"disable": True, "min_num_params": 6}, 0, "min_num_params=6: disable=True decides"),
        ({"min_params": 6}, 0, "min_params=6: the keys are"),
        (None, 0, None),
    ],
)
def test_a_wrap_policy_tells_what_it_ignores(policy, units, ignored, caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    chosen = F.get_fsdp_wrap_policy(model, policy)
    assert (sum(map(chosen, model.modules())) if chosen else 0) == units
    assert re.search(ignored, caplog.text) if ignored else not caplog.messages


def test_storage_without_values():
    with F.meta_device_init():
        layer = nn.Linear(3, 2)
    assert layer.weight.is_meta
    assert not F.init_fn(layer).weight.is_meta and layer.weight.shape == (2, 3)
    torch.nn.init.ones_(layer.weight)  # its memory may have held NaN, which equals nothing
    before = layer.weight.clone()
    assert torch.equal(F.init_fn(layer).weight, before)  # what has values keeps them


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_strategy_of_a_mesh(axes):
    mesh = SimpleNamespace(ndim=axes)
    if axes == 3:
        with pytest.raises(NotImplementedError, match="3 axes"):
            F.get_sharding_strategy(mesh)
    else:
        expected = [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD][axes - 1]
        assert F.get_sharding_strategy(mesh) is expected


class Abstract(nn.Linear, abc.ABC):
    """A module whose class has another metaclass."""


def test_modules_with_a_metaclass_are_sharded(tmp_path):
    use_one_thread()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = Abstract(2, 2)
        expected = module(torch.ones(1, 2)).detach()
        with F.maybe_patch_fsdp_module(module):
            fully_shard(module)
        assert isinstance(module, FSDPModule) and torch.equal(module(torch.ones(1, 2)), expected)
        assert isinstance(F.get_fsdp_state_ctx(module, None, None, None), nullcontext)
    finally:
        dist.destroy_process_group()
