"""Import the modules that a configuration names in a child process, and check the objects that it names.

The modules may import torch, start threads or end their process, so the launching process imports none of them. As a
command (``python -m verl.trainer.run.user_code``) this is the child: a request in JSON on standard input, the answer on
standard output.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pkgutil import resolve_name
from typing import Any

from verl.base_config import nearest, one_line, problem_list
from verl.errors import WrongInput
from verl.experimental.agent_loop.registry import read_agent_loops
from verl.interactions.utils.interaction_registry import read_interactions_file
from verl.tools.utils.tool_registry import read_tools_file
from verl.trainer.config.invocation import only_checks
from verl.trainer.config.keys import is_under
from verl.trainer.config.rules.files import may_register
from verl.trainer.config.run_config import RayConfig, RunConfig
from verl.trainer.config.validation import REGISTRIES
from verl.utils import envs
from verl.utils.json_types import mapping_at
from verl.utils.process.lifetime import die_with_parent, start_process
from verl.utils.process.time_limit import error_text
from verl.workers.config import PolicyLossConfig
from verl.workers.config.engines import Demand, class_outside
from verl.workers.rewards.signature import class_in_file

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 180.0
"""Seconds that all modules together get; torch alone takes a few."""
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class UserCode:
    """The modules and classes of the user that a configuration names.

    Attributes: ``modules`` by their key, ``classes`` by the place that names them. Each of ``names``, given by their
        key, must be registered by one of the modules or by the library, or be among ``more_names``. ``demands`` holds
        the arguments of the ``Demand`` on each rollout class, by its place.
    """

    modules: dict[str, list[str]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    more_names: dict[str, list[str]] = field(default_factory=dict)
    demands: dict[str, list[Any]] = field(default_factory=dict)


# ---- the launching process


def check_user_code(code: UserCode, cluster: RayConfig) -> None:
    """Import the user code of a configuration in a child process; warn of modules that cannot be imported here.

    Raises: WrongInput naming each name that an imported module does not have, unless the run imports it elsewhere.
    """
    if not code.modules and not code.classes:
        return
    refused, notices = _answer(code)
    elsewhere = _other_place(cluster)
    if elsewhere:
        notices += [f"{line} (here; the run imports it {elsewhere})" for line in refused]
    for line in notices:
        logger.warning("%s", line)
    if refused and not elsewhere:
        raise WrongInput(problem_list(refused))


def code_of(run: RunConfig, broken: Collection[str] = (), of_fork: bool = False) -> UserCode:
    """Return the user code that a run names; a fork may register names elsewhere, and ``broken`` keys are left out."""
    shared = run.actor_rollout_ref
    models: dict[str, Any] = {"actor_rollout_ref.model": shared.model, "critic.model": run.critic and run.critic.model}
    if run.reward_model.enable:
        models["reward_model.model"] = run.reward_model.model
    found = {f"{key}.external_lib": model.get("external_lib") for key, model in models.items() if model}
    found[EXTERNAL] = [name.strip() for name in (envs.read(EXTERNAL) or "").split(",") if name.strip()]
    code = UserCode({key: [libs] if isinstance(libs, str) else [*libs] for key, libs in found.items() if libs})
    rollout = shared.rollout
    if f"{_ROLLOUT}.name" not in broken:
        _add_engine(code, rollout.demand(run.trainer.device), rollout.name)
    if rollout.serves:
        _add_rollout(code, run, broken)
    if code.modules and not of_fork:
        loss = shared.actor.policy_loss
        code.names |= {"algorithm.adv_estimator": run.algorithm.adv_estimator}
        if type(loss) is PolicyLossConfig:  # the class of a recipe's node names its losses
            code.names["actor_rollout_ref.actor.policy_loss.loss_mode"] = loss.loss_mode
        manager = run.reward_model.reward_manager
        if not may_register(run.custom_reward_function.path) and not class_in_file(manager):
            code.names["reward_model.reward_manager"] = run.reward_model.reward_manager
    code.names = {key: name for key, name in code.names.items() if name and key not in broken}
    return code


def check_engine(demand: Demand, name: str, cluster: RayConfig) -> None:
    """Check the class of an engine that is not ours; see ``check_user_code``."""
    code = UserCode()
    _add_engine(code, demand, name)
    check_user_code(code, cluster)


def _add_engine(code: UserCode, demand: Demand, name: str) -> None:
    dotted = class_outside(name)
    if dotted is not None:
        code.classes[f"{demand.node}.name"] = dotted
        code.demands[f"{demand.node}.name"] = [*demand]


def _add_rollout(code: UserCode, run: RunConfig, broken: Collection[str]) -> None:
    """Add the classes of tools, interactions and agent loops, and the names that modules may register."""
    agent = run.actor_rollout_ref.rollout.agent
    turns = run.actor_rollout_ref.rollout.multi_turn
    tools = f"{_ROLLOUT}.multi_turn.tool_config_path"
    users = f"{_ROLLOUT}.multi_turn.interaction_config_path"
    loops = f"{_ROLLOUT}.agent.agent_loop_config_path"
    if turns.tool_config_path and tools not in broken:
        items = read_tools_file(turns.tool_config_path)
        code.classes |= {f"{tools}={item.where}.class_name": item.class_name for item in items}
    if turns.interaction_config_path and users not in broken:
        items = [*read_interactions_file(turns.interaction_config_path).values()]
        code.classes |= {f"{users}={item.where}.class_name": item.class_name for item in items}
    if agent.agent_loop_config_path and loops not in broken:
        path = os.path.expanduser(agent.agent_loop_config_path)
        found = read_agent_loops(path)
        code.more_names[f"{_ROLLOUT}.agent.default_agent_loop"] = [*found]
        code.classes |= {f"{loops}={path}, {name}._target_": str(loop["_target_"]) for name, loop in found.items()}
    if code.modules:
        code.names[f"{_ROLLOUT}.agent.default_agent_loop"] = agent.default_agent_loop
        code.names[f"{_ROLLOUT}.multi_turn.format"] = turns.format


def _other_place(cluster: RayConfig) -> str | None:
    """Return the place where the run imports the modules, if it is another machine or environment."""
    environment = mapping_at(cluster.ray_init or {}, "runtime_env")
    variables = mapping_at(environment, "env_vars")
    if environment.keys() - {"env_vars"} or {"PYTHONPATH", EXTERNAL} & variables.keys():
        return "in ray_kwargs.ray_init.runtime_env"
    return None if cluster.is_local else f"in the cluster at {cluster.address}"


def _answer(code: UserCode) -> tuple[list[str], list[str]]:
    """Return the child's errors and its warnings."""
    writes = ["-B"] if only_checks() else []
    process = start_process(
        [sys.executable, *writes, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    request = json.dumps({"path": sys.path, "code": asdict(code)})
    named = ", ".join(f"{key}={','.join(names)}" for key, names in code.modules.items()) or ", ".join(code.classes)
    try:
        answer, _ = process.communicate(request.encode(), timeout=TIME_LIMIT_S)
        refused, notices = json.loads(answer)
    except subprocess.TimeoutExpired:
        return [], [f"{named}: not looked at: its import did not end within {TIME_LIMIT_S:g} s"]
    except ValueError:
        return [], [f"{named}: not looked at: the process that imports it ended with code {process.returncode}"]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return refused, notices


# ---- the child


def main() -> None:
    """Answer one request for a check, in the child process."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of the modules must not mix with the answer
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    code = UserCode(**request["code"])
    refused: list[str] = []
    notices: list[str] = []
    for key, names in code.modules.items():
        for name in names:
            _sort(_import_problem(f"{key}={name}", name), refused, notices)
    for place, dotted in code.classes.items():
        problem = _class_problem(f"{place}={dotted}", dotted)
        _sort(problem, refused, notices)
        if problem is None and place in code.demands:
            refused += _engine_problems(f"{place}={dotted}", dotted, Demand(*code.demands[place]))
    if not refused and not notices:  # a missing module might have registered the names
        refused += _unknown_names(code)
    answers.write(json.dumps([refused, notices]))
    answers.flush()
    os._exit(0)  # threads of the modules do not keep it alive


@dataclass(frozen=True)
class _Problem:
    text: str
    is_missing: bool


def _sort(problem: _Problem | None, refused: list[str], notices: list[str]) -> None:
    if problem is not None:
        (refused if problem.is_missing else notices).append(problem.text)


def _import_problem(place: str, name: str) -> _Problem | None:
    """Return why a module cannot be imported; ``is_missing`` if its package can be imported but lacks it."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # a module of the user may raise anything
        absent = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        package, _, last = absent.rpartition(".")
        if is_under(name, [absent]) and package in sys.modules:
            return _Problem(f"{place}: the package {package} has no module {last}: write one that it has", True)
        reason = one_line(error_text(error))
        return _Problem(f"{place}: not looked at: cannot be imported by this process ({reason})", False)
    return None


def _class_problem(place: str, dotted: str) -> _Problem | None:
    module, _, name = dotted.rpartition(".")
    problem = _import_problem(place, module)
    if problem is not None and problem.is_missing:  # perhaps a class in a class
        with suppress(AttributeError, ImportError):
            resolve_name(dotted)
            return None
    if problem is not None or hasattr(sys.modules[module], name):
        return problem
    classes = [each for each, value in vars(sys.modules[module]).items() if isinstance(value, type)]
    own = [each for each in classes if getattr(sys.modules[module], each).__module__ == module]
    near = ", ".join(nearest(name, own) or sorted(own)) or "none"
    return _Problem(f"{place}: {module} has no {name}: write one of its classes: {near}", True)


def _engine_problems(place: str, dotted: str, demand: Demand) -> list[str]:
    """Return the reasons why a class is no rollout engine, or lacks a method that the run needs."""
    from verl.workers.rollout.registry import class_problem

    found = resolve_name(dotted)
    problem = class_problem(found)
    return [f"{place}: {problem}"] if problem else [*map(str, demand.refused_by(found.__name__, found.facts))]


def _unknown_names(code: UserCode) -> Iterator[str]:
    """Yield names that nothing has registered."""
    for key, name in code.names.items():
        module, attribute, unknown = REGISTRIES[key]
        registry = resolve_name(f"{module}:{attribute}")
        known = [*(registry() if callable(registry) else registry), *code.more_names.get(key, ())]
        if name not in known:
            modules = ", ".join(dict.fromkeys(each for names in code.modules.values() for each in names))
            similar = ", ".join(nearest(name, known)) or ", ".join(sorted(known))
            yield f"{key}={name}: {unknown}: {modules} does not register it; write one of: {similar}"


if __name__ == "__main__":
    main()
