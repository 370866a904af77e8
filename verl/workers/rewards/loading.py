"""Reward functions and managers as the config names them, checked before anything is started."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.import_utils import load_extern_type
from verl.utils.reward_score import default_compute_score
from verl.utils.sandbox.permits import FilePermits
from verl.workers.rewards.abstract import AbstractRewardManager
from verl.workers.rewards.registry import get_reward_manager_cls
from verl.workers.rewards.scoring import ScoringLimits


class RewardFunctionFileError(ValueError, FileNotFoundError):
    """The file of the reward function does not exist."""


class RewardFunctionImportError(ValueError, RuntimeError):
    """The file of the reward function cannot be executed."""


class RewardFunctionNameError(ValueError, AttributeError):
    """The file does not define the reward function."""


class RewardFunctionTypeError(ValueError, TypeError):
    """The reward function cannot be called as its manager does."""


def get_custom_reward_fn(config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Load the function that ``custom_reward_function`` names; None where it names none.

    ``custom_reward_function.reward_kwargs`` override what the manager passes.

    Raises: ValueError, which is also a FileNotFoundError (no file), RuntimeError (it cannot be executed),
        AttributeError (no such name) or TypeError (not a plain function).
    """
    node = config.get("custom_reward_function") or {}
    path = node.get("path")
    if not path:
        return None
    name = node.get("name") or "compute_score"
    try:
        function = load_extern_type(path, name)
    except FileNotFoundError as error:
        raise RewardFunctionFileError(f"custom_reward_function.path={path!r}: {error}") from error
    except RuntimeError as error:
        raise RewardFunctionImportError(f"custom_reward_function.path={path!r}: {error}") from error
    except AttributeError as error:
        raise RewardFunctionNameError(f"custom_reward_function.name={name!r}: {error}") from error
    problem = _why_not_called(function)
    if problem:
        raise RewardFunctionTypeError(f"custom_reward_function.name={name!r} in {path!r} {problem}")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if "ray" in sys.modules and module is not None and not path.startswith("pkg://"):
        # other processes cannot import this module: its functions travel with their code
        sys.modules["ray"].cloudpickle.register_pickle_by_value(module)
    kwargs = dict(node.get("reward_kwargs") or {})
    return functools.partial(function, **kwargs) if kwargs else function


def _why_not_called(function: Any) -> str | None:
    """Return why an object cannot be a scorer; None where it can, as functions and instances with ``__call__`` can."""
    if isinstance(function, type):
        return f"is a class: give the file an instance of it, such as `scorer = {function.__name__}()`, and name that"
    if not callable(function):
        return f"must be a function, it is a {type(function).__name__}"
    inner = function.func if isinstance(function, functools.partial) else function
    code = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.iscoroutinefunction(code):
        return "is asynchronous: define it with `def`"
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        return "yields instead of returning: write `return`"
    return None


def check_scorer_signature(scorer: Callable[..., Any], manager: type[AbstractRewardManager]) -> None:
    """Refuse a scorer that cannot take what its manager passes.

    Raises: RewardFunctionTypeError with both sides.
    """
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):
        return  # a compiled function does not tell
    args, kwargs = manager.call_scorer_example(scorer)
    if isinstance(scorer, functools.partial):
        kwargs = kwargs | scorer.keywords
        signature = inspect.signature(scorer.func)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = ", ".join(kwargs) if kwargs else "data_source, solution_str, ground_truth, extra_info"
        raise RewardFunctionTypeError(
            f"custom_reward_function: {getattr(scorer, '__name__', scorer)}{signature} cannot be called by "
            f"{manager.__name__} with ({wanted}): {error}"
        ) from error


def resolve_reward(config: Mapping[str, Any]) -> tuple[type[AbstractRewardManager], Callable[..., Any] | None]:
    """Return manager class and scorer that a config names, after all checks that need no tokenizer.

    The scorer is None where the manager has to choose. The file of a custom function is executed first, since it may
    register a manager.

    Raises: ValueError naming the key.
    """
    node = config.get("reward_model") or {}
    scorer = get_custom_reward_fn(config)
    manager = get_reward_manager_cls(node.get("reward_manager") or "naive")
    if scorer is not None:
        check = getattr(manager, "call_scorer_example", None)
        if check is not None:  # a manager of the user's own need not derive from ours
            check_scorer_signature(scorer, manager)
    elif manager.__name__ != "BatchRewardManager":
        scorer = built_in_scorer(node)
    return manager, scorer


def built_in_scorer(node: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the scorer that comes with the framework, with the limits for code under test.

    Args: ``node`` is ``reward_model`` of the configuration.
    """
    local, remote = node.get("local_sandbox") or {}, node.get("sandbox_fusion") or {}
    given: dict[str, Any] = {}
    if local:
        given = {"sandbox_timeout_s": local["timeout_s"], "allow_unisolated": local["allow_unisolated"]}
    if remote:
        given["memory_limit_mb"] = remote["memory_limit_mb"]
        if remote["url"]:
            given["sandbox_fusion_url"] = remote["url"]
            given["concurrent_semaphore"] = FilePermits(remote["url"], remote["max_concurrent"])
    return functools.partial(default_compute_score, **given)


def load_reward_manager(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager:
    """Build the manager that ``reward_model.reward_manager`` names.

    Args: ``reward_kwargs`` go to its constructor.
    Raises: ValueError naming the key.
    """
    manager_cls, scorer = resolve_reward(config)
    manager = manager_cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=scorer,
        reward_fn_key=config["data"]["reward_fn_key"],
        **reward_kwargs,
    )
    manager.limits = scoring_limits(config)
    return manager


def scoring_limits(config: Mapping[str, Any]) -> ScoringLimits:
    """Return the limits of ``reward_model.scoring``."""
    scoring = (config.get("reward_model") or {}).get("scoring")
    if scoring is None:
        return ScoringLimits()
    return ScoringLimits(
        failure_score=float(scoring["failure_score"]),
        timeout_s=float(scoring["timeout_s"]),
        batch_timeout_s=float(scoring["batch_timeout_s"]),
        max_failed_ratio=float(scoring["max_failed_ratio"]),
    )
