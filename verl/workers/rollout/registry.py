"""The rollout classes by ``rollout.name`` and ``rollout.mode``, and the classes of replicas by ``rollout.name``."""

import inspect
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from verl.errors import WrongSetting
from verl.workers.config.engines import NAMES, EngineFacts, class_outside
from verl.workers.rollout.base import BaseRollout

if TYPE_CHECKING:
    from verl.workers.rollout.server_replica import RolloutReplica

ROLLOUT_CLASSES: dict[tuple[str, str], str] = {
    ("vllm", "sync"): "verl.workers.rollout.vllm_rollout.vLLMRollout",
    ("vllm", "async"): "verl.workers.rollout.vllm_rollout.vLLMAsyncRollout",
    ("sglang", "sync"): "verl.workers.rollout.sglang_rollout.SGLangRollout",
    ("sglang", "async"): "verl.workers.rollout.sglang_rollout.SGLangRollout",
    ("hf", "sync"): "verl.workers.rollout.hf_rollout.HFRollout",
}

REPLICA_CLASSES = {
    "vllm": "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMReplica",
    "sglang": "verl.workers.rollout.sglang_rollout.sglang_server.SGLangReplica",
}
"""The classes of the servers of verl's engines. A user's engine names its class in ``facts.replica``."""


def get_rollout_class(rollout_name: str, mode: str = "sync") -> type[BaseRollout]:
    """Import the rollout class of a name and mode.

    Raises: ValueError, which is also an AssertionError, for an unknown name or mode, and for a class that is no engine.
    """
    outside = class_outside(rollout_name)
    if outside is None and (rollout_name, mode) not in ROLLOUT_CLASSES:
        raise WrongSetting(
            f"actor_rollout_ref.rollout.name={rollout_name!r} with mode={mode!r} does not exist: write one of {NAMES}, "
            f"with a mode that it has: {sorted(ROLLOUT_CLASSES)}"
        )
    found: type[BaseRollout] = resolve_name(outside or ROLLOUT_CLASSES[rollout_name, mode])
    problem = class_problem(found)
    if problem is not None:
        raise WrongSetting(f"actor_rollout_ref.rollout.name={rollout_name}: {problem}")
    return found


def class_problem(found: object) -> str | None:
    """Return why an object cannot be the class of a generation engine; None if it can."""
    if not (isinstance(found, type) and issubclass(found, BaseRollout)):
        return "is no rollout engine: derive the class from verl.workers.rollout.BaseRollout"
    if inspect.isabstract(found):
        return (
            f"lacks {', '.join(sorted(found.__abstractmethods__))}: define them, see verl.workers.rollout.BaseRollout"
        )
    if not isinstance(found.facts, EngineFacts):
        return f"has facts={found.facts!r}: write EngineFacts(...) of verl.workers.config.engines"
    return None


class RolloutReplicaRegistry:
    """The classes of replicas by engine: those of ``REPLICA_CLASSES``, and registered ones."""

    _loaders: "dict[str, Callable[[], type[RolloutReplica]]]" = {}

    @classmethod
    def register(cls, name: str, loader: "Callable[[], type[RolloutReplica]]") -> None:
        """Let ``loader`` import the class of an engine; a later one replaces it."""
        cls._loaders[name] = loader

    @classmethod
    def get(cls, name: str) -> "type[RolloutReplica]":
        """Import the class of an engine.

        Raises: ValueError, which is also an AssertionError, for an unknown name.
        """
        if name in cls._loaders:
            return cls._loaders[name]()
        dotted = REPLICA_CLASSES.get(name)
        if class_outside(name) is not None:
            dotted = get_rollout_class(name, "async").facts.replica
        if dotted is None:
            raise WrongSetting(
                f"actor_rollout_ref.rollout.name={name!r} has no servers: write one of {cls.names()}, or "
                "rollout.mode=sync"
            )
        found: type[RolloutReplica] = resolve_name(dotted)
        return found

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names of the engines that can serve."""
        return sorted({*REPLICA_CLASSES, *cls._loaders})


def get_rollout_replica_class(rollout: str) -> "type[RolloutReplica]":
    """Return the class of replicas of an engine; see ``RolloutReplicaRegistry.get``."""
    return RolloutReplicaRegistry.get(rollout)
