"""Load and check the reward function and the reward manager that a configuration names."""

import ast
import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.base_config import omega_conf_to_dataclass
from verl.errors import MissingFile, MissingName, RewardFunctionImportError, WrongType
from verl.utils.import_utils import external_module_of, load_extern_type, python_file
from verl.utils.json_types import Json
from verl.utils.process.pool import START_TIMEOUT_S, IsolatedFunction, ProcessStartError
from verl.utils.process.time_limit import UserCodeFailed
from verl.utils.reward_score import default_compute_score
from verl.utils.sandbox.permits import FilePermits
from verl.workers.config.reward_model import DEFAULT_SCORER, RewardModelConfig, ScoringConfig
from verl.workers.rewards.managers import ISOLATING, AbstractRewardManager, get_reward_manager_cls
from verl.workers.rewards.scoring import RawScorer
from verl.workers.rewards.signature import ASYNCHRONOUS, call_problem

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)  # the managers of training and validation load the same scorer

Config = DictConfig | Mapping[str, Any]
"""The configuration of a run, of which this module parses the nodes of the reward."""


def get_custom_reward_fn(config: Config) -> RawScorer | None:
    """Load the function that ``custom_reward_function`` names; None if it names none.

    ``custom_reward_function.reward_kwargs`` override the arguments of the manager.

    Raises: ValueError, which is also a FileNotFoundError (no file), RuntimeError (it cannot be executed),
        AttributeError (no such name) or TypeError (not a plain function).
    """
    node = config.get("custom_reward_function") or {}
    path = node.get("path")
    if not path:
        return None
    name = node.get("name") or DEFAULT_SCORER
    try:
        function = load_extern_type(path, name)
    except FileNotFoundError as error:
        raise MissingFile(f"custom_reward_function.path={path!r}: {error}") from error
    except RuntimeError as error:
        raise RewardFunctionImportError(f"custom_reward_function.path={path!r}: {error}") from error
    except AttributeError as error:
        raise MissingName(f"custom_reward_function.name={name!r}: {error}") from error
    problem = _why_no_scorer(function)
    if problem:
        raise WrongType(f"custom_reward_function.name={name!r} in {path!r} {problem}")
    module = external_module_of(function)
    if "ray" in sys.modules and module is not None:
        # Other processes cannot import this module, so Ray sends the code of its functions.
        sys.modules["ray"].cloudpickle.register_pickle_by_value(module)
    kwargs = dict(node.get("reward_kwargs") or {})
    return functools.partial(function, **kwargs) if kwargs else function


def _why_no_scorer(function: RawScorer) -> str | None:
    """Return why an object cannot be a scorer; None for functions and instances with ``__call__``."""
    if isinstance(function, type):
        return f"is a class: give the file an instance of it, such as `scorer = {function.__name__}()`, and name that"
    if not callable(function):
        return f"must be a function, it is a {type(function).__name__}"
    inner = function.func if isinstance(function, functools.partial) else function
    code = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.iscoroutinefunction(code):
        return ASYNCHRONOUS
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        return "yields instead of returning: write `return`"
    return None


def check_scorer_signature(scorer: RawScorer, manager: type[AbstractRewardManager]) -> None:
    """Reject a scorer that cannot take the arguments of its manager.

    Raises: WrongType with the signature and the arguments.
    """
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):
        return  # a compiled function has no signature to check
    more_keywords: list[str] = []
    if isinstance(scorer, functools.partial):
        more_keywords = list(scorer.keywords)
        signature = inspect.signature(scorer.func)
    problem = call_problem(signature, manager.call_scorer_example(scorer), more_keywords)
    if problem:
        raise WrongType(
            f"custom_reward_function: {getattr(scorer, '__name__', scorer)}{signature} cannot be called by "
            f"{manager.__name__} {problem}"
        )


def resolve_reward(config: Config) -> tuple[type[AbstractRewardManager], RawScorer | None]:
    """Return the manager class and the scorer that a config names, after all checks that need no tokenizer.

    The scorer is None if the manager chooses one. The file of a custom function runs first, because it may register a
    manager.

    Raises: ValueError naming the key.
    """
    node = config.get("reward_model") or {}
    scorer = get_custom_reward_fn(config)
    manager = get_reward_manager_cls(node.get("reward_manager") or RewardModelConfig.reward_manager)
    if scorer is not None:
        if hasattr(manager, "call_scorer_example"):  # a user's manager might not derive from AbstractRewardManager
            check_scorer_signature(scorer, manager)
    elif manager.__name__ != "BatchRewardManager":
        scorer = built_in_scorer(node)
    return manager, scorer


