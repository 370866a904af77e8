"""Images and tensors travel once per prompt, by reference."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from verl.protocol import DataProto
from verl.utils.flops_counter import image_lengths
from verl.utils.py_functional import object_array
from verl.utils.vision import multi_modal
from verl.utils.vision.multi_modal import (
    SharedRow,
    concat_distinct_inputs,
    concat_multi_modal_inputs,
    resolve,
    share,
    shared_bytes,
)


def _batch() -> DataProto:
    """Three prompts: an image, text only, and two images."""
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 255, (28, 56, 3), dtype=np.uint8)) for _ in range(3)]
    inputs = [
        {"pixel_values": torch.arange(8.0).view(2, 4), "image_grid_thw": torch.tensor([[1, 2, 4]])},
        {},
        {"pixel_values": -torch.arange(16.0).view(4, 4), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 6]])},
    ]
    return DataProto.from_dict(
        tensors={"row": torch.arange(3)},
        non_tensors={
            "multi_modal_data": object_array([{"image": images[:1]}, {}, {"image": images[1:]}]),
            "multi_modal_inputs": object_array(inputs),
        },
    )


def _shared_batch() -> DataProto:
    batch = _batch()
    share(batch.non_tensor_batch)
    return batch


def _assert_row(data: dict[str, Any], inputs: dict[str, Any], row: int) -> None:
    expected = _batch()
    assert data.keys() == expected.non_tensor_batch["multi_modal_data"][row].keys()
    images = expected.non_tensor_batch["multi_modal_data"][row].get("image", [])
    assert [image.tobytes() for image in data.get("image", [])] == [image.tobytes() for image in images]
    tensors = expected.non_tensor_batch["multi_modal_inputs"][row]
    assert inputs.keys() == tensors.keys()
    assert all(torch.equal(inputs[name], value) for name, value in tensors.items())


def test_without_ray_rows_stay_and_are_joined_in_row_order(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    batch = _shared_batch()
    assert batch.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"].shape == (2, 4)
    joined = concat_multi_modal_inputs(batch.non_tensor_batch["multi_modal_inputs"][[2, 1, 0]])
    assert torch.equal(
        joined["pixel_values"], torch.cat([-torch.arange(16.0).view(4, 4), torch.arange(8.0).view(2, 4)])
    )
    assert joined["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 6], [1, 2, 4]]
    assert concat_multi_modal_inputs([{}, None]) == {}
    joined, shown = concat_distinct_inputs(batch.non_tensor_batch["multi_modal_inputs"][[2, 1, 0, 2, 0]])
    assert joined["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 6], [1, 2, 4]]
    assert shown == {"image_grid_thw": [0, 1, 2, 0, 1, 2]}
    assert concat_distinct_inputs([{}, None]) == ({}, {})
    assert resolve([None, {}, {"a": 1}]) == [{}, {}, {"a": 1}]


def test_a_prompt_travels_once_however_often_it_is_sampled(ray_cluster: None) -> None:
    import ray

    @ray.remote(num_cpus=1)
    class Reader:
        """A worker that reads a part of a batch twice, as the phases of a step do."""

        def read(self, part: DataProto) -> tuple[list[Any], int]:
            rows = [resolve(part.non_tensor_batch[key]) for key in multi_modal.MULTI_MODAL_KEYS]
            again = [resolve(part.non_tensor_batch[key]) for key in multi_modal.MULTI_MODAL_KEYS]
            assert all(a is b for x, y in zip(rows, again, strict=True) for a, b in zip(x, y, strict=True) if a)
            return list(zip(*rows, strict=True)), multi_modal.take_fetched_bytes()

    pixels, tensors = 3 * 28 * 56 * 3, 4 * (8 + 16) + 8 * 9
    batch = _shared_batch()
    assert shared_bytes(batch.non_tensor_batch) == pixels + tensors
    assert [type(row) for row in batch.non_tensor_batch["multi_modal_data"]] == [SharedRow, dict, SharedRow]
    repeated = batch.repeat(repeat_times=4, interleave=True)
    assert shared_bytes(repeated.non_tensor_batch) == pixels + tensors
    handles = list(repeated.non_tensor_batch["multi_modal_inputs"])
    share(repeated.non_tensor_batch)
    assert all(a is b for a, b in zip(repeated.non_tensor_batch["multi_modal_inputs"], handles, strict=True))
    assert image_lengths(repeated.non_tensor_batch["multi_modal_inputs"]) == [8] * 4 + [4, 12] * 4
    assert repeated.union(batch.repeat(4, interleave=True)) is repeated  # equal handles

    joined, shown = concat_distinct_inputs(repeated.non_tensor_batch["multi_modal_inputs"])
    assert joined["pixel_values"].shape == (6, 4)
    assert shown["image_grid_thw"] == [0] * 4 + [1, 2] * 4
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    repeated.reorder(order)
    reader, fetched = Reader.remote(), 0
    for part in repeated.chunk(2):
        rows, came = ray.get(reader.read.remote(part), timeout=120)
        fetched += came
        for index, (data, inputs) in zip(part.batch["row"].tolist(), rows, strict=True):
            _assert_row(data, inputs, index)
    assert fetched == pixels + tensors


def test_the_cache_is_bounded(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = multi_modal._Cache()
    monkeypatch.setattr(multi_modal, "_CACHE", cache)
    monkeypatch.setattr(multi_modal, "CACHE_BYTES", 250)
    rows = [{"x": torch.full((25,), float(i))} for i in range(3)]
    handles = multi_modal._shared(object_array(rows), 1)
    for i in (0, 1, 0, 2, 0):
        assert resolve(handles[i : i + 1])[0]["x"][0] == i
    assert [handles[i] in cache.rows for i in range(3)] == [True, False, True]
    assert (cache.size, multi_modal.take_fetched_bytes()) == (200, 300)


def test_a_newer_batch_takes_the_place_of_what_was_kept(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a worker keeps stay in the object store of a run, which would fill up."""
    cache = multi_modal._Cache()
    monkeypatch.setattr(multi_modal, "_CACHE", cache)
    first, second = (_shared_batch().non_tensor_batch["multi_modal_inputs"] for _ in range(2))
    of_first = resolve(first)
    assert resolve(first)[0] is of_first[0]
    taken = multi_modal.take_fetched_bytes()
    of_second = resolve(second[:1])
    assert list(cache.rows) == [second[0]] and cache.size == second[0].num_bytes
    assert resolve(second[:1])[0] is of_second[0] and multi_modal.take_fetched_bytes() == second[0].num_bytes
    resolve([*first, *second])  # draws of several batches that one update joins
    assert set(cache.rows) == {row for row in (*first, *second) if isinstance(row, SharedRow)}
    assert multi_modal.take_fetched_bytes() == 2 * taken - second[0].num_bytes
