"""A tiny real model, batches of prompts for it, and engines around it, shared by the tests of rollouts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import build_rollout
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.server import GenerationRequest

VOCABULARY, PROMPT_LENGTH, RESPONSE_LENGTH, TEMPERATURE = 131, 12, 10, 0.7
EOS, PAD = 2, 0
SERVED = {"mode": "async", "max_model_len": 64}
"""Settings of an engine whose requests may be longer than those of a batch."""


def build_model(tied: bool = False, num_key_value_heads: int = 2, max_positions: int = 64) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        intermediate_size=192,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        architectures=["Qwen2ForCausalLM"],
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    disturb(model, 0.1, seed=1)  # fresh biases are zero, and fresh norms one: a swapped pair would not show
    return model


def disturb(model: Any, size: float, seed: int) -> None:
    """Move every weight, far enough to change what is sampled."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


class TrainerStandIn:
    """What the sharding manager reads of a training engine."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights_version = 0
        self.streamed = 0

    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.streamed = 0
        for name, parameter in self.model.named_parameters():
            self.streamed += 1
            if before is not None:
                before(parameter.nbytes)
            yield name, parameter.detach().clone()  # as a gathered tensor: its memory is its own

    def sent_weights(self, agree: Any, before: Callable[[int], None] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.named_weights(before=before)


def rollout_config(name: str, **changes: Any) -> RolloutConfig:
    settings: dict[str, Any] = {
        "name": name,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "dtype": "float32",
        "temperature": TEMPERATURE,
        "tensor_model_parallel_size": 1,
        "calculate_log_probs": True,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 40,  # prompts are prefilled in chunks
        "gpu_memory_utilization": 0.1,
    }
    return RolloutConfig(**(settings | changes))


def start_rollout(name: str, model: Any, folder: Path, **changes: Any) -> BaseRollout:
    model.config.save_pretrained(folder)
    model_config = HFModelConfig(path=str(folder), load_tokenizer=False)
    return build_rollout(rollout_config(name, **changes), model_config, TrainerStandIn(model))


@contextmanager
def settings(rollout: BaseRollout, **changes: Any) -> Iterator[None]:
    """Change what the rollout reads of its config at each call."""
    kept = rollout.config
    rollout.config = rollout_config(kept.name, **changes)
    try:
        yield
    finally:
        rollout.config = kept


def load_all(rollout: BaseRollout, model: Any, version: int = 1) -> None:
    rollout.begin_update()
    rollout.load([(name, parameter.detach()) for name, parameter in model.named_parameters()])
    rollout.finish_update(version)


def prompts_batch(rows: int, seed: int = 0, repeat: int = 1, **meta: Any) -> DataProto:
    """Left-padded prompts of 1 to ``PROMPT_LENGTH`` tokens, each ``repeat`` times with seeds of its own."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCABULARY, rng.integers(1, PROMPT_LENGTH + 1)).tolist() for _ in range(rows)]
    prompts = [prompt for prompt in prompts for _ in range(repeat)]
    ids = np.full((len(prompts), PROMPT_LENGTH), PAD)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, PROMPT_LENGTH - len(prompt) :] = prompt
        mask[row, PROMPT_LENGTH - len(prompt) :] = 1
    raw = np.empty(len(prompts), dtype=object)
    raw[:] = prompts
    uids = np.array([f"row{index}" for index in range(len(prompts))], dtype=object)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy((mask.cumsum(1) - 1).clip(0)),
            "sampling_seed": torch.from_numpy(rng.integers(0, 2**63 - 1, len(prompts))),
        },
        non_tensors={"raw_prompt_ids": raw, "uid": uids},
        meta_info={"eos_token_id": EOS, "pad_token_id": PAD, "global_steps": 1} | meta,
    )


@torch.no_grad()
def request(params: Any, prompt_ids: Sequence[int] = (1, 1, 1)) -> GenerationRequest:
    return GenerationRequest(prompt_ids, params, "r")


def reference_log_probs(model: Any, batch: DataProto, temperature: float) -> Tensor:
    """Score the responses by a plain forward pass of transformers over the whole rows."""
    tensors = batch.batch
    logits = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
    ).logits
    scores = torch.log_softmax(logits[:, PROMPT_LENGTH - 1 : -1].float() / temperature, dim=-1)
    return scores.gather(-1, tensors["responses"][..., None])[..., 0] * tensors["response_mask"]


def sampled_tokens(batch: DataProto) -> list[list[int]]:
    lengths = batch.batch["response_mask"].sum(dim=1).tolist()
    return [row[:length] for row, length in zip(batch.batch["responses"].tolist(), lengths, strict=True)]
