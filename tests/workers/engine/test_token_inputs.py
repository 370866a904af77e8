"""Families without an entry: the engine on rows of the data set against transformers on the processor's own output.

The reference reads each prompt as its processor returned it, and the response token by token with a cache. Tolerance:
fp32 with sums in another order, amplified by large weights.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.engine import cases, token_input_cases
from verl.base_config import ConfigError
from verl.models.transformers.token_inputs import TokenInputs
from verl.trainer.sft.trainer import padded_batch
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.sft_dataset import SFTTensorCollator
from verl.utils.dataset.vision_utils import MediaEncoder, TurnEncoder
from verl.workers.config import RolloutConfig

pytest.importorskip("torchvision")
PADDED = {"use_remove_padding": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return what writes a family once: its folder and its processor."""
    root = tmp_path_factory.mktemp("media")
    return cache(lambda family: (root / family, token_input_cases.write(root / family, family)))


@pytest.mark.parametrize("family", token_input_cases.SHOWN)
def test_equals_transformers_on_the_output_of_the_processor(written: Any, family: str) -> None:
    folder, processor = written(family)
    found = token_input_cases.prompts(family, processor)
    engine = cases.build(folder, PADDED)
    with engine.eval_mode():
        log_probs = engine.infer_batch(token_input_cases.batch(found))["log_probs"]
    torch.testing.assert_close(log_probs, token_input_cases.wanted(folder, found), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_supervised_rows(written: Any, family: str) -> None:
    folder, processor = written(family)
    found = token_input_cases.prompts(family, processor)
    responses = token_input_cases.responses(len(found))
    encoder = TurnEncoder(processor.tokenizer, MediaEncoder(processor, DataConfig()), {})
    rows = []
    for prompt, response in zip(found, responses, strict=True):
        ids = torch.cat([prompt["input_ids"][0], response])
        encoder.outputs = [prompt] if "pixel_values" in prompt else []
        padding = (0, 80 - len(ids))
        columns = encoder.vision_columns(torch.nn.functional.pad(ids, padding), len(ids))
        mask = torch.cat([torch.zeros_like(prompt["input_ids"][0]), torch.ones_like(response)])
        held = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}
        rows.append(columns | {name: torch.nn.functional.pad(each, padding) for name, each in held.items()})
    data = padded_batch(SFTTensorCollator("right")(rows), pad_token_id=0)
    data.meta_info.update(temperature=1.0, micro_batch_size_per_gpu=len(rows))
    engine = cases.build(folder, PADDED)
    with engine.eval_mode():
        log_probs = engine.infer_batch(data)["log_probs"]
    found_there = log_probs[data.batch["response_mask"].bool()].view(len(rows), -1)
    torch.testing.assert_close(found_there, token_input_cases.wanted(folder, found), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["gemma3", "glm46v"])
def test_images_that_cannot_be_packed_are_refused(written: Any, family: str) -> None:
    """The advice is what the test above runs; rows without images can be packed."""
    folder, processor = written(family)
    found = token_input_cases.prompts(family, processor)
    engine = cases.build(folder)
    with engine.eval_mode(), pytest.raises(ConfigError, match="cannot pack images of model_type=.*: write false"):
        engine.infer_batch(token_input_cases.batch(found))
    text = token_input_cases.batch(found).select_idxs([2])
    padded = cases.build(folder, PADDED)
    with engine.eval_mode(), padded.eval_mode():
        log_probs = [each.infer_batch(text)["log_probs"] for each in (engine, padded)]
    torch.testing.assert_close(*log_probs, atol=2e-4, rtol=0)


def test_packed_images_that_nothing_depends_on(written: Any) -> None:
    folder, processor = written("llava_next")
    found = token_input_cases.prompts("llava_next", processor)
    engine = cases.build(folder)
    with engine.eval_mode():
        log_probs = engine.infer_batch(token_input_cases.batch(found))["log_probs"]
    torch.testing.assert_close(log_probs, token_input_cases.wanted(folder, found), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_the_hf_rollout_samples_from_what_is_trained(written: Any, family: str) -> None:
    from verl.workers.rollout.hf_rollout import HFRollout

    folder, processor = written(family)
    prompts = token_input_cases.batch(token_input_cases.prompts(family, processor))
    width = token_input_cases.PROMPT
    for name in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[name] = prompts.batch[name][:, :width]
    asked = prompts.select(batch_keys=["input_ids", "attention_mask", "position_ids"])
    asked.meta_info = {"eos_token_id": 2, "pad_token_id": 0}
    sizes = {"prompt_length": width, "response_length": token_input_cases.RESPONSE}
    config = RolloutConfig(name="hf", dtype="float32", load_format="auto", calculate_log_probs=True, **sizes)
    rollout = HFRollout(config, cases.model_config(folder))
    rollout.begin_update()
    rollout.load([(name, tensor.clone()) for name, tensor in rollout._parameters.items()])
    rollout.finish_update(1)
    output = rollout.generate_sequences(asked)
    output.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
    output.meta_info.update(temperature=1.0, micro_batch_size_per_gpu=len(output))
    engine = cases.build(folder, PADDED)
    with engine.eval_mode():
        log_probs = engine.infer_batch(output)["log_probs"]
    torch.testing.assert_close(log_probs, output.batch["rollout_log_probs"], atol=2e-4, rtol=0)


def test_an_argument_that_is_not_known_is_refused() -> None:
    """Mllama's images come with a mask for each token."""
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    model = torch.nn.Module.__new__(MllamaForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.config = MllamaConfig()
    rules = TokenInputs.of(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert rules.inputs(ids, torch.zeros_like(ids).bool(), has_media=False) == {}
    with pytest.raises(ValueError, match="'mllama' takes cross_attention_mask with its images"):
        rules.inputs(ids, torch.zeros_like(ids).bool(), has_media=True)


def test_a_sampled_token_is_text_whatever_its_id() -> None:
    rules = TokenInputs("gemma3", SimpleNamespace(image_token_index=7), frozenset({"token_type_ids"}), None, False)
    ids, sampled = torch.tensor([[5, 7, 7, 5, 7, 7]]), torch.tensor([[0, 0, 0, 0, 1, 0]]).bool()
    assert rules.inputs(ids, sampled, True)["token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 1]]  # the last is of a tool