def built_in_scorer(node: Config) -> RawScorer:
    """Return the built-in scorer, with the limits for code under test.

    Args: ``node`` is ``reward_model`` of the configuration.
    """
    local = node.get("local_sandbox") or {}
    remote = node.get("sandbox_fusion") or {}
    given: dict[str, Any] = {}
    if local:
        given = {"sandbox_timeout_s": local["timeout_s"], "allow_unisolated": local["allow_unisolated"]}
    if remote:
        given["memory_limit_mb"] = remote["memory_limit_mb"]
        if remote["url"]:
            given["sandbox_fusion_url"] = remote["url"]
            given["concurrent_semaphore"] = FilePermits(remote["url"], remote["max_concurrent"])
    return functools.partial(default_compute_score, **given)


_isolated: dict[tuple[str, str, str], IsolatedFunction] = {}
"""The processes of scorers, by path, name and arguments: those for training and validation share one."""


def isolate_custom_reward_fn(config: Config) -> IsolatedFunction | None:
    """Load the function that ``custom_reward_function`` names in a separate process.

    There the function can neither block nor end this process.

    Returns: None if it names none; if ``reward_model.scoring.isolate`` is false; or if that is null and the file
        imports ray, because another process would not find the actors of this run.
    Raises: RewardFunctionImportError if the import takes too long or ends its process.
    """
    node = config.get("custom_reward_function") or {}
    path = node.get("path")
    scoring = _scoring(config)
    if not path or scoring.isolate is False:
        return None
    if scoring.isolate is None and _imports_ray(path):
        _warn_once(
            "custom_reward_function.path=%r imports ray, so its scorer runs in the trainer, where a time limit cannot "
            "end compiled code: set reward_model.scoring.isolate=true if it asks no actor of this run",
            path,
        )
        return None
    name = node.get("name") or DEFAULT_SCORER
    kwargs = dict(node.get("reward_kwargs") or {})
    timeout_s = (config.get("trainer") or {}).get("ray_wait_register_center_timeout") or START_TIMEOUT_S
    key = (path, name, repr(kwargs))
    if key in _isolated:
        return _isolated[key]
    file = python_file(path)
    source = file.read_bytes() if file is not None and file.is_file() else None  # later processes run the same code
    load = functools.partial(load_extern_type, path, name, source)
    isolated = IsolatedFunction(load, kwargs, timeout_s, _ray_environment())
    try:
        isolated.start()
    except ProcessStartError as error:
        raise RewardFunctionImportError(
            f"custom_reward_function.path={path!r}: {error} (trainer.ray_wait_register_center_timeout={timeout_s:g}): "
            "correct the file, or raise the limit"
        ) from error
    except UserCodeFailed:
        return None  # ``get_custom_reward_fn`` imports the file again and reports the same error
    _isolated[key] = isolated
    return isolated


def _imports_ray(path: str) -> bool:
    """Whether the file of a scorer has an import of ray; an installed module (``pkg://``) is not read."""
    file = python_file(path)
    if file is None or not file.is_file():
        return False
    try:
        module = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing the file later reports this error
        return False
    imported = [
        name
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    ]
    return any(name.split(".")[0] == "ray" for name in imported)


def _ray_environment() -> dict[str, str]:
    """Return the address of this run's Ray; a process that uses Ray without it would start another one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def _scoring(config: Config) -> ScoringConfig:
    return omega_conf_to_dataclass((config.get("reward_model") or {}).get("scoring"), ScoringConfig)


def reward_kwargs(config: DictConfig) -> dict[str, Json]:
    """Return the arguments for the reward manager from the configuration, those of an overlong buffer included."""
    node = config.reward_model
    given = dict(node.get("reward_kwargs") or {})
    buffer = node.get("overlong_buffer")
    if buffer and buffer.enable:
        given |= {"max_resp_len": config.data.max_response_length, "overlong_buffer_cfg": buffer}
    return given


def load_reward_manager(
    config: Config, tokenizer: PreTrainedTokenizerBase, num_examine: int, **reward_kwargs: Json
) -> AbstractRewardManager:
    """Build the manager that ``reward_model.reward_manager`` names.

    Args: ``reward_kwargs`` are arguments of its constructor.
    Raises: ValueError naming the key.
    """
    isolated = isolate_custom_reward_fn(config)
    try:
        manager_cls, scorer = resolve_reward(config)
    except RewardFunctionImportError as error:
        if isolated is None:
            raise
        raise RewardFunctionImportError(
            f"{error}. This is its second import, in the trainer; the first, in the process of the scorer, succeeded. "
            "If it can only succeed once, for instance because it binds a port, set reward_model.scoring.isolate=false"
        ) from error
    if isolated is not None:
        if manager_cls in ISOLATING:
            isolated.local = scorer
            scorer = isolated
        else:
            isolated.close()
    manager = manager_cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=scorer,
        reward_fn_key=config["data"]["reward_fn_key"],
        **reward_kwargs,
    )
    manager.limits = _scoring(config)
    manager.is_of_config = True
    return manager
