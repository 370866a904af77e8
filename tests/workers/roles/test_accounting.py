"""What tasks of a role use: MFU against a count by hand, memory of the device and of the process."""

import time

import pytest
import torch
from transformers import AutoConfig

from verl.protocol import DataProto
from verl.utils import flops_counter
from verl.utils.flops_counter import FlopsCounter, image_lengths
from verl.workers.roles import accounting
from verl.workers.roles.accounting import INFERENCE, accounted, memory_metrics

COUNTER = FlopsCounter(
    AutoConfig.for_model(
        "llama", hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=10
    )
)
FLOPS = 6 * ((8 * 8 * 4 + 3 * 8 * 16) + 8 * 10) * 7 + 12 * (3 * 3 + 4 * 4) * 8
"""Of rows of 3 and 4 tokens: 6 a weight and token, 12 a pair and channel."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by hand, and a device that promises a millionth of a TFLOP/s."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(flops_counter, "get_device_flops", lambda: 1e-6)
    return now


@pytest.mark.parametrize(("passes", "share"), [(2, 2.0), (INFERENCE, 1 / 3)])
def test_mfu_is_work_over_time_and_devices(clock, passes, share):
    metrics = {}
    with accounted(metrics, "actor", DataProto(meta_info={"global_token_num": [3, 4]}), passes, COUNTER, ranks=4):
        clock[0] += 0.5
    assert metrics["perf/mfu/actor"] == pytest.approx(FLOPS * share / 0.5 / 1e6 / 4)
    assert 0.01 < metrics["perf/memory/actor/max_rss_gb"] < 100


class Sharing:
    """An engine whose passes compute two tokens, and below them two rows of one and two more, on each of two ranks."""

    def __init__(self):
        self.segments = [(1, 0)]  # of an earlier task
        self.images = [4]

    def take_segments(self):
        segments, self.segments = self.segments, []
        return segments

    def take_images(self):
        images, self.images = self.images, []
        return images

    def get_data_parallel_size(self):
        return 2


@pytest.mark.parametrize(("passes", "share"), [(3, 1.0), (INFERENCE, 1 / 3)])
def test_tokens_that_rows_share_count_once(clock, passes, share):
    metrics, engine, rounds = {}, Sharing(), 3 if passes == 3 else 1
    with accounted(metrics, "actor", DataProto(meta_info={"global_token_num": [3, 4] * 2}), passes, COUNTER, 4, engine):
        engine.segments += [(2, 0), (3, 2), (4, 2)] * rounds
        clock[0] += 0.5 * rounds
    assert metrics["perf/computed_tokens/actor"] == 2 * 5
    flops = 6 * ((8 * 8 * 4 + 3 * 8 * 16) + 8 * 10) * 5 + 12 * (4 + (9 - 4) + (16 - 4)) * 8
    assert metrics["perf/mfu/actor"] == pytest.approx(2 * flops * share / 0.5 / 1e6 / 4)


class Seeing(Sharing):
    """An engine that shares nothing, and whose tower computes each of two images once on each of two ranks."""

    def take_segments(self):
        return []


VISION = FlopsCounter(
    AutoConfig.for_model(
        "qwen2_vl",
        text_config={
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 10,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 6,
            "hidden_size": 8,
            "in_channels": 3,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
    ),
    frozen_vision=True,
)
TOWER = 2 * ((4 * 6 * 6 + 2 * 6 * 12) + 24 * (24 + 8) / 4 + 3 * 2 * 2 * 6) * (4 + 8) + 4 * (4 * 4 + 8 * 8) * 6
"""Forward, of images of 4 and 8 patches: 2 a weight and patch, a merger for four of them, 4 a pair and channel."""


@pytest.mark.parametrize("passes", [1, 3, INFERENCE])
@pytest.mark.parametrize(("make", "counted"), [(Sharing, 2), (Seeing, 1)])
def test_an_image_counts_as_often_as_the_tower_computes_it(clock, passes, make, counted):
    """Four rows show each image; tokens count on both ranks, or as the whole batch has them; the tower is frozen."""
    metrics, engine, rounds = {}, make(), 3 if passes == 3 else 1
    data = DataProto(meta_info={"global_token_num": [3, 4], "images_seqlens": [4, 8] * 4})
    with accounted(metrics, "actor", data, passes, VISION, 4, engine):
        engine.segments += [(3, 0), (4, 0)] * rounds
        engine.images += [4, 8] * rounds
        clock[0] += 0.5 * rounds
    text = FLOPS * counted * (passes if passes == INFERENCE else 1)
    assert metrics["perf/mfu/actor"] == pytest.approx((text + 2 * TOWER) / 0.5 / 1e6 / 4)


def test_without_lengths_or_a_model_there_is_no_mfu(clock):
    metrics = {}
    with accounted(metrics, "ref", DataProto(meta_info={}), 1, COUNTER, ranks=1):
        clock[0] += 1
    with accounted(metrics, "ref", DataProto(meta_info={"global_token_num": [3]}), 1, None, ranks=1):
        clock[0] += 1
    assert list(metrics) == ["perf/memory/ref/max_rss_gb"]


class Device:
    """A device in the place of torch.cuda, whose peaks begin anew where they are reset."""

    allocated = reserved = 0

    def max_memory_allocated(self):
        return self.allocated

    def max_memory_reserved(self):
        return self.reserved

    def reset_peak_memory_stats(self):
        self.allocated, self.reserved = 2**29, 2**30  # what is in use at that moment


def test_peaks_are_those_of_the_task_and_of_the_run(monkeypatch):
    device = Device()
    monkeypatch.setattr(accounting, "is_cuda_available", True)
    monkeypatch.setattr(accounting, "get_torch_device", lambda: device)
    monkeypatch.setattr(accounting, "_peaks", {"allocated": 0.0, "reserved": 0.0})
    first, second = {}, {}
    with accounted(first, "actor", DataProto(meta_info={}), 1, COUNTER, ranks=1):
        device.allocated, device.reserved = 3 * 2**30, 4 * 2**30
    with accounted(second, "ref", DataProto(meta_info={}), 1, COUNTER, ranks=1):
        pass
    assert (first["perf/memory/actor/max_allocated_gb"], first["perf/memory/actor/max_reserved_gb"]) == (3, 4)
    assert (second["perf/memory/ref/max_allocated_gb"], second["perf/memory/ref/max_reserved_gb"]) == (0.5, 1)
    total = memory_metrics()
    assert (total["perf/max_memory_allocated_gb"], total["perf/max_memory_reserved_gb"]) == (3, 4)


def test_patches_of_images_and_frames():
    rows = [
        {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])},
        {},
        {"video_grid_thw": torch.tensor([[3, 2, 4]])},
    ]
    assert image_lengths(rows) == [24, 4, 8, 8, 8]
    assert image_lengths(()) == []
