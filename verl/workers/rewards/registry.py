"""Reward managers by the name that ``reward_model.reward_manager`` holds."""

from collections.abc import Callable
from typing import TypeVar

from verl.workers.rewards.abstract import AbstractRewardManager

Manager = TypeVar("Manager", bound=type[AbstractRewardManager])

REWARD_MANAGER_REGISTRY: dict[str, type[AbstractRewardManager]] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    """Enter the decorated class under ``name``.

    Raises: ValueError when another class has that name.
    """

    def enter(cls: Manager) -> Manager:
        known = REWARD_MANAGER_REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"reward manager {name!r} is already {known.__module__}.{known.__qualname__}")
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return enter


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """Return the class of that name.

    Raises: ValueError when there is none.
    """
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"reward_model.reward_manager={name!r} is not one of {sorted(REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]
