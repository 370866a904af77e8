"""The built-in scorers, chosen by ``data_source`` and imported on first use."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from verl.errors import MissingPackage, UnsupportedInput
from verl.utils.json_types import Json, JsonObject

_MODULES = {
    "gsm8k": ("openai/gsm8k",),
    "math_reward": ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "math_dapo": ("math_dapo", "math", "math_dapo_reasoning"),
    "prime_math": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "prime_code": ("codecontests", "apps", "codeforces", "taco"),
    "geo3k": ("hiyouga/geometry3k",),
    "search_r1_like_qa_em": (
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    ),
}
SCORERS: dict[str, str] = {source: module for module, sources in _MODULES.items() for source in sources}
"""Data source -> module of this package that scores it."""
PREFIXES = {"aime": "math_dapo"}
"""Prefix of data sources -> module."""
CODE_MODULE = "prime_code"
LOWEST_SCORES = {
    "gsm8k": 0.0,
    "math_reward": 0.0,
    "math_dapo": -1.0,
    "prime_math": 0.0,
    CODE_MODULE: 0.0,
    "geo3k": 0.0,
    "search_r1_like_qa_em": 0.0,
}
"""Module -> the lowest score that it gives, which a response gets that cannot be scored."""

GroundTruth = str | int | float | Sequence[str] | Mapping[str, Json]
"""The correct answer, the accepted answers, or test cases."""


class Extra(NamedTuple):
    """A package that some scorers need, and the verl extra that installs it."""

    module: str
    package: str
    extra: str

    def is_installed(self) -> bool:
        """Return whether the package can be imported."""
        return find_spec(self.module) is not None

    def problem(self) -> str:
        """Name the missing package and how to install it."""
        return f"needs {self.package}, which is not installed: pip install 'verl[{self.extra}]'"

    def require(self, scorer: str) -> None:
        """Check that the package is installed.

        Raises: MissingPackage naming package and extra.
        """
        if not self.is_installed():
            raise MissingPackage(f"the scorer {scorer} {self.problem()}")


GEO = Extra("mathruler", "mathruler", "geo")
MATH = Extra("math_verify", "math-verify", "math")
EXTRAS = {"geo3k": GEO, "prime_math": MATH}
"""Module -> package that it needs."""


def scorer_module(data_source: str) -> str | None:
    """Return the name of the module that scores a data source; None if there is none."""
    if data_source in SCORERS:
        return SCORERS[data_source]
    return next((module for prefix, module in PREFIXES.items() if data_source.startswith(prefix)), None)


def lowest_score(data_source: str) -> float | None:
    """Return the lowest score that the built-in scorer of a data source gives; None if there is no such scorer."""
    module = scorer_module(data_source)
    return None if module is None else LOWEST_SCORES[module]


def data_source_problem(data_source: str, runs_code_here: bool = True) -> str | None:
    """Return why responses to a data source cannot be scored here; None if they can.

    Args: ``runs_code_here`` also checks that this machine can isolate the code under test.
    """
    module = scorer_module(data_source)
    if module is None:
        known = [*sorted(SCORERS), *(f"{prefix}*" for prefix in PREFIXES)]
        return (
            f"no scorer for {data_source!r}: to score your own data, set custom_reward_function.path to a file that "
            f"defines compute_score; known are {', '.join(known)}"
        )
    extra = EXTRAS.get(module)
    if extra is not None and not extra.is_installed():
        return f"the scorer of {data_source!r} {extra.problem()}"
    if module == CODE_MODULE and runs_code_here:
        from verl.utils.sandbox import isolation_problem

        problem = isolation_problem()
        if problem is not None:
            return (
                f"scoring {data_source!r} runs the responses as code, and this machine cannot isolate them from the "
                f"network and from your files ({problem}): set reward_model.sandbox_fusion.url to a sandbox service, "
                "or set reward_model.local_sandbox.allow_unisolated=true to run them with your own rights"
            )
    return None


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: JsonObject | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    memory_limit_mb: int | None = None,
    sandbox_timeout_s: float | None = None,
    allow_unisolated: bool = False,
) -> float | JsonObject:
    """Score a response with the scorer of its data source.

    Args:
        sandbox_fusion_url: service that runs the code under test; by default this machine runs it.
        concurrent_semaphore: context manager to hold during each request to that service.
        memory_limit_mb: memory limit of one program under test.
        sandbox_timeout_s: time limit of one program under test.
        allow_unisolated: whether to run code on this machine even if the kernel cannot isolate it.

    Raises: UnsupportedInput for a source without a scorer.
    """
    name = scorer_module(data_source)
    if name is None:
        raise UnsupportedInput(data_source_problem(data_source))
    limits = {"memory_limit_mb": memory_limit_mb, "timeout": sandbox_timeout_s}
    program = {"completion": solution_str, "test_cases": ground_truth, "continuous": True}
    program |= {key: value for key, value in limits.items() if value is not None}
    if name != CODE_MODULE:
        result = _scorer(name)(solution_str, ground_truth)
    elif sandbox_fusion_url:
        result = _scorer("sandbox_fusion")(sandbox_fusion_url, concurrent_semaphore, **program)
    else:
        result = _scorer(name)(allow_unisolated=allow_unisolated, **program)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


def _scorer(module: str) -> Callable[..., Any]:
    return import_module(f"verl.utils.reward_score.{module}").compute_score
