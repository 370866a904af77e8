"""Helpers for forks that load weights into vLLM by themselves, on modules shaped as vLLM's."""

import psutil
import torch
from torch import nn

from verl.third_party import vllm as names
from verl.utils.vllm import installed_version, is_version_ge
from verl.utils.vllm.patch import _UntouchedZeros, patch_vllm_moe_model_weight_loader


class Experts(nn.Module):
    """A layer of stacked experts, with the names that vLLM gives them."""

    def __init__(self):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 4, 3))
        self.w2_weight = nn.Parameter(torch.zeros(2, 3, 2))
        self.bias = nn.Parameter(torch.zeros(2))

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id):
        param.data[expert_id].copy_(loaded_weight)


def test_stacked_experts_get_the_loader_of_their_layer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Experts()))
    own = len
    model[1][0].w2_weight.weight_loader = own
    patch_vllm_moe_model_weight_loader(model)
    experts = model[1][0]
    experts.w13_weight.weight_loader(experts.w13_weight, torch.ones(4, 3), "w13_weight", "w1", expert_id=1)
    assert experts.w13_weight[1].eq(1).all() and experts.w13_weight[0].eq(0).all()
    assert experts.w2_weight.weight_loader is own
    assert not any(hasattr(each, "weight_loader") for each in (experts.bias, model[0].weight))


def test_names_of_vllm_at_the_established_path():
    assert names.vllm_version == installed_version("vllm")
    assert is_version_ge("vllm", "0.8.5") == (names.VLLM_SLEEP_LEVEL == 2)
    assert not hasattr(names, "LLMEngine") and "LLM" in names.__all__


def test_a_cache_takes_memory_where_it_is_written():
    size = 1 << 28
    before = psutil.Process().memory_info().rss
    with _UntouchedZeros():
        cache = torch.zeros(size, dtype=torch.int8, device="cpu")
        other = torch.zeros(3, dtype=torch.int32)
    taken = psutil.Process().memory_info().rss - before
    assert taken < size // 4 and cache.shape == (size,) and cache.dtype == torch.int8 and other.dtype == torch.int32
    cache[-4:].fill_(1)
    assert int(cache[: 1 << 20].sum()) == 0 and int(cache[-8:].sum()) == 4
