"""One copy of the weights for a trainer and a rollout in the same process, and the proof that both compute with it."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import WeightSyncError, WrongInput
from verl.protocol import DataProto, tensors_of
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.failures import on_failure, replacing_errors
from verl.utils.faults import fault_point
from verl.utils.memory_utils import return_freed_host_memory
from verl.workers.engine.passes import PassSpec

if TYPE_CHECKING:
    from verl.workers.engine.base import BaseEngine
    from verl.workers.rollout.base import BaseRollout

KEY = "actor_rollout_ref.rollout.share_weights"

PROBE_ROWS = 2
PROBE_TOKENS = 8
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a log-probability between trainer and engine, by the dtype of the weights.

Rounding differs by about 1e-7 (fp32) and 1e-2 (bf16) of a logit, and adds up over products and layers.
"""
USUAL_SIZE = 10.0
"""A larger log-probability has larger logits, whose rounding is larger in proportion: so is its tolerance."""
_INTEGER = {2: torch.int16, 4: torch.int32}
_FLIPPED = {torch.float32: 1 << 22, torch.bfloat16: 1 << 6, torch.float16: 1 << 9}
"""The highest bit of the mantissa: flipping it changes a value by a quarter to a half, and a second flip undoes it."""


class SharedWeights:
    """The weights of a training engine, which live in the parameters of a rollout's engine.

    The trainer's parameters become views of the engine's, which merge projections, so an optimizer step changes both
    and a sync moves nothing. A checksum would compare memory with itself, so two other things are checked instead:

    - **places**: name, shape, dtype, address and strides of each trained tensor are those of the engine's view, which
      is looked up again each time. This finds a parameter that either side has replaced.
    - **a probe**: fixed tokens, scored by the trainer and by the engine. This finds a layer that computes with other
      rows than its name says, or with a copy that it made of its weights.

    When the weights have just moved, a copy would still have the same values. So the probe is scored a second time
    with the highest bit of every mantissa flipped, which is undone bit for bit.
    """

    def __init__(self, engine: "BaseEngine", rollout: "BaseRollout") -> None:
        """Move the trainer's weights into the engine.

        Raises: WrongInput naming what cannot be shared; WeightSyncError if the engine computes with other weights.
        """
        self._engine = engine
        self._rollout = rollout
        try:
            self._dtype, places = self._memory_of_the_engine()
        except WrongInput as error:
            raise WrongInput(f"{KEY}=true: {error}; write false") from error
        self._probe = probe_tokens(engine.model_config.hf_config, rollout.config.context_length)
        rollout.begin_shared_update()
        if not rollout.is_idle:
            raise WeightSyncError("weights cannot move while the rollout engine has requests")
        engine.move_weights(places)
        if get_device_name() == "cpu":
            return_freed_host_memory()
        self.check_places()
        self.check_probe()
        with flipped(places.values()):
            self.check_probe()
        rollout.begin_shared_update()

    def _memory_of_the_engine(self) -> tuple[torch.dtype, dict[str, Tensor]]:
        """Return the dtype of the weights, and the place of each in the engine.

        Raises: WrongInput naming what cannot be shared.
        """
        if torch.distributed.is_initialized() and (workers := torch.distributed.get_world_size()) > 1:
            raise WrongInput(f"each of {workers} workers holds a part of the model")
        tensors = self._engine.resident_weights()
        places = self._rollout.weight_places(tensors.keys())
        for name, tensor in tensors.items():
            _check_form(name, tensor, places[name])
        return _common_dtype(tensors), places

    def sync(self, step: int | None) -> dict[str, float]:
        """Check that trainer and engine compute with the same weights, and return the metrics of the sync.

        Raises: WeightSyncError naming the tensor, or the log-probability, that differs; the engine then rejects
            requests.
        """
        started = time.perf_counter()
        version = self._engine.weights_version
        with (
            replacing_errors(lambda error: WeightSyncError(f"weight sync failed: {error}")),
            on_failure(lambda error: self._rollout.abort_update()),
        ):
            self._rollout.begin_shared_update()
            shared = self.check_places()
            fault_point("weight_sync", rank=envs.integer("RANK", 0), step=step)
            # Before the probe, because requests that are under way take part in its steps.
            self._rollout.finish_shared_update(version)
            gap = self.check_probe()
        moved = dict.fromkeys(("bytes", "tensors", "buckets", "peak_bytes", "unverified_tensors"), 0.0)
        return moved | {
            "shared_tensors": float(shared),
            "probe_gap": gap,
            "version": float(version),
            "seconds": time.perf_counter() - started,
        }

    def check_places(self) -> int:
        """Return the number of shared tensors. Raises: WeightSyncError naming tensors that are not shared."""
        tensors = self._engine.resident_weights()
        places = self._rollout.weight_places(tensors.keys())
        wrong = [f"{name} ({difference})" for name in tensors if (difference := _apart(tensors[name], places[name]))]
        if wrong:
            shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
            raise WeightSyncError(
                f"{len(wrong)} of {len(tensors)} tensors of trainer and rollout engine are not the same memory: {shown}"
            )
        return len(tensors)

    def check_probe(self) -> float:
        """Return the largest difference of a log-probability of the probe.

        Raises: WeightSyncError if it is too large.
        """
        with self._engine.eval_mode():
            scored = self._engine.infer_batch(self._probe, PassSpec())
        self._engine.take_segments()  # the segments of the probe belong to no task
        self._engine.take_images()
        trained = scored["log_probs"].double()
        prompts = tensors_of(self._probe)["input_ids"].tolist()
        held = torch.tensor(self._rollout.prompt_log_probs(prompts), dtype=torch.float64)
        if not trained.isfinite().all():
            raise WeightSyncError("the trainer gives the probe log-probabilities that are not finite: it diverged")
        gaps = (trained - held).abs().nan_to_num(nan=torch.inf)
        gap = float(gaps.max())
        limit = TOLERANCES[self._dtype]
        if (gaps > limit * (trained.abs() / USUAL_SIZE).clamp(min=1.0)).any():
            raise WeightSyncError(
                f"trainer and rollout engine give a log-probability of the probe that differs by {gap:.2g}, more than "
                f"{limit:g}: the engine computes with other weights than its parameters hold; write {KEY}=false"
            )
        return gap


