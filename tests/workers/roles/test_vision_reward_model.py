"""Reward models on rows with images: one that sees scores them, one that reads text says what to write."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.workers.engine import vision_cases as vision
from tests.workers.roles import reward_cases as cases
from verl.utils.model import get_value_model_class
from verl.utils.py_functional import object_array
from verl.workers.rewards.chat_rendering import raw_prompts

FAMILY, TWIN = "qwen2_5_vl", 85
ROWS = list(range(vision.ROWS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    cases.write_models(root)
    vision.write_model(root / "policy", FAMILY)
    config = vision.load(root / "policy").config
    config.num_labels = 1
    model = get_value_model_class(config).from_pretrained(str(root / "policy"), config=config)
    torch.manual_seed(3)
    model.score.weight.data.normal_(0.0, 0.2)
    for parameter in model.model.visual.merger.parameters():  # so that a score tells images apart
        parameter.data *= 8
    weight = model.get_input_embeddings().weight.data
    weight[TWIN] = weight[vision.IMAGE]
    model.save_pretrained(root / "seeing")
    tensors, media = vision.rows(FAMILY)
    torch.save(vision.positions(vision.load(root / "policy"), tensors, media), root / "positions.pt")
    return root


@pytest.fixture(scope="module")
def worker(folder: Path) -> Any:
    """Workers in this process, by their changes."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{folder}/alone"}.items():
            patch.setenv(name, value)
        yield lambda changes: cases.worker(folder, changes)
        dist.destroy_process_group()


def last_scores(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    last = (mask * torch.arange(mask.shape[1])).argmax(-1, keepdim=True)
    return logits[..., 0].gather(1, last)[:, 0]


@pytest.mark.parametrize("packed", [True, False])
def test_scores_of_what_is_seen(folder: Path, worker: Any, packed: bool) -> None:
    """Those of plain transformers; an image token that the policy wrote is text."""
    data = vision.batch(folder, FAMILY, ROWS)
    for name in ("input_ids", "responses"):
        data.batch[name][0, -vision.RESPONSE] = TWIN
    tensors, media = data.batch, vision.rows(FAMILY)[1]
    config = vision.load(folder / "policy").config
    config.num_labels = 1
    model = get_value_model_class(config).from_pretrained(str(folder / "seeing"), config=config).eval()
    with torch.no_grad():
        logits = model(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"].transpose(0, 1),
            **vision.join(media),
        ).logits
    expected = last_scores(logits, tensors["attention_mask"])
    data = data.repeat(1)  # a batch of its own
    for name in ("input_ids", "responses"):
        data.batch[name][0, -vision.RESPONSE] = vision.IMAGE
    rewarded = worker({"model.path": "seeing", "micro_batch_size_per_gpu": 3, "model.use_remove_padding": packed})
    scores = rewarded.compute_rm_score(data).batch["rm_scores"]
    torch.testing.assert_close(scores.sum(-1), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.05
    shown = data.non_tensor_batch["multi_modal_inputs"]
    shown[0] = shown[0] | {"pixel_values": -shown[0]["pixel_values"]}
    changed = rewarded.compute_rm_score(data).batch["rm_scores"].sum(-1) - scores.sum(-1)
    assert changed[0].abs() > 1e-3 and changed[1:].abs().max() < 1e-5


def test_a_model_of_text_says_that_it_sees_nothing(folder: Path, worker: Any) -> None:
    rewarded = worker({"micro_batch_size_per_gpu": 2, "model.use_remove_padding": True})
    with pytest.raises(ValueError, match=r"row 1 of the batch holds images .*reward_model\.model\.input_tokenizer"):
        rewarded.compute_rm_score(vision.batch(folder, FAMILY, [1, 0]))
    text = vision.batch(folder, FAMILY, [1, 6, 7])  # positions along four axes all the same
    model = AutoModelForTokenClassification.from_pretrained(folder / "token").eval()
    rows = [row[kept.bool()] for row, kept in zip(text.batch["input_ids"], text.batch["attention_mask"], strict=True)]
    with torch.no_grad():
        expected = torch.stack([model(input_ids=row[None]).logits[0, -1, 0] for row in rows])
    scores = rewarded.compute_rm_score(text).batch["rm_scores"].sum(-1)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_chats_with_images_are_judged_as_text() -> None:
    content = [{"type": "text", "text": "is "}, {"type": "image"}, {"type": "text", "text": " round?"}]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
    batch: Any = SimpleNamespace(non_tensor_batch={"raw_prompt": object_array([chat])})
    assert list(raw_prompts(batch)) == [[chat[0], {"role": "user", "content": "is <image> round?"}]]
    assert chat[1]["content"] is content
