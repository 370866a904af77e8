"""Scorers that need a package which is not installed with verl."""

import importlib.util
from typing import NamedTuple


class Extra(NamedTuple):
    """A package, and the extra of verl that installs it."""

    module: str
    package: str
    extra: str

    def is_installed(self) -> bool:
        """Whether the package can be imported."""
        return importlib.util.find_spec(self.module) is not None

    def problem(self) -> str:
        """Say how to install the package."""
        return f"needs {self.package}, which is not installed: pip install 'verl[{self.extra}]'"

    def require(self, scorer: str) -> None:
        """Check that the package is there.

        Raises: MissingExtraError naming package and extra.
        """
        if not self.is_installed():
            raise MissingExtraError(f"the scorer {scorer} {self.problem()}")


class MissingExtraError(ImportError, ValueError):
    """A scorer needs a package that is not installed."""


GEO = Extra("mathruler", "mathruler", "geo")
MATH = Extra("math_verify", "math-verify", "math")
