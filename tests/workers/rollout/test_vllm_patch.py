"""Helpers for forks that load weights into vLLM by themselves, on modules shaped as vLLM's."""

import os
import subprocess
import sys

import psutil
import torch
from torch import nn

from verl.third_party import vllm as names
from verl.utils.engine_versions import installed_version, is_version_ge
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.workers.rollout.vllm_rollout.patch import _UntouchedZeros, free_cache_pages


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


def test_memory_of_a_cache_goes_back():
    size = 1 << 27
    with _UntouchedZeros():
        cache, other = (torch.zeros(size, dtype=torch.int8, device="cpu") for _ in range(2))
    for each in (cache, other):
        each.fill_(1)
    before = psutil.Process().memory_info().rss
    free_cache_pages([cache[size // 2 :], cache.view(torch.float32)])
    assert before - psutil.Process().memory_info().rss > size * 3 // 4
    assert not cache.any() and other.all()
    plain = torch.ones(1 << 20, dtype=torch.int8)
    free_cache_pages([plain])  # which vLLM has allocated otherwise
    assert plain.all()


def test_vllm_imports_little_and_the_rest_when_it_is_used():
    code = """
import sys
from verl.workers.rollout.vllm_rollout.importing import import_vllm
import_vllm()
unused = "torch._inductor.lowering", "av", "cv2", "opentelemetry.trace"
assert not {*unused} & {*sys.modules}, "the compiler, what decodes audio and video, and what traces"
import io
import numpy as np
import av
import pytest
from vllm.multimodal.audio import resample_audio_pyav
from vllm.multimodal.video import VideoBackend
from vllm.utils.import_utils import PlaceholderModule
assert "cv2" not in sys.modules
with av.open(film := io.BytesIO(), "w", format="mp4") as container:
    stream = container.add_stream("mpeg4", rate=4)
    stream.width = stream.height = 64
    for shade in range(12):
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * shade, np.uint8))))
    container.mux(stream.encode())
frames, metadata = VideoBackend.load_bytes(film.getvalue(), num_frames=12)
assert "cv2" in sys.modules and metadata["video_backend"] == "opencv"
assert [round(shade / 20) for shade in frames.mean(axis=(1, 2, 3))] == [*range(12)]
assert abs(len(resample_audio_pyav(np.zeros(800, np.float32), orig_sr=8000, target_sr=16000)) - 1600) < 100
with pytest.raises(ImportError, match="vLLM needs no_such_package"):
    PlaceholderModule("no_such_package").name
import torch._inductor.lowering
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vllm_starts_without_another_process_and_long_collections(tmp_path):
    """In a process of its own, with an empty cache of what vLLM knows of models; its loggers are configured before."""
    code = """
import gc, logging, subprocess, sys
early = logging.getLogger("vllm.early")
early.setLevel(logging.INFO)
assert early.isEnabledFor(logging.INFO)  # and keeps the answer
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout
config = RolloutConfig(name="vllm", tensor_model_parallel_size=1)
vLLMRollout.import_engine(config)
assert gc.get_freeze_count() > 100_000 > len(gc.get_objects()), "each of vLLM's collections would visit all objects"
import vllm.logger
from vllm.engine.arg_utils import EngineArgs
assert not early.isEnabledFor(logging.INFO) and early.isEnabledFor(logging.ERROR)
vllm.logger.dictConfig = None
vllm.logger.configure_logging_if_needed(EngineArgs(model=".").create_logging_config())
subprocess.run = None
from vllm.model_executor.models.registry import ModelRegistry
known = ModelRegistry.models["Qwen2ForCausalLM"]
found = known.inspect_model_cls()
assert found.is_text_generation_model and known.load_model_cls().__module__ in sys.modules
"""
    env = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert list(tmp_path.rglob("*Qwen2ForCausalLM*"))
