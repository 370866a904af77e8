"""The rollout: what every generation engine does for the actor."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.protocol import DataProto
    from verl.workers.config import HFModelConfig, RolloutConfig

Bucket = list[tuple[str, Tensor]]

NO_WEIGHTS = -1
"""The version of an engine that holds no weights of the trainer."""


class BaseRollout(ABC):
    """A generation engine that shares its process with the trainer.

    The weights arrive by ``begin_update``, one ``load`` per bucket, ``finish_update``; ``abort_update`` leaves an
    engine that refuses to generate until a whole update has succeeded.
    """

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None"
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh
        self.last_generation: dict[str, float] = {}

    @abstractmethod
    def generate_sequences(self, prompts: "DataProto") -> "DataProto":
        """Continue every prompt.

        Args: ``input_ids``, ``attention_mask``, ``position_ids`` (B, P), left-padded; ``sampling_seed`` (B,) int64;
        non-tensor ``raw_prompt_ids``; meta ``eos_token_id``, ``pad_token_id``, ``do_sample``, ``validate``.
        Returns: ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``, ``position_ids`` (B, L),
        ``response_mask`` (B, R) and, by ``calculate_log_probs``, ``rollout_log_probs`` (B, R) float32.
        """

    @abstractmethod
    async def resume(self, tags: list[str]) -> None:
        """Take back the memory of ``weights`` or ``kv_cache``."""

    @abstractmethod
    async def release(self, tags: list[str] | None = None) -> None:
        """Give up the memory of the named tags, or all."""

    @abstractmethod
    def begin_update(self) -> None:
        """Start a change of all weights; generation is refused until it is finished."""

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Take the next (checkpoint name, full tensor) pairs; the tensors may be reused when this returns.

        Pairs may be taken out of the list, so that their memory is free before the others are loaded.
        """

    @property
    def pending_bytes(self) -> int:
        """Bytes that the engine holds back of what it was given, until the rest of a layer comes."""
        return 0

    @abstractmethod
    def finish_update(self, version: int) -> None:
        """Complete the change, drop cached prefixes and record the version.

        Raises: RuntimeError when the tensors were not the whole set.
        """

    @abstractmethod
    def abort_update(self) -> None:
        """Give the change up; the engine holds no usable weights afterwards."""

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Version of the last finished update; -1 before the first."""

    @abstractmethod
    def weights_checksum(self) -> dict[str, int]:
        """Read the weights back from the engine: name -> checksum of the part that this rank's engine holds."""

    @abstractmethod
    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the name in ``weights_checksum``, and the 0-dim value due there, of a full checkpoint tensor.

        None where the engine cannot tell. ``name`` is the checkpoint's.
        """

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], **kwargs: Any) -> None:
        """Load a whole stream as one update; for callers that do not bucket."""
        self.begin_update()
        try:
            for pair in weights:
                self.load([pair])
        except BaseException:
            self.abort_update()
            raise
        self.finish_update(kwargs.get("version", self.weights_version + 1))


_ROLLOUTS: dict[tuple[str, str], str] = {
    ("vllm", "sync"): "verl.workers.rollout.vllm_rollout.vLLMRollout",
    ("hf", "sync"): "verl.workers.rollout.hf_rollout.HFRollout",
}


class UnknownRolloutError(ValueError, AssertionError):
    """No rollout class is known by the name and mode that were asked for."""


def get_rollout_class(rollout_name: str, mode: str = "sync") -> type[BaseRollout]:
    """Import the rollout class of a name and mode.

    Raises: ValueError, which is also an AssertionError, when there is none.
    """
    if (rollout_name, mode) not in _ROLLOUTS:
        raise UnknownRolloutError(
            f"actor_rollout_ref.rollout.name={rollout_name!r} with mode={mode!r} is not built; choose of "
            f"{sorted(_ROLLOUTS)}"
        )
    module, _, name = _ROLLOUTS[rollout_name, mode].rpartition(".")
    cls: type[BaseRollout] = getattr(importlib.import_module(module), name)
    return cls
