"""Small reward models, a batch of a policy, and the ways to score it, in a process of their own for each rank."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from examples.tiny_model import byte_tokenizer
from verl.protocol import DataProto

PROMPT, RESPONSE = 40, 10
QUESTIONS = ["1 + 1 =", "name a colour", "x", "say hello to the whole world", "why?", "ten", "a b c", "no"]
ANSWERS = ["2", "blue", "", "hello, world", "so é", "10", "0123456789", "yes <|tool|>"]
"""The third is empty, the seventh fills the response, so that no end-of-sequence token stands behind it."""

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def reward_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens have other numbers than the policy's, and whose turns look different."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    return tokenizer


def write_models(folder: Path, num_layers: int = 2) -> None:
    policy, own = byte_tokenizer(), reward_tokenizer()
    policy.save_pretrained(folder / "policy")
    sizes = {"hidden_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        **sizes, intermediate_size=96, vocab_size=len(own), num_labels=1, pad_token_id=own.pad_token_id
    )
    for name, kind in (("token", Qwen2ForTokenClassification), ("sequence", Qwen2ForSequenceClassification)):
        torch.manual_seed(7)
        model = kind(config)
        for weight, parameter in model.named_parameters():  # larger than the default, so that scores differ
            if "norm" not in weight:
                parameter.data.normal_(0.0, 0.2)
        model.save_pretrained(folder / name)
        own.save_pretrained(folder / name)


def write_judge(folder: Path, model: str, functions: str) -> None:
    """Make the answers of a small language model differ, and write the functions around it."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(5)
    for weight, parameter in loaded.named_parameters():
        if "norm" not in weight:
            parameter.data.normal_(0.0, 0.2)
    loaded.save_pretrained(model)
    (folder / "functions.py").write_text(functions)


def batch(rows: list[int] | None = None, more_prompt: int = 0, more_response: int = 0) -> DataProto:
    """Return rows as a rollout gives them, with more padding on either side where that is asked for."""
    tokenizer = byte_tokenizer()
    chosen = list(range(len(QUESTIONS))) if rows is None else rows
    prompt, response = PROMPT + more_prompt, RESPONSE + more_response
    ids = torch.full((len(chosen), prompt + response), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(chosen):
        asked = tokenizer.apply_chat_template(messages(row), add_generation_prompt=True, tokenize=False)
        question = tokenizer(asked, add_special_tokens=False)["input_ids"]
        answer = response_ids(row)
        ids[at, prompt - len(question) : prompt] = torch.tensor(question)
        ids[at, prompt : prompt + len(answer)] = torch.tensor(answer)
        mask[at, prompt - len(question) : prompt + len(answer)] = 1
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, prompt:],
    }
    columns = np.fromiter((messages(row) for row in chosen), dtype=object, count=len(chosen))
    return DataProto.from_dict(tensors, {"raw_prompt": columns}, meta_info={"global_steps": 1})


def messages(row: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[row]}]


def response_ids(row: int) -> list[int]:
    """The tokens of an answer, with its end-of-sequence token where there is room."""
    tokenizer = byte_tokenizer()
    return [*tokenizer(ANSWERS[row], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id][:RESPONSE]


PACKED = {"model.use_remove_padding": True}
MICRO = {n: {"micro_batch_size_per_gpu": n} for n in (1, 2, 3, 8)}
DYNAMIC = {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 80}
ANEW = {"model.input_tokenizer": "policy"}

CASES: dict[str, dict[str, Any]] = {
    "padded, micro 1": MICRO[1],
    "padded, micro 8, fsdp2, offload": MICRO[8] | {"strategy": "fsdp2", "model.fsdp_config.param_offload": True},
    "packed, micro 3": MICRO[3] | PACKED,
    "packed, dynamic": DYNAMIC | PACKED,
    "packed, global micro": {"micro_batch_size": 4} | PACKED,
    "packed, replicas": MICRO[2] | PACKED | {"model.fsdp_config.fsdp_size": 1},
    "packed, ulysses": MICRO[2] | PACKED | {"ulysses_sequence_parallel_size": 2},
    "sequence": MICRO[2] | PACKED | {"model.path": "sequence"},
    "anew": MICRO[3] | PACKED | ANEW | {"max_length": 60},
    "anew, padded": MICRO[2] | ANEW | {"max_length": 60},
    "anew, dynamic, ulysses": DYNAMIC | PACKED | ANEW | {"ulysses_sequence_parallel_size": 2, "max_length": 60},
    "anew, cut right": MICRO[2] | ANEW | {"max_length": 24},
    "anew, cut left": MICRO[2] | ANEW | {"max_length": 24, "truncation": "left"},
    "anew, cut in the middle": MICRO[2] | ANEW | {"max_length": 24, "truncation": "middle"},
}


def node(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the ``reward_model`` node as the worker gets it."""
    tree: dict[str, Any] = {"enable": True, "model": {"path": "token", "fsdp_config": {}}}
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = tree
        for name in path:
            inner = inner[name]
        inner[last] = value
    for name in ("path", "input_tokenizer"):
        if tree["model"].get(name):
            tree["model"][name] = str(folder / tree["model"][name])
    functions = tree.get("data_processor_config", {})
    if functions.get("path"):
        functions["path"] = str(folder / functions["path"])
    tree["model"]["fsdp_config"]["_target_"] = "verl.workers.config.FSDPEngineConfig"
    return tree


def worker(folder: Path, changes: dict[str, Any]) -> Any:
    from verl.workers.fsdp_workers import RewardModelWorker

    built = RewardModelWorker(node(folder, changes))
    built.init_model()
    return built


def score_all(rank: int, world_size: int, folder: Path) -> dict[str, tuple[list[int], Tensor, dict[str, float]]]:
    """Score this rank's share of the batch in every way that so many ranks have."""
    results = {}
    for name, changes in CASES.items():
        sp_size = changes.get("ulysses_sequence_parallel_size", 1)
        if world_size % sp_size:
            continue
        shards, shard, count = world_size // sp_size, rank // sp_size, len(QUESTIONS)
        rows = list(range(count * shard // shards, count * (shard + 1) // shards))
        output = worker(folder, changes).compute_rm_score(batch(rows))
        results[name] = rows, output.batch["rm_scores"], output.meta_info["metrics"]
    return results


def run_world(rank: int, world_size: int, folder: Path, store: str) -> None:
    """Save what ``score_all`` gives on one of several ranks."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), DIST_INIT_METHOD=f"file://{store}")
    torch.set_num_threads(1)
    torch.save(score_all(rank, world_size, folder), folder / f"rank_{rank}.pt")
    dist.destroy_process_group()
