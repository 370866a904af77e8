"""Generation by the forward pass of transformers: slow, but it needs no other engine."""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.errors import WrongInput
from verl.models.transformers.attention_choice import class_of, padded_attention
from verl.models.transformers.balancing import returns_router_logits
from verl.models.transformers.names import PACKED
from verl.models.transformers.rope import install_row_rope, install_row_temperature, row_lengths, row_rope_of
from verl.models.transformers.token_inputs import TokenInputs
from verl.models.transformers.vision import MEDIA, Media, install_vision, is_vision_config, uses_media
from verl.protocol import DataProto, tensors_of
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.faults import fault_point
from verl.utils.model import get_hf_auto_model_class, stored_buffers
from verl.utils.vision.multi_modal import concat_multi_modal_inputs
from verl.utils.vision.positions import continued
from verl.workers.config.engines import ENGINES
from verl.workers.rollout.base import (
    BaseRollout,
    Bucket,
    check_prompt_lengths,
    padded_token_ids,
    preserved_random_state,
    prompt_token_ids,
    sampling_values,
)
from verl.workers.rollout.checksum import tensor_checksum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.workers.config import HFModelConfig, RolloutConfig


class Sampler:
    """Draw one token per row and call.

    Args: ``values`` holds ``temperature`` (0 is greedy), ``top_p``, ``top_k`` (0 or -1 is off) and
    ``repetition_penalty``; the draws of a row depend only on its seed and its logits.
    """

    def __init__(self, values: dict[str, float], seeds: Sequence[int], device: torch.device) -> None:
        self._is_greedy = values["temperature"] == 0
        self._processors: list[LogitsProcessor] = []
        if values["repetition_penalty"] != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(values["repetition_penalty"])))
        if not self._is_greedy:
            self._processors.append(TemperatureLogitsWarper(float(values["temperature"])))
            if values["top_k"] > 0:
                self._processors.append(TopKLogitsWarper(int(values["top_k"])))
            if values["top_p"] < 1:
                self._processors.append(TopPLogitsWarper(values["top_p"]))
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B,) and their log-probabilities (B,) under the sampled distribution.

        Args: logits are (B, V) float32; ``seen`` (B, T) are the tokens so far.
        """
        for process in self._processors:
            logits = process(seen, logits)
        log_probs = logits.log_softmax(dim=-1)
        token = logits.argmax(dim=-1) if self._is_greedy else self._draw(log_probs)
        return token, log_probs.gather(-1, token[:, None])[:, 0]

    def _draw(self, log_probs: Tensor) -> Tensor:
        """Sample by the exponential race: the arg max of p / Exp(1) has distribution p."""
        noise = torch.empty_like(log_probs)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return (log_probs - noise.log()).argmax(dim=-1)


class HFRollout(BaseRollout):
    """Generate with a transformers model, one copy per rank, in chunks of ``max_num_seqs`` rows.

    ``HFRollout(config, model_config, device_mesh)`` builds a whole copy of the model in ``config.dtype`` and receives
    the trainer's weights by the updates of ``BaseRollout``, because a sharded training module would gather its layers
    once per token. ``HFRollout(module, config)`` generates with the given module in its current state.
    """

    facts = ENGINES["hf"]

    def __init__(
        self,
        config: Union["RolloutConfig", nn.Module],
        model_config: Union["HFModelConfig", "RolloutConfig"],
        device_mesh: "DeviceMesh | None" = None,
    ) -> None:
        given = isinstance(config, nn.Module)
        rollout_config: Any = model_config if given else config
        super().__init__(rollout_config, None if given else model_config, device_mesh)  # type: ignore[arg-type]
        self.module: nn.Module = config if given else _build_model(rollout_config, model_config)  # type: ignore[assignment,arg-type]
        self._takes_media = not given and uses_media(getattr(self.module, "config", None))
        if self._takes_media:
            install_vision(self.module)  # type: ignore[arg-type]
        hf_config = getattr(self.module, "config", None)
        reads_types = not self._takes_media and hf_config is not None and is_vision_config(hf_config)
        self._token_inputs = TokenInputs.of(self.module) if reads_types else None
        asks_routers = returns_router_logits(getattr(self.module, "config", None))
        # With a cache, transformers cannot make their loss.
        self._options = {"output_router_logits": False} if asks_routers else {}
        install_row_temperature(self.module)
        self._rope = row_rope_of(self.module) or install_row_rope(self.module)
        self._usable = self._usable or given
        self._arrived: set[str] = set()

    # ---- generation

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; see ``BaseRollout``.

        Raises: RuntimeError without usable weights; ValueError if a prompt is too long, or has images without
            ``multi_modal_inputs``.
        """
        self._check_usable()
        started = time.perf_counter()
        media = _media_of(prompts)
        token_ids = prompt_token_ids(prompts) if media is None else padded_token_ids(prompts)
        batch = tensors_of(prompts)
        positions = batch["position_ids"]
        room = self.config.context_length - self.config.response_length
        check_prompt_lengths(token_ids, batch["attention_mask"], room)
        seeds = self._sampling_seeds(prompts) or [0] * len(prompts)
        values = sampling_values(prompts, self.config)
        eos = self._end_tokens(prompts)
        was_training = self.module.training
        self.module.eval()
        responses: list[list[int]] = []
        log_probs: list[list[float]] = []
        for start in range(0, len(prompts), self.config.max_num_seqs):
            rows = slice(start, start + self.config.max_num_seqs)
            sampler = Sampler(values, seeds[rows], self._device)
            inputs = self._inputs(token_ids[rows], positions[rows], None if media is None else media[rows])
            tokens, scores = self._generate(inputs, sampler, eos, prompts.meta_info.get("global_steps"))
            responses += tokens
            log_probs += scores
        self.module.train(was_training)
        elapsed = time.perf_counter() - started
        truncated = sum(row[-1] not in eos for row in responses)
        kept_log_probs = log_probs if self.config.calculate_log_probs else None
        return self._finished(prompts, responses, kept_log_probs, elapsed, truncated)

    def _inputs(self, token_ids: list[list[int]], positions: Tensor, media: np.ndarray | None) -> dict[str, Any]:
        """Return the model's inputs for the prompts of the rows, padded to the longest one."""
        width = max(map(len, token_ids))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in token_ids], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in token_ids], device=self._device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if positions.dim() == 2:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        else:  # the batch has (B, C, P), the model takes (C, B, P)
            inputs["position_ids"] = positions[..., -ids.shape[1] :].transpose(0, 1).to(self._device)
        joined: dict[str, Any] = {}
        if media is not None:
            joined = {name: value.to(self._device) for name, value in concat_multi_modal_inputs(media).items()}
            if self._takes_media:
                joined = {MEDIA: Media(torch.zeros_like(ids, dtype=torch.bool), joined)}
            inputs |= joined
        if self._token_inputs is not None:
            inputs |= self._token_inputs.inputs(ids, torch.zeros_like(ids, dtype=torch.bool), bool(joined))
            if joined and self._token_inputs.has_axes and positions.dim() == 2:
                raise WrongInput(
                    f"actor_rollout_ref.rollout.name=hf cannot count the positions of the images of model_type="
                    f"{self._token_inputs.family!r}: write vllm"
                )
        return inputs

    def _generate(
        self, inputs: dict[str, Any], sampler: Sampler, eos: list[int], step: int | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the sampled tokens of each row, and their log-probabilities."""
        ids = inputs["input_ids"]
        mask = inputs.pop("attention_mask")
        ends = torch.tensor(eos, dtype=torch.long, device=self._device)
        position = _next_positions(inputs["position_ids"], 1)
        cache = None
        seen = torch.where(mask == 0, ids[:, -1:], ids)  # padding repeats a token that the row has anyway
        running = torch.ones(len(ids), dtype=torch.bool, device=self._device)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        alive: list[Tensor] = []
        whole = dict(inputs)
        for index in range(self.config.response_length):
            if index and self._switches(inputs["position_ids"]):
                inputs = _longer(whole, torch.stack(tokens, dim=1))
                cache = None
            with self._rows(inputs["position_ids"], mask):
                output = self.module(
                    **inputs,
                    **self._options,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache = output.past_key_values
            token, score = sampler(output.logits[:, -1].float(), seen)
            tokens.append(token)
            scores.append(score)
            alive.append(running)
            running = running & ~torch.isin(token, ends)
            if index == 0:
                fault_point("generate", rank=envs.integer("RANK", 0), step=step)
            if not self._is_sharded and not running.any():
                break
            inputs = {"input_ids": token[:, None], "position_ids": position}
            position = position + 1
            seen = torch.cat([seen, token[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        lengths = torch.stack(alive, dim=1).sum(dim=1).tolist()
        made = zip(torch.stack(tokens, dim=1).tolist(), lengths, strict=True)
        scored = zip(torch.stack(scores, dim=1).tolist(), lengths, strict=True)
        return [row[:length] for row, length in made], [row[:length] for row, length in scored]

    def _rows(self, positions: Tensor, mask: Tensor) -> AbstractContextManager[None]:
        """Return a context in which RoPE of the types dynamic and longrope uses the current length of each row.

        The frequencies of these types depend on the length. For other models the context does nothing.
        """
        if self._rope is None:
            return nullcontext()
        return self._rope.rows(row_lengths(positions, mask[:, -positions.shape[-1] :]))

    def _switches(self, position: Tensor) -> bool:
        """Return whether a row switches to other RoPE frequencies than in pretraining with the token at this position.

        The cached keys of the row have the earlier frequencies, so the row is computed again, as transformers does for
        Phi-3.
        """
        rope = self._rope
        if rope is None or rope.length is not None or not rope.switches:
            return False
        return bool(position.reshape(-1, position.shape[-2]).amax(0).eq(rope.pretrained).any())

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def _is_sharded(self) -> bool:
        """Whether a forward pass is collective, so that all ranks must run the same number of passes."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.module.parameters())

    # ---- weights

    def begin_update(self) -> None:
        """Start a change of all weights."""
        super().begin_update()
        self._arrived.clear()

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Copy tensors into the module's parameters and buffers.

        Raises: RuntimeError naming a tensor that the module lacks, that has another shape, or that arrived twice.
        """
        for name, tensor in bucket:
            target = self._parameters.get(name)
            if target is None:
                raise RuntimeError(f"weight sync: the rollout's model has no tensor {name!r}")
            if target.shape != tensor.shape:
                shapes = f"{tuple(target.shape)}, not {tuple(tensor.shape)}"
                raise RuntimeError(f"weight sync: tensor {name!r} of the rollout's model is {shapes}")
            if name in self._arrived:
                raise RuntimeError(f"weight sync: tensor {name!r} came twice in one update")
            self._arrived.add(name)
            target.copy_(tensor)

    def finish_update(self, version: int) -> None:
        """Record the version.

        Raises: RuntimeError naming tensors that did not arrive.
        """
        missing = sorted(self._parameters.keys() - self._arrived)
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(f"weight sync: {len(missing)} tensors of the rollout's model are missing: {shown}")
        super().finish_update(version)

    def weights_checksum(self) -> dict[str, int]:
        """Return the checksum of every parameter."""
        return {name: int(tensor_checksum(value)) for name, value in self._parameters.items()}

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the name and the checksum of the tensor in the dtype of the module's parameter."""
        target = self._parameters.get(name)
        return None if target is None else (name, tensor_checksum(tensor, target.dtype))

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the module's parameter; see ``BaseRollout``."""
        target = self._parameters.get(name)
        return None if target is None else target.dtype

    @property
    def _parameters(self) -> dict[str, Tensor]:
        """The parameters, tied ones once under their first name, and the buffers that checkpoints hold."""
        return {**dict(self.module.named_parameters()), **dict(stored_buffers(self.module))}


def _longer(inputs: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Return the inputs of prompts with the tokens (b, n) that follow them."""
    ids = inputs["input_ids"]
    positions = inputs["position_ids"]
    later = _next_positions(positions, tokens.shape[1])
    longer = inputs | {
        "input_ids": torch.cat([ids, tokens], dim=1),
        "position_ids": torch.cat([positions, later], dim=-1),
    }
    if MEDIA in inputs:
        sampled = inputs[MEDIA].sampled
        longer[MEDIA] = dataclasses.replace(inputs[MEDIA], sampled=F.pad(sampled, (0, tokens.shape[1]), value=True))
    return longer


def _next_positions(positions: Tensor, steps: int) -> Tensor:
    """Return the positions (B, n) or (C, B, n) of tokens that follow prompts."""
    if positions.dim() == 2:
        return continued(positions, steps)
    return continued(positions.transpose(0, 1), steps).transpose(0, 1)


NaiveRollout = HFRollout
"""The second name of the class in the established verl interface."""


def _build_model(config: "RolloutConfig", model_config: "HFModelConfig") -> nn.Module:
    dtype = getattr(model_config.hf_config, "dtype", None) or torch.float32
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    hf_config = model_config.hf_config
    auto_class = get_hf_auto_model_class(hf_config)
    asked = model_config.override_config.get("attn_implementation")
    attention = padded_attention(
        hf_config,
        class_of(auto_class, hf_config),
        torch.device(get_device_name()),
        dtype,
        None if asked == PACKED else asked,  # packed attention has no cache
    )
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": model_config.trust_remote_code}
    with preserved_random_state():
        if config.load_format == "dummy":
            model = auto_class.from_config(hf_config, **options)
        else:
            path = model_config.local_path
            options |= {"weights_only": True, "output_loading_info": True}
            loaded: Any = auto_class.from_pretrained(path, config=hf_config, **options)
            model, report = loaded  # two values, because of output_loading_info
            if missing := sorted(report["missing_keys"] & dict(model.named_parameters()).keys()):
                raise WrongInput(
                    f"model.path={path}: the files lack {len(missing)} tensors of the model, the first is "
                    f"{missing[0]!r}: name a folder that holds the whole model of its config.json"
                )
    return model.to(get_device_name()).eval().requires_grad_(False)


def _media_of(prompts: DataProto) -> np.ndarray | None:
    """Return the processor's tensors of each row; None if no row has images.

    Raises: ValueError if the batch holds images only in the form that other engines take.
    """
    rows: np.ndarray | None = prompts.non_tensor_batch.get("multi_modal_inputs")
    if rows is None and any(prompts.non_tensor_batch.get("multi_modal_data", [])):
        raise WrongInput(
            "actor_rollout_ref.rollout.name=hf reads multi_modal_inputs: write data.return_multi_modal_inputs=true"
        )
    return rows
