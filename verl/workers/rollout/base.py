"""The contract of generation engines, and the shared steps from a batch of prompts to a batch of responses."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.failures import on_failure
from verl.utils.numerics.seeding import RequestSeeds
from verl.utils.torch_functional import remove_pad_token
from verl.utils.vision.positions import continued
from verl.workers.config.engines import EngineFacts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.workers.config import HFModelConfig, RolloutConfig

Bucket = list[tuple[str, Tensor]]
LogProbs = Sequence[Sequence[float]] | None
"""The log-probabilities of the tokens of each response, if they were asked for."""

DROPPED_KEYS = ("raw_prompt_ids", "multi_modal_data", "multi_modal_inputs")
"""Non-tensors that only generation reads; the driver keeps those that training needs."""

DROPPED_COLUMN = "__dropped__"
"""The column that marks rows that only fill the batch, because every attempt at their trajectory failed."""

BEHIND_COLUMN = "versions_behind"
"""The column with the age of the weights that sampled a row, in versions behind the trainer."""

STAYS_AWAKE = "stays_awake"
"""Meta of a batch of prompts: the next call on the devices is another generation, with the same weights."""

NO_WEIGHTS = -1
"""The weight version of an engine that holds no weights of the trainer."""


class BaseRollout(ABC):
    """A generation engine on the trainer's devices.

    Weights arrive by ``begin_update``, one ``load`` per bucket and ``finish_update``. An update that fails half way
    leaves a mixture of old and new weights, so ``abort_update`` makes the engine reject requests until a whole update
    has succeeded.

    ``rollout.name`` may be the dotted name of a subclass anywhere. Its constructor takes the arguments of this one.

    Attributes: ``facts`` tells the checks what the engine can do. ``unverified`` counts the tensors of the last update
        that the engine could not read back by itself.
    """

    facts: ClassVar[EngineFacts] = EngineFacts()

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None"
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh
        self.seeds = RequestSeeds(config.seed)
        self.last_generation: dict[str, float] = {}
        self.unverified = 0
        self._version = NO_WEIGHTS
        self._usable = config.load_format != "dummy"

    @classmethod
    def import_engine(cls, config: "RolloutConfig") -> None:
        """Import the engine's package into this process; otherwise the constructor does."""
        return

    @classmethod
    def begin(cls, config: "RolloutConfig", model_config: "HFModelConfig") -> Self:
        """Return a rollout whose engine may still be starting: call ``wait_until_started`` before anything else."""
        return cls(config, model_config, None)

    @classmethod
    def starts_apart(cls) -> bool:
        """Whether the engine can start while this process builds the trainer's model."""
        return False

    def wait_until_started(self) -> None:
        """Wait for an engine that ``begin`` has left starting."""
        return

    @abstractmethod
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt.

        Args: ``input_ids``, ``attention_mask``, ``position_ids`` (B, P), left-padded; optional ``sampling_seed`` (B,)
        int64; non-tensor ``raw_prompt_ids``; meta ``eos_token_id``, ``pad_token_id``, ``do_sample``, ``validate``.
        Returns: ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``, ``position_ids`` (B, L),
        ``response_mask`` (B, R) and, with ``calculate_log_probs``, ``rollout_log_probs`` (B, R) float32.
        """

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError(
                "the rollout engine holds no usable weights: the last update failed, or none has been finished yet"
            )

    def _sampling_seeds(self, prompts: DataProto) -> list[int] | None:
        """Return the seed of each row, from ``self.seeds`` if the caller has sent none.

        None under greedy sampling, which needs no seed.
        """
        if is_greedy(prompts, self.config):
            return None
        batch = tensors_of(prompts)
        if "sampling_seed" in batch.keys():
            return batch["sampling_seed"].tolist()
        meta = prompts.meta_info
        return self.seeds.draw(len(prompts), meta.get("global_steps"), bool(meta.get("validate", False))).tolist()

    def _end_tokens(self, prompts: DataProto) -> list[int]:
        """Return the tokens that end a response."""
        return [] if self.config.ignore_eos else eos_token_ids(prompts.meta_info.get("eos_token_id"))

    def _finished(
        self, prompts: DataProto, responses: list[list[int]], log_probs: LogProbs, seconds: float, truncated: int
    ) -> DataProto:
        """Describe a generation, and return the prompts (B, P) and responses (B, R) as training reads them.

        ``response_mask`` is 1 on exactly the sampled tokens, including an end-of-sequence token. It follows the number
        of tokens, not their values. ``rollout_log_probs`` is 0 outside the mask.
        """
        tokens = float(sum(map(len, responses)))
        self.last_generation = {"seconds": seconds, "tokens": tokens, "truncated": float(truncated)}
        batch = tensors_of(prompts)
        asked = PaddedPrompts(batch["input_ids"], batch["attention_mask"], batch["position_ids"])
        pad = prompts.meta_info["pad_token_id"]
        tensors = asked.with_responses(responses, self.config.response_length, pad, log_probs=log_probs)
        carried = {key: value for key, value in prompts.non_tensor_batch.items() if key not in DROPPED_KEYS}
        output = DataProto.from_dict(tensors=tensors, non_tensors=carried)
        output.meta_info["timing"] = {"generate_sequences": seconds}
        output.meta_info |= log_prob_temperature(prompts, self.config)
        return output

    async def resume(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again; an engine that keeps its memory does nothing."""
        return

    async def release(self, tags: list[str] | None = None) -> None:
        """Free the memory of the named tags, or all of it; an engine that keeps its memory does nothing."""
        return

    def begin_update(self) -> None:
        """Start a change of all weights; the engine rejects requests until the change is finished."""
        self._drop_weights()

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Load the next (checkpoint name, full tensor) pairs; the caller may reuse the tensors afterwards.

        The engine may remove pairs from the list, which frees their memory before it loads the others.
        """

    @property
    def pending_bytes(self) -> int:
        """Bytes of loaded tensors that the engine keeps until the rest of their layer arrives."""
        return 0

    def finish_update(self, version: int) -> None:
        """Complete the change, drop cached prefixes and record the version.

        Raises: RuntimeError if a tensor of the model is missing.
        """
        self._version = version
        self._usable = True

    def abort_update(self) -> None:
        """Abort the change; the engine holds no usable weights afterwards."""
        self._drop_weights()

    def _drop_weights(self) -> None:
        self._version = NO_WEIGHTS
        self._usable = False

    @property
    def weights_version(self) -> int:
        """Version of the last finished update; -1 before the first one and after the weights were dropped."""
        return self._version

    @abstractmethod
    def weights_checksum(self) -> dict[str, int]:
        """Read the weights back from the engine: name -> checksum of the part on this rank.

        Sender and receiver may share memory, so a checksum of the sent tensors alone would prove nothing.
        """

    @abstractmethod
    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the entry that ``weights_checksum`` must have for a full checkpoint tensor: name and 0-dim checksum.

        None if the engine does not know where it holds the tensor. The argument ``name`` is the name in the checkpoint.
        """

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the engine's parameter that takes a tensor of the checkpoint by a plain copy.

        fp32, bf16 or fp16; None if the engine computes its values from the tensor, or does not know where it goes.
        """
        return None

    # ---- weights in the memory of the trainer

    def weight_places(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return views of the engine's present memory for each tensor of a checkpoint, by name.

        Raises: WrongInput if the engine lacks a named tensor, has a tensor that is not named, or holds one in another
            form.
        """
        raise self._apart()

    def begin_shared_update(self) -> None:
        """Stop generation: the trainer has changed the weights in place."""
        self._drop_weights()

    def finish_shared_update(self, version: int) -> None:
        """Drop cached results of older weights, and record the version."""
        BaseRollout.finish_update(self, version)

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token of the prompts but their first, at temperature 1.

        The engine computes them even while it rejects requests.
        """
        raise self._apart()

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request."""
        return True

    def _apart(self) -> WrongInput:
        return WrongInput(f"{type(self).__name__} cannot share weights")

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int | None = None, **unused: Any
    ) -> None:
        """Load a whole stream as one update, without buckets."""
        self.begin_update()
        with on_failure(lambda error: self.abort_update()):  # a failed load leaves a mixture of old and new weights
            for pair in weights:
                self.load([pair])
        self.finish_update(self.weights_version + 1 if version is None else version)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of ``random``, numpy, torch and the current accelerator on exit, also after an error."""
    state = BaseCheckpointManager.get_rng_state()
    try:
        yield
    finally:
        BaseCheckpointManager.load_rng_state(state)


# Prompts and responses as lists of tokens


class PaddedPrompts(NamedTuple):
    """Prompts, padded on the left: tokens and attention mask (B, P), positions (B, P) or (B, 3 or 4, P)."""

    tokens: Tensor
    mask: Tensor
    positions: Tensor

    def with_responses(
        self,
        responses: Sequence[Sequence[int]],
        width: int,
        pad_token_id: int,
        sampled: Sequence[Sequence[int]] | None = None,
        log_probs: LogProbs = None,
    ) -> dict[str, Tensor]:
        """Return prompts (B, P) and responses (B, width) as training reads them.

        Args: ``sampled`` is 1 for each token of a response that the model sampled, else 0; None: all were sampled.
        Returns: ``prompts``, ``responses``, ``input_ids``, ``attention_mask``, ``position_ids``, ``response_mask``, and
            ``rollout_log_probs`` if given, which are 0 outside the mask.
        """
        lengths = torch.tensor([len(row) for row in responses])
        attended = (torch.arange(width) < lengths[:, None]).to(self.mask.dtype)
        tokens = torch.from_numpy(pad_rows(responses, width, pad_token_id, np.int64))
        mask = attended
        if sampled is not None:
            mask = torch.from_numpy(pad_rows(sampled, width, 0, np.int64)).to(self.mask.dtype)
        tensors = {
            "prompts": self.tokens,
            "responses": tokens,
            "input_ids": torch.cat([self.tokens, tokens], dim=1),
            "attention_mask": torch.cat([self.mask, attended], dim=1),
            "position_ids": torch.cat([self.positions, continued(self.positions, width)], dim=-1),
            "response_mask": mask,
        }
        if log_probs is not None:
            padded = torch.from_numpy(pad_rows(log_probs, width, 0.0, np.float32))
            tensors["rollout_log_probs"] = torch.where(mask.bool(), padded, 0.0)
        return tensors


def prompt_token_ids(prompts: DataProto) -> list[list[int]]:
    """Return the token ids of each prompt without padding: ``raw_prompt_ids`` if present, else by the mask.

    Raises: ValueError naming the row of an empty prompt.
    """
    raw = prompts.non_tensor_batch.get("raw_prompt_ids")
    if raw is not None:
        rows = [ids.tolist() if isinstance(ids, np.ndarray | Tensor) else list(ids) for ids in raw]
    else:
        rows = padded_token_ids(prompts)
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompts[{index}] is empty: every prompt needs at least one token")
    return rows


def padded_token_ids(prompts: DataProto) -> list[list[int]]:
    """Return the token ids of each prompt in the training batch, without padding."""
    batch = tensors_of(prompts)
    return remove_pad_token(batch["input_ids"], batch["attention_mask"])


def check_prompt_lengths(token_ids: Sequence[Sequence[int]], attention_mask: Tensor, room: int) -> None:
    """Raise ValueError naming the first prompt that is longer than ``room``, the tokens left for it in the context.

    Args:
        token_ids: tokens of each prompt, one for an image.
        attention_mask: (B, P) of the padded prompts, whose images have all of their tokens.
    """
    lengths = attention_mask.sum(dim=1).tolist()
    for row, (ids, padded) in enumerate(zip(token_ids, lengths, strict=True)):
        length = max(len(ids), padded)
        if length > room:
            raise WrongInput(
                f"prompts[{row}] has {length} tokens; the engine's context leaves {room}: lower "
                "data.max_prompt_length or raise actor_rollout_ref.rollout.max_model_len"
            )


def is_greedy(prompts: DataProto, config: "RolloutConfig") -> bool:
    """Whether to take the most likely tokens; ``do_sample`` of the batch overrides the config."""
    return not prompts.meta_info.get("do_sample", config.do_sample)


def sampling_values(prompts: DataProto, config: "RolloutConfig") -> dict[str, float]:
    """Return the sampling parameters of a batch; see ``sampling_of``."""
    return sampling_of(config, is_greedy(prompts, config), bool(prompts.meta_info.get("validate", False)))


def sampling_of(config: "RolloutConfig", greedy: bool, validate: bool = False) -> dict[str, float]:
    """Return ``temperature``, ``top_p``, ``top_k`` and ``repetition_penalty`` of each request of a run.

    Greedy overrides validation (``rollout.val_kwargs``), which overrides training (``rollout``). The penalty of the
    run holds for all three: it also changes which token is the most likely one.
    """
    values: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    if not greedy:
        source = config.val_kwargs if validate else config
        values = {name: getattr(source, name) for name in values}
    return values | {"repetition_penalty": config.repetition_penalty}


def log_prob_temperature(prompts: DataProto, config: "RolloutConfig") -> dict[str, float]:
    """Return the ``meta_info`` of sampled log-probabilities: their temperature, under which training computes its own.

    Empty if there are none to compare. ``DataProto.union`` refuses a batch whose parts have several temperatures.
    """
    sampled = config.calculate_log_probs and not is_greedy(prompts, config)
    return {"temperature": sampling_values(prompts, config)["temperature"]} if sampled else {}


def eos_token_ids(value: int | Sequence[int] | None) -> list[int]:
    """Return the end-of-sequence tokens as a list."""
    if value is None:
        return []
    return [int(value)] if isinstance(value, int | np.integer) else [int(token) for token in value]


def pad_rows(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type[np.number]) -> np.ndarray:
    """Stack rows of at most ``width`` items into (len(rows), width), padded on the right with ``fill``."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    out = np.full((len(rows), width), fill, dtype=dtype)
    flat = np.fromiter((item for row in rows for item in row), dtype=dtype, count=int(lengths.sum()))
    out[np.arange(width) < lengths[:, None]] = flat
    return out
