"""The contract of a generation engine that produces responses for the actor."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.workers.rollout.batch import LogProbs, build_output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.protocol import DataProto
    from verl.workers.config import HFModelConfig, RolloutConfig

Bucket = list[tuple[str, Tensor]]

NO_WEIGHTS = -1
"""The weight version of an engine that holds no weights of the trainer."""


class BaseRollout(ABC):
    """A generation engine that shares its process with the trainer.

    Weights arrive by ``begin_update``, one ``load`` per bucket and ``finish_update``. An update that fails half way
    leaves a mixture of old and new weights, so ``abort_update`` makes the engine reject requests until a whole update
    has succeeded.

    An engine in this process has nothing to wait for, so the work of ``resume`` and ``release`` is in
    ``resume_memory`` and ``release_memory``. The asynchronous forms are for callers that also drive servers.
    """

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None"
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh
        self.last_generation: dict[str, float] = {}
        self._version = NO_WEIGHTS
        self._usable = config.load_format != "dummy"

    @abstractmethod
    def generate_sequences(self, prompts: "DataProto") -> "DataProto":
        """Generate a response for each prompt.

        Args: ``input_ids``, ``attention_mask``, ``position_ids`` (B, P), left-padded; ``sampling_seed`` (B,) int64;
        non-tensor ``raw_prompt_ids``; meta ``eos_token_id``, ``pad_token_id``, ``do_sample``, ``validate``.
        Returns: ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``, ``position_ids`` (B, L),
        ``response_mask`` (B, R) and, with ``calculate_log_probs``, ``rollout_log_probs`` (B, R) float32.
        """

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError(
                "the rollout engine holds no usable weights: the last update failed, or none has been finished yet"
            )

    def _finished(
        self, prompts: "DataProto", responses: list[list[int]], log_probs: LogProbs, seconds: float, truncated: int
    ) -> "DataProto":
        """Describe a generation, and return its output as a batch."""
        tokens = sum(map(len, responses))
        self.last_generation = {"seconds": seconds, "tokens": float(tokens), "truncated": float(truncated)}
        output = build_output(
            prompts, responses, log_probs, self.config.response_length, prompts.meta_info["pad_token_id"]
        )
        output.meta_info["timing"] = {"generate_sequences": seconds}
        return output

    def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again; an engine that keeps its memory does nothing."""
        return

    def release_memory(self, tags: list[str] | None = None) -> None:
        """Free the memory of the named tags, or all of it; an engine that keeps its memory does nothing."""
        return

    async def resume(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again."""
        self.resume_memory(tags)

    async def release(self, tags: list[str] | None = None) -> None:
        """Free the memory of the named tags, or all of it."""
        self.release_memory(tags)

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

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int | None = None, **unused: Any
    ) -> None:
        """Load a whole stream as one update, without buckets."""
        self.begin_update()
        try:
            for pair in weights:
                self.load([pair])
        except BaseException:
            self.abort_update()
            raise
        self.finish_update(self.weights_version + 1 if version is None else version)


_ROLLOUTS: dict[tuple[str, str], str] = {
    ("vllm", "sync"): "verl.workers.rollout.vllm_rollout.vLLMRollout",
    ("hf", "sync"): "verl.workers.rollout.hf_rollout.HFRollout",
}


class UnknownRolloutError(ValueError, AssertionError):
    """There is no rollout class for a name and mode."""


def get_rollout_class(rollout_name: str, mode: str = "sync") -> type[BaseRollout]:
    """Import the rollout class of a name and mode.

    Raises: ValueError, which is also an AssertionError, for an unknown name or mode.
    """
    if (rollout_name, mode) not in _ROLLOUTS:
        raise UnknownRolloutError(
            f"actor_rollout_ref.rollout.name={rollout_name!r} with mode={mode!r} does not exist: choose one of "
            f"{sorted(_ROLLOUTS)}"
        )
    module, _, name = _ROLLOUTS[rollout_name, mode].rpartition(".")
    return getattr(importlib.import_module(module), name)
