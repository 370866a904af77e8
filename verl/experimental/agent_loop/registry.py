"""The names of agent loops. This module does not import torch, so that the checks before the start can read them."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from verl.base_config import nearest, one_line
from verl.errors import WrongInput, WrongSetting
from verl.utils.import_utils import absolute_name
from verl.utils.parsing import parse_yaml

if TYPE_CHECKING:
    from verl.experimental.agent_loop.base import AgentLoopBase

Loop = TypeVar("Loop", bound="type[AgentLoopBase]")

ONE_TURN = "single_turn_agent"
"""The loop that reads no tools."""
_PACKAGE = "verl.experimental.agent_loop"
_REGISTRY: dict[str, DictConfig] = {
    # The second name is that of established asynchronous commands: any response may go on under new weights here.
    **dict.fromkeys(
        (ONE_TURN, "partial_single_turn_agent"),
        OmegaConf.create({"_target_": f"{_PACKAGE}.single_turn_agent_loop.SingleTurnAgentLoop"}),
    ),
    "tool_agent": OmegaConf.create({"_target_": f"{_PACKAGE}.tool_agent_loop.ToolAgentLoop"}),
}


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Make a class known under a name, which rows have in ``agent_name``."""

    def decorate(loop: Loop) -> Loop:
        _REGISTRY[agent_name] = OmegaConf.create({"_target_": f"{loop.__module__}.{loop.__qualname__}"})
        return loop

    return decorate


def read_agent_loops(path: str) -> dict[str, DictConfig]:
    """Return the loops of a YAML file, a list of ``{name, _target_, ...}``, by name.

    Raises: WrongInput naming the file and the entry.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = parse_yaml(file.read())
    except (OSError, ValueError) as error:
        raise WrongInput(
            f"{path}: cannot be read as YAML: {one_line(str(error))}: write a file of agent loops"
        ) from error
    wanted = "write a list whose items have name, _target_ (the class) and its further arguments"
    if not isinstance(entries, list):
        raise WrongInput(f"{path}: holds no list: {wanted}")
    loops: dict[str, DictConfig] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise WrongInput(f"{path}, item {number}: has no name or no _target_: {wanted}")
        if entry["name"] in loops:
            raise WrongInput(f"{path}, item {number}: a loop is already named {entry['name']!r}: rename one of them")
        entry["_target_"] = absolute_name(entry["_target_"], os.path.dirname(path))
        loops[entry["name"]] = OmegaConf.create({key: value for key, value in entry.items() if key != "name"})
    return loops


def known_names() -> list[str]:
    """Return the names of the loops of this process."""
    return sorted(_REGISTRY)


def register_all(loops: Mapping[str, DictConfig]) -> None:
    """Make the loops of a file known."""
    _REGISTRY.update(loops)


def check_names(names: Sequence[str]) -> None:
    """Raise WrongSetting for a name that no loop has."""
    for name in dict.fromkeys(names):
        if name not in _REGISTRY:
            raise WrongSetting(
                f"agent_name={name}: Agent loop {name} not registered, registered agent loops: {sorted(_REGISTRY)} "
                f"(the nearest: {', '.join(nearest(name, _REGISTRY)) or 'none'}); name the class of another loop in "
                "actor_rollout_ref.rollout.agent.agent_loop_config_path"
            )


def build_agent_loop(name: str, config: DictConfig, **parts: Any) -> "AgentLoopBase":
    """Return a new instance of a loop; ``parts`` are the other arguments of ``AgentLoopBase``.

    Raises: WrongSetting for a name that no loop has; the error of its constructor.
    """
    import hydra
    from hydra.errors import InstantiationException

    from verl.experimental.agent_loop.base import WholeConfig

    check_names([name])
    node = _REGISTRY[name]
    whole = WholeConfig(config)
    if len(node) == 1:  # a class without arguments of its own, for which Hydra would merge configurations
        alone: AgentLoopBase = _class_at(node["_target_"])(trainer_config=whole, **parts)
        return alone
    try:
        loop: AgentLoopBase = hydra.utils.instantiate(node, trainer_config=whole, **parts)
    except InstantiationException as error:
        raise error.__cause__ or error from None  # Hydra wraps the constructor's error in its own
    return loop


@cache
def _class_at(path: str) -> Any:
    import hydra

    return hydra.utils.get_object(path)