def probe_tokens(hf_config: Any, context_length: int) -> DataProto:
    """Return rows (2, 8) of fixed tokens that stand for no image; all but the first of a row are its response."""
    text = hf_config.get_text_config()
    nodes = (hf_config.to_dict(), text.to_dict())
    special = {
        token
        for node in nodes
        for name, value in node.items()
        if name.endswith(("_token_id", "_token_index"))
        for token in (value if isinstance(value, Sequence) else (value,))
        if isinstance(token, int)
    }
    width = min(PROBE_TOKENS, context_length - 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(text.vocab_size, (8 * PROBE_ROWS * width + len(special),), generator=generator).tolist()
    plain = [token for token in drawn if token not in special] or [0]
    ids = torch.tensor((plain * PROBE_ROWS * width)[: PROBE_ROWS * width]).view(PROBE_ROWS, width)
    ones = torch.ones_like(ids)
    positions = torch.arange(width).expand(PROBE_ROWS, width).clone()
    rows = {"input_ids": ids, "attention_mask": ones, "position_ids": positions, "responses": ids[:, 1:].clone()}
    return DataProto.from_dict(tensors=rows)


@contextmanager
def flipped(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Flip the highest bit of every mantissa in place, and flip it back on exit, also after an error."""
    held = list(tensors)
    _flip(held)
    try:
        yield
    finally:
        _flip(held)


@torch.no_grad()
def _flip(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.view(_INTEGER[tensor.itemsize]).bitwise_xor_(_FLIPPED[tensor.dtype])


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    found = {tensor.dtype for tensor in tensors.values()}
    dtype = next(iter(found))
    if len(found) > 1 or dtype not in TOLERANCES:
        raise WrongInput(f"the trainer's weights have the dtypes {sorted(map(str, found))}, not one float")
    return dtype


def _check_form(name: str, tensor: Tensor, place: Tensor) -> None:
    """Raise WrongInput unless a tensor fits its place in the engine."""
    for what in ("shape", "dtype", "device"):
        here = getattr(tensor, what)
        there = getattr(place, what)
        if here != there:
            raise WrongInput(f"{name} has {what} {here} in the trainer and {there} in the rollout engine")
    if not place.is_contiguous() or place.is_inference():
        raise WrongInput(f"the rollout engine holds {name} in memory that cannot be trained in place")


def _apart(tensor: Tensor, place: Tensor) -> str:
    """Return the differences between two views; empty if they are the same memory."""
    if (tensor.shape, tensor.dtype, tensor.device) != (place.shape, place.dtype, place.device):
        return f"{tuple(tensor.shape)} {tensor.dtype} there, {tuple(place.shape)} {place.dtype} in the engine"
    if tensor.untyped_storage().data_ptr() != place.untyped_storage().data_ptr():
        return "another storage"
    if (tensor.storage_offset(), tensor.stride()) != (place.storage_offset(), place.stride()):
        return f"elements from {tensor.storage_offset()} there, from {place.storage_offset()} in the engine"
    return ""
