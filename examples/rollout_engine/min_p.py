"""A rollout engine written by a user: ``generate`` of transformers, with min-p sampling."""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl.errors import WrongInput
from verl.protocol import DataProto
from verl.utils.device import get_device_name
from verl.workers.config.engines import EngineFacts
from verl.workers.rollout import BaseRollout
from verl.workers.rollout.base import (
    Bucket,
    check_prompt_lengths,
    preserved_random_state,
    prompt_token_ids,
    sampling_values,
)
from verl.workers.rollout.checksum import tensor_checksum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.workers.config import HFModelConfig, RolloutConfig


class MinPRollout(BaseRollout):
    """Samples only tokens that are at least ``min_p`` times as likely as the most likely token.

    ``rollout.engine_kwargs.MinPRollout.min_p`` is 0 (off) by default. Responses are generated one after the other, so
    that a response depends only on its prompt, its seed and the weights.
    """

    facts = EngineFacts(devices=("cpu", "cuda"))

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None" = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.min_p = (config.engine_kwargs.get("MinPRollout") or {}).get("min_p", 0.0)
        if not 0 <= self.min_p < 1:
            key = "actor_rollout_ref.rollout.engine_kwargs.MinPRollout.min_p"
            raise WrongInput(f"{key}={self.min_p}: must be in [0, 1)")
        dtype = "float32" if config.dtype == "auto" else config.dtype
        with preserved_random_state():
            model = AutoModelForCausalLM.from_config(model_config.hf_config, dtype=getattr(torch, dtype))
        self.model = model.to(get_device_name()).eval().requires_grad_(False)
        self._missing: dict[str, Tensor] = {}

    # ---- generation

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; see ``BaseRollout``."""
        self._check_usable()
        started = time.perf_counter()
        rows = prompt_token_ids(prompts)
        room = self.config.context_length - self.config.response_length
        check_prompt_lengths(rows, prompts.batch["attention_mask"], room)
        seeds = self._sampling_seeds(prompts) or [0] * len(rows)
        with preserved_random_state():
            drawn = [self._respond(row, seed, prompts) for row, seed in zip(rows, seeds, strict=True)]
        responses = [tokens for tokens, _ in drawn]
        log_probs = [scores for _, scores in drawn] if self.config.calculate_log_probs else None
        ends = self._end_tokens(prompts)
        truncated = sum(tokens[-1] not in ends for tokens in responses)
        return self._finished(prompts, responses, log_probs, time.perf_counter() - started, truncated)

    def _respond(self, prompt: list[int], seed: int, prompts: DataProto) -> tuple[list[int], list[float]]:
        """Return the tokens of a response, and their log-probabilities under the filtered sampling distribution."""
        torch.manual_seed(seed)
        values = sampling_values(prompts, self.config)
        options = {"do_sample": False}
        if values["temperature"] > 0:
            names = ("temperature", "top_p")
            options = {"do_sample": True, "min_p": self.min_p, "top_k": max(0, int(values["top_k"]))}
            options |= {name: values[name] for name in names}
        ids = torch.tensor([prompt], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.config.response_length,
            repetition_penalty=values["repetition_penalty"],
            eos_token_id=self._end_tokens(prompts) or None,
            pad_token_id=prompts.meta_info["pad_token_id"],
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        tokens = output.sequences[0, len(prompt) :]
        scores = torch.stack(output.scores, dim=0)[:, 0].float().log_softmax(dim=-1)  # (R, V)
        return tokens.tolist(), scores.gather(-1, tokens[:, None])[:, 0].tolist()

    # ---- weights

    def begin_update(self) -> None:
        """Start a weight update, which must replace every parameter."""
        super().begin_update()
        self._missing = dict(self.model.named_parameters())

    def load(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket into the model."""
        for name, tensor in bucket:
            if name not in self._missing:
                raise RuntimeError(f"weight sync: the model has no tensor {name!r}, or it came twice")
            self._missing.pop(name).copy_(tensor)

    def finish_update(self, version: int) -> None:
        """Record the new version of the weights if every parameter was replaced."""
        if self._missing:
            raise RuntimeError(f"weight sync: tensors of the model are missing: {', '.join(self._missing)}")
        super().finish_update(version)

    def weights_checksum(self) -> dict[str, int]:
        """Return the checksum of each parameter of this engine."""
        return {name: int(tensor_checksum(value)) for name, value in self.model.named_parameters()}

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the name and the checksum of a trainer's tensor after its cast to this engine's dtype."""
        held = dict(self.model.named_parameters()).get(name)
        return None if held is None else (name, tensor_checksum(tensor, held.dtype))
