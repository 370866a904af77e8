"""Optional packages that some scorers need."""

import importlib.util
from typing import NamedTuple


class Extra(NamedTuple):
    """A package and the verl extra that installs it."""

    module: str
    package: str
    extra: str

    def is_installed(self) -> bool:
        """Return whether the package can be imported."""
        return importlib.util.find_spec(self.module) is not None

    def problem(self) -> str:
        """Return what is missing and how to install it."""
        return f"needs {self.package}, which is not installed: pip install 'verl[{self.extra}]'"

    def require(self, scorer: str) -> None:
        """Check that the package is installed.

        Raises: MissingExtraError naming package and extra.
        """
        if not self.is_installed():
            raise MissingExtraError(f"the scorer {scorer} {self.problem()}")


class MissingExtraError(ImportError, ValueError):
    """A scorer needs a package that is not installed."""


GEO = Extra("mathruler", "mathruler", "geo")
MATH = Extra("math_verify", "math-verify", "math")
