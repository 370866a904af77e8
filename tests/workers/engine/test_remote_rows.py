"""Rows of a file reach models with remote code: data set, batch, dispatch to workers and forward pass.

The processors and models are the stand-ins of ``tests/remote_code`` for Kimi-VL and MiniCPM-o.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from recipe.minicpmo.rl_dataset import RLHFDataset as MiniCPMRows
from tests import remote_code
from tests.workers.engine import cases
from verl.models.transformers import remote
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.vision_utils import process_multi_modal_inputs_for_minicpmo
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.vision.multi_modal import SharedRow, resolve, share

PROMPT, RESPONSE = 96, 4
QUESTIONS = [("a<image>?", [(56, 28)]), ("no picture", []), ("<image>b<image>c", [(28, 28), (84, 56)])]


@pytest.fixture(scope="module", params=["kimi_vl", "minicpmo"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remote_code.write_model(tmp_path_factory.mktemp("rows") / family, family)


@pytest.fixture(scope="module")
def rows(folder: Path, family: str, tmp_path_factory: pytest.TempPathFactory) -> RLHFDataset:
    path = tmp_path_factory.mktemp("data")
    noise = np.random.default_rng(1)
    table = []
    for number, (content, sizes) in enumerate(QUESTIONS):
        images = []
        for index, (width, height) in enumerate(sizes):
            file = path / f"{number}_{index}.png"
            Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
            images.append({"path": str(file)})
        row = {"data_source": "screens", "prompt": [{"role": "user", "content": content}], "images": images}
        table.append(row | {"reward_model": {"style": "rule", "ground_truth": "1"}})
    pd.DataFrame(table).to_parquet(path / "rows.parquet")
    config = OmegaConf.create(
        {"max_prompt_length": PROMPT, "image_key": "images", "truncation": "error", "train_files": "rows"}
    )
    tokenizer = hf_tokenizer(str(folder), trust_remote_code=True)
    processor = hf_processor(str(folder), trust_remote_code=True, use_fast=True)
    assert processor is not None
    cls = MiniCPMRows if family == "minicpmo" else RLHFDataset
    return cls(str(path / "rows.parquet"), tokenizer, config, processor)


def batch_of(rows: RLHFDataset, index: list[int]) -> DataProto:
    """Return a batch after its rollout: prompts with a response each."""
    data = DataProto.from_single_dict(collate_fn([rows[i] for i in index]))
    tensors = data.batch
    generator = torch.Generator().manual_seed(0)
    response = torch.randint(3, 90, (3, RESPONSE), generator=generator)[index]
    for name, added in (("input_ids", response), ("attention_mask", torch.ones_like(response))):
        tensors[name] = torch.cat([tensors[name], added], dim=1)
    after = tensors["position_ids"][:, -1:] + torch.arange(1, RESPONSE + 1)
    tensors["position_ids"] = torch.cat([tensors["position_ids"], after], dim=1)
    tensors["responses"] = response
    tensors["response_mask"] = torch.ones_like(response)
    data.meta_info.update(temperature=1.0, micro_batch_size_per_gpu=2)
    return data


def alone(folder: Path, family: str, rows: RLHFDataset, row: int) -> torch.Tensor:
    """Return the log-probabilities of a row's response by the model's own forward and its processor's output."""
    model = remote_code.load(folder).eval()
    data = batch_of(rows, [row])
    ids = data.batch["input_ids"][data.batch["attention_mask"].bool()].unsqueeze(0)
    content, _ = QUESTIONS[row]
    images = list(resolve(data.non_tensor_batch["multi_modal_data"])[0].get("image", []))
    marker = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    text = content.replace("<image>", marker if family == "kimi_vl" else "(<image>./</image>)")
    text = f"<|user|>{text}<|end|><|assistant|>"
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    if family == "kimi_vl":
        encoded = dict(rows.processor(text=[text], images=images or None, add_special_tokens=False))
        inputs = {name: encoded[name] for name in ("pixel_values", "image_grid_hws") if name in encoded}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, **inputs).logits
    else:
        shown = dict(rows.processor(text=[text], images=images)) if images else {}
        given = {"pixel_values": [[]], "tgt_sizes": [[]], "image_bound": [[]]} | shown
        logits = model(data=given | {"input_ids": ids, "position_ids": positions}).logits
    log_p = torch.log_softmax(logits[0, -RESPONSE - 1 : -1], dim=-1)
    return log_p.gather(1, data.batch["responses"][0].unsqueeze(1))[:, 0].detach()


