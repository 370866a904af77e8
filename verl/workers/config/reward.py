"""Scoring without a reward model: the scorer of the user, limits of scoring, and where code under test runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation, setting


@dataclass
class CustomRewardFunctionConfig(BaseConfig):
    """A scorer of the user, in place of the one that the data source selects."""

    path: str | None = setting(None, "Python file or pkg://module that defines the scorer")
    name: str = setting("compute_score", "name of the function", empty=False)
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoringConfig(BaseConfig):
    """The score of a response that cannot be scored, and how long scoring may take."""

    failure_score: float = setting(0.0, "score of a response whose scorer fails")
    timeout_s: float = setting(300, "seconds to score one response", above=0)
    batch_timeout_s: float = setting(1800, "seconds to score all responses of a step", above=0)
    max_failed_ratio: float = setting(1.0, "share of a batch that may fail", at_least=0, at_most=1)

    def rules(self) -> Iterator[Violation]:
        """Yield an infinite score."""
        if not math.isfinite(self.failure_score):
            yield Violation("failure_score", self.failure_score, "must be a finite number")


@dataclass
class SandboxFusionConfig(BaseConfig):
    """A service that runs code under test."""

    url: str | None = setting(None, "address that programs are posted to; null runs them here")
    max_concurrent: int = setting(64, "requests at once, from all processes of a machine", at_least=1)
    memory_limit_mb: int = setting(1024, "megabytes of memory of one program", at_least=1)

    def rules(self) -> Iterator[Violation]:
        """Yield an address that is no URL."""
        if self.url is not None and re.match(r"https?://[^/\s]+", self.url) is None:
            yield Violation("url", self.url, "must be null or an address such as http://host:8080/run_code")


@dataclass
class LocalSandboxConfig(BaseConfig):
    """Code under test on this machine."""

    timeout_s: float = setting(10, "seconds of processor time of one program on one input", above=0)
    allow_unisolated: bool = setting(False, "run code even if the kernel cannot isolate it")


@dataclass
class OverlongBufferConfig(BaseConfig):
    """A penalty on responses that come close to the limit.

    Source: DAPO (arXiv:2503.14476), section 3.4.
    """

    _is_closed = True

    enable: bool = setting(False, "subtract the penalty")
    len: int = setting(0, "tokens before the limit in which the penalty grows")
    penalty_factor: float = setting(0.0, "penalty of a response of full length")
    log: bool = setting(False, "report penalties as metrics")
