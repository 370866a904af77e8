"""Whole runs whose engine uses packed weights (``rollout.pack_weights``), and with adapters on a mixture of experts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.tiny_model import byte_tokenizer, tiny_config

from .conftest import PYTHON, Run, assert_bit_for_bit, call
from .features import GAP, responses
from .test_async_rollout import ASYNC, SHORT, TENSOR_PARALLEL

pytestmark = pytest.mark.full

PACKED = {"actor_rollout_ref.rollout.pack_weights": True}
STEPS = 3
SAVED = {"trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS, "trainer.test_freq": STEPS}
ADAPTERS = {
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.actor.optim.lr": 3e-2,
}
KINDS = {
    "one worker": {},
    "tensor parallel": TENSOR_PARALLEL,
    "agent loops": ASYNC,
    "adapters": ADAPTERS,
    "experts": {},
    "experts, adapters": ADAPTERS,
    "tied": {},
}


def write_model(folder: Path, kind: str) -> Path:
    """Write a model with experts, or with tied embeddings, and its tokenizer."""
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer)
    torch.manual_seed(0)
    if kind == "tied":
        config.tie_word_embeddings = True
        Qwen2ForCausalLM(config).save_pretrained(folder)
    else:
        fields = config.to_dict() | {"head_dim": 32}
        for name in ("model_type", "architectures", "layer_types"):
            fields.pop(name, None)
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **experts)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def changes_of(kind: str, tmp_path: Path, workspace, name: str) -> dict[str, object]:
    changes = SHORT | KINDS[kind] | {"trainer.rollout_data_dir": workspace.folder / name / "rollouts"}
    if "experts" in kind or kind == "tied":
        changes["actor_rollout_ref.model.path"] = write_model(tmp_path / "model", kind)
    return changes


def training_of(run: Run, step: int) -> dict[str, float]:
    """What of a step the log-probabilities of the engine, which differ by rounding, are no part of."""
    return {name: value for name, value in run.numbers(step).items() if not name.startswith("training/rollout_")}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_change_no_response(workspace, tmp_path, kind):
    names = [f"{how}-{kind.replace(' ', '-').replace(',', '')}" for how in ("plain", "packed")]
    plain, packed = (
        workspace.train(name, changes_of(kind, tmp_path, workspace, name) | more)
        for name, more in zip(names, ({}, PACKED), strict=True)
    )
    assert plain.steps.keys() == packed.steps.keys()
    for step in (1, 2):
        assert responses(packed, step) == responses(plain, step)
        assert training_of(packed, step) == training_of(plain, step)
        assert 0 < packed.steps[step][GAP] < 1e-5 and packed.steps[step]["weight_sync/checksum_ok"] == 1
        # The products of the runs are not the same ones.
        assert (
            packed.steps[step]["training/rollout_log_prob_diff_mean"]
            != (plain.steps[step]["training/rollout_log_prob_diff_mean"])
        )


def test_a_run_with_packed_weights_that_is_killed_resumes_bit_for_bit(workspace, tmp_path):
    changes = SHORT | PACKED | {"trainer.total_training_steps": 3, "trainer.save_freq": 1}
    whole = workspace.train("packed-whole", changes)
    fault = {"VERL_FAULT": "kill:weight_sync:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    workspace.train("packed-killed", changes, env=fault, fails=True)
    assert_bit_for_bit(workspace.train("packed-killed", changes), whole, (1, 2, 3))


def outputs(folder: Path, step: int) -> list[tuple[str, str]]:
    lines = (folder / f"{step}.jsonl").read_text().splitlines()
    return [(row["input"], row["output"]) for row in map(json.loads, lines)]


def test_merged_adapters_of_experts_answer_as_the_engine_did(workspace, tmp_path):
    """The engine's last greedy answers are those of the merged checkpoint, in transformers; they have changed."""
    name = "merged-experts"
    model = write_model(tmp_path / "model", "experts")
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
