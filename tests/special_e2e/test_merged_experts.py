"""Adapters on a mixture of experts, merged after a whole run."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.tiny_model import byte_tokenizer, tiny_config

from .conftest import PYTHON, call
from .features import GAP

pytestmark = pytest.mark.full

STEPS = 3
SAVED = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.test_freq": STEPS}
ADAPTERS = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.actor.optim.lr": 3e-2,
}


def write_model(folder: Path) -> Path:
    """Write a model with experts, and its tokenizer."""
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer)
    torch.manual_seed(0)
    fields = config.to_dict() | {"head_dim": 32}
    for name in ("model_type", "architectures", "layer_types"):
        fields.pop(name, None)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **experts)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def outputs(folder: Path, step: int) -> list[tuple[str, str]]:
    lines = (folder / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"]) for row in map(json.loads, lines)]


def test_merged_adapters_of_experts_answer_as_the_engine_did(workspace, tmp_path):
    """The engine's last greedy answers are those of the merged checkpoint, in transformers; they have changed."""
    name = "merged-experts"
    model = write_model(tmp_path / "model")
    answers = tmp_path / "answers"
    changes = ADAPTERS | SAVED | {"actor_rollout_ref.model.path": model, "trainer.val_before_train": True}
    run = workspace.train(name, changes | {"trainer.validation_data_dir": answers})
    assert all(run.steps[step][GAP] < 1e-5 for step in range(1, STEPS + 1))
    merged = tmp_path / "merged"
    actor = run.folder / f"global_step_{STEPS}" / "actor"
    paths = ["--local_dir", str(actor), "--target_dir", str(merged)]
    call([*PYTHON, "verl.model_merger", "merge", "--backend", "fsdp", *paths, "--merge-lora"])
    tokenizer, merged_model = AutoTokenizer.from_pretrained(merged), AutoModelForCausalLM.from_pretrained(merged)
    found = []
    for text, _ in outputs(answers, STEPS):
        turns = [{"role": "user", "content": text}]  # the file shows no special tokens
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        answer = merged_model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        found.append((text, tokenizer.decode(answer, skip_special_tokens=True)))
    assert found == outputs(answers, STEPS) != outputs(answers, 0)
