"""The generation engines that ``rollout.name`` can name, with the facts known before their import."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import NamedTuple

from verl.base_config import Violation
from verl.workers.config.engine import DEVICES

_MANAGERS = "verl.workers.sharding_manager"
_ENGINES = "verl.workers.rollout"


class EngineFacts(NamedTuple):
    """The abilities of a generation engine: the attribute ``facts`` of its rollout class."""

    modes: tuple[str, ...] = ("sync",)
    """Values of ``rollout.mode``; ``async`` needs ``replica``, and a class with the methods of ``vLLMAsyncRollout``."""
    devices: tuple[str, ...] = DEVICES
    """Values of ``trainer.device``."""
    spans_workers: bool = False
    """Whether several workers may hold one engine (``tensor_model_parallel_size``); else each has one."""
    loads_checkpoints: bool = False
    """Whether the engine can start with the weights of ``model.path``; else it waits for those of a trainer."""
    shares_weights: bool = False
    """Whether the engine can compute with the tensors of the trainer (``rollout.share_weights``)."""
    replica: str | None = None
    """Dotted name of the ``RolloutReplica`` that answers single requests."""
    sharding_managers: Mapping[str, str] = {}
    """``fsdp`` or ``megatron`` -> dotted name of the sharding manager; without one ``HybridShardingManager``."""


ENGINES = {
    "vllm": EngineFacts(
        modes=("sync", "async"),
        spans_workers=True,
        loads_checkpoints=True,
        shares_weights=True,
        replica=f"{_ENGINES}.vllm_rollout.vllm_async_server.vLLMReplica",
        sharding_managers={
            "fsdp": f"{_MANAGERS}.FSDPVLLMShardingManager",
            "megatron": f"{_MANAGERS}.MegatronVLLMShardingManager",
        },
    ),
    "sglang": EngineFacts(
        modes=("sync", "async"),
        spans_workers=True,
        loads_checkpoints=True,
        replica=f"{_ENGINES}.sglang_rollout.sglang_server.SGLangReplica",
        sharding_managers={
            "fsdp": f"{_MANAGERS}.FSDPSGLangShardingManager",
            "megatron": f"{_MANAGERS}.MegatronSGLangShardingManager",
        },
    ),
    "hf": EngineFacts(loads_checkpoints=True),
}
ROLLOUTS = tuple(ENGINES)
SERVED_ROLLOUTS = tuple(name for name, facts in ENGINES.items() if "async" in facts.modes)
"""verl's own engines that answer single requests."""
ENTRY_POINTS = "verl.rollouts"
"""The group in which an installed package declares its engines."""
NAMES = f"{', '.join(ROLLOUTS)}, a class as package.module.Class, or an entry point {ENTRY_POINTS} of a package"


@cache
def class_outside(name: str) -> str | None:
    """Return the dotted class name of a user's engine; None for verl's engines, and for any other text."""
    if name in ENGINES:
        return None
    for declared in entry_points(group=ENTRY_POINTS, name=name):
        return declared.value.replace(":", ".")
    parts = name.split(".")
    return name if len(parts) > 1 and all(part.isidentifier() for part in parts) else None


def arguments_key(name: str) -> str:
    """Return the key below ``rollout.engine_kwargs`` for the arguments of an engine: the last part of its name."""
    return name.rpartition(".")[2]


def media_engine(name: str | None) -> str:
    """Return the engine whose arguments for images and videos the data set follows."""
    return "sglang" if name == "sglang" else "vllm"


class Demand(NamedTuple):
    """The demands of a run on its generation engine; ``node`` is the prefix of their keys."""

    node: str
    mode: str
    device: str
    num_workers: int
    load_format: str
    share_weights: bool

    def refused_by(self, engine: str, facts: EngineFacts) -> Iterator[Violation]:
        """Yield the demands that the class ``engine`` with these facts does not meet."""
        if self.mode not in facts.modes or (self.mode == "async" and facts.replica is None):
            instead = ", ".join(mode for mode in facts.modes if mode != self.mode) or "the name of another engine"
            yield Violation(f"{self.node}.mode", self.mode, f"is not supported by {engine}: write {instead}")
        if self.device not in facts.devices:
            expected = f"is not supported by {engine}: write {' or '.join(facts.devices)}"
            yield Violation("trainer.device", self.device, expected)
        if self.num_workers > 1 and not facts.spans_workers:
            expected = f"x data_parallel_size must be 1, since each worker has an engine of {engine}: write 1"
            yield Violation(f"{self.node}.tensor_model_parallel_size", self.num_workers, expected)
        if self.load_format != "dummy" and not facts.loads_checkpoints:
            expected = f"is not supported by {engine}, which gets its weights from a trainer: write dummy; without a "
            expected += "trainer write another name"
            yield Violation(f"{self.node}.load_format", self.load_format, expected)
        if self.share_weights and not facts.shares_weights:
            yield Violation(f"{self.node}.share_weights", True, f"is not supported by {engine}: write false")
