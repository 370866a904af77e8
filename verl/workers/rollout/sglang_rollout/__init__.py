"""The SGLang rollouts; their class is imported at its first use, since the engine's processes do not need it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter as ServerAdapter
    from verl.workers.rollout.sglang_rollout.sglang_rollout import SGLangRollout as SGLangRollout


def __getattr__(name: str) -> Any:
    if name in ("SGLangRollout", "ServerAdapter"):
        from verl.workers.rollout.sglang_rollout.sglang_rollout import SGLangRollout

        return SGLangRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
