"""The nodes that DAPO adds, dynamic sampling and the overlong buffer: their values, and what they need of others."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.keys import nearest
from verl.trainer.config.refusals import select

BUFFER, KWARGS, GROUPS = "reward_model.overlong_buffer", "reward_model.reward_kwargs", "algorithm.filter_groups"
_BUFFER_KEYS = ("enable", "len", "penalty_factor", "log")
_WITHOUT_BUFFER = ("naive", "batch", "prime")


def dapo_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what is wrong with either node; both may be absent."""
    yield from _buffer_rules(tree, BUFFER, "data.max_response_length")
    if select(tree, "reward_model.reward_manager") == "dapo":
        yield from _buffer_rules(tree, f"{KWARGS}.overlong_buffer_cfg", f"{KWARGS}.max_resp_len")
    groups = select(tree, GROUPS)
    if not isinstance(groups, Mapping) or not groups.get("enable"):
        return
    if groups.get("metric") == "seq_final_reward" and select(tree, "algorithm.use_kl_in_reward"):
        expected = "is the reward after KL, which differs for all responses and would keep every prompt"
        yield Violation(f"{GROUPS}.metric", "seq_final_reward", f"{expected}: write seq_reward")


def _buffer_rules(tree: Mapping[str, Any], node: str, limit_key: str) -> Iterator[Violation]:
    """Yield what is wrong with the overlong buffer at ``node``, for responses of up to ``limit_key`` tokens."""
    buffer = select(tree, node)
    if buffer is None:
        return
    if not isinstance(buffer, Mapping):
        yield Violation(node, buffer, "must be a mapping: set keys below it")
        return
    for key in buffer.keys() - set(_BUFFER_KEYS):
        near = ", ".join(nearest(key, _BUFFER_KEYS)) or ", ".join(_BUFFER_KEYS)
        yield Violation(f"{node}.{key}", buffer[key], f"there is no such key; the nearest in this node: {near}")
    for key in ("enable", "log"):
        if not isinstance(buffer.get(key, False), bool):
            yield Violation(f"{node}.{key}", buffer[key], "must be true or false")
    if buffer.get("enable") is True:
        yield from _size_rules(buffer, node, limit_key, select(tree, limit_key))
        if node == BUFFER:
            yield from _manager_rules(tree)


def _size_rules(buffer: Mapping[str, Any], node: str, limit_key: str, limit: Any) -> Iterator[Violation]:
    length, factor = buffer.get("len"), buffer.get("penalty_factor")
    if limit is None:
        yield Violation(limit_key, limit, "is missing: write ${data.max_response_length}")
    elif not _is_number(length, int) or (_is_number(limit, int) and not 0 < length <= limit):
        yield Violation(f"{node}.len", length, f"must be an integer in [1, {limit_key}={limit}]")
    if not _is_number(factor, int | float) or factor < 0 or (factor == 0 and not buffer.get("log")):
        expected = "must be above 0, the penalty of a response of full length (0 only counts, with log=true)"
        yield Violation(f"{node}.penalty_factor", factor, expected)


def _manager_rules(tree: Mapping[str, Any]) -> Iterator[Violation]:
    manager = select(tree, "reward_model.reward_manager")
    if manager in _WITHOUT_BUFFER:
        expected = f"has no overlong buffer: write dapo, or {BUFFER}.enable=false"
        yield Violation("reward_model.reward_manager", manager, expected)
    given = select(tree, KWARGS) or {}
    for key in ("overlong_buffer_cfg", "max_resp_len"):
        if key in given:
            expected = f"is given by {BUFFER}, which is enabled: write one of the two"
            yield Violation(f"{KWARGS}.{key}", given[key], expected)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