def test_rows_keep_their_images_on_the_way_to_the_workers(
    ray_cluster: None, folder: Path, family: str, rows: RLHFDataset
) -> None:
    """Two samples of each prompt, in another order, in two parts, through Ray: each worker gets what the file holds."""
    import ray

    @ray.remote(num_cpus=1)
    def receive(part: DataProto) -> tuple[list[int], list[Any]]:
        return part.batch["row"].tolist(), resolve(part.non_tensor_batch["multi_modal_inputs"])

    data = batch_of(rows, [0, 1, 2])
    data.batch["row"] = torch.arange(3)
    sent = list(data.non_tensor_batch["multi_modal_inputs"])
    share(data.non_tensor_batch)
    shared = data.non_tensor_batch["multi_modal_inputs"]
    assert [isinstance(row, SharedRow) for row in shared] == [True, False, True]
    assert all(row.num_bytes > 3 * 28 * 28 * 4 for row in shared if isinstance(row, SharedRow))  # slices in lists too
    twice = data.repeat(2, interleave=True)
    twice.reorder(torch.tensor([4, 0, 2, 1, 5, 3]))
    whole = DataProto.concat(twice.chunk(2))
    found = []
    for part in whole.chunk(2):
        numbers, objects = ray.get(receive.remote(part), timeout=120)
        found += zip(numbers, objects, strict=True)
    assert [number for number, _ in found] == [2, 0, 1, 0, 2, 1]
    for number, row in found:
        assert row.keys() == sent[number].keys()
        for name, value in row.items():
            pairs = zip(value, sent[number][name], strict=True)
            assert len(value) and all(torch.equal(a, b) for a, b in pairs), name


@pytest.mark.parametrize("packed", [True, False])
def test_the_engine_computes_what_the_model_makes_of_the_file(
    folder: Path, family: str, rows: RLHFDataset, packed: bool
) -> None:
    engine = cases.build(folder, {"trust_remote_code": True, "use_remove_padding": packed})
    index = [2, 1, 0]
    data = batch_of(rows, index).repeat(2, interleave=True)
    with engine.eval_mode():
        found = engine.infer_batch(data)["log_probs"]
    assert found.std() > 0.1
    for place, row in enumerate(index):
        expected = alone(folder, family, rows, row)
        # fp32 sums of some hundred terms, in another order
        torch.testing.assert_close(found[2 * place], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[2 * place + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["minicpmo"], indirect=True, scope="module")
def test_forks_may_call_minicpmo_themselves(folder: Path, family: str, rows: RLHFDataset) -> None:
    """The established helper places the images of packed rows where the model's own forward reads them."""
    data = batch_of(rows, [0, 2])
    mask = data.batch["attention_mask"]
    lengths = mask.sum(1)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids, positions = (data.batch[name][mask.bool()].unsqueeze(0) for name in ("input_ids", "position_ids"))
    inputs = extract_multi_modal_inputs(list(data.non_tensor_batch["multi_modal_inputs"]))
    made = process_multi_modal_inputs_for_minicpmo(ids, mask, positions, bounds, inputs)
    model = remote_code.load(folder).eval()
    assert not remote.is_remote_family(None) and remote.is_remote_family(model.config)
    packed, _ = model.get_vllm_embedding(made["data"])
    for row, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        media = data.non_tensor_batch["multi_modal_inputs"][row]
        given = {"input_ids": data.batch["input_ids"][row : row + 1]}
        given |= {name: [media[name]] for name in ("pixel_values", "tgt_sizes", "image_bound")}
        padded, _ = model.get_vllm_embedding(given)
        torch.testing.assert_close(packed[0, start:stop], padded[0, -int(lengths[row]) :], atol=1e-6, rtol=1e-6)
