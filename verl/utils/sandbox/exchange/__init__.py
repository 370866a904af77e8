"""Run a program in one process and its test in another; both exchange plain values.

The test code runs in the *checker*. Where it names a function or a class of the program, it holds a stand-in, which
asks the program's process for calls, attributes and operators. Values come back as messages, from which the checker
builds plain values of exact built-in types, so that a program cannot return an object that is equal to everything. The
program sees the arguments of its calls, but neither the test code nor the expected values.

The modules need nothing but the standard library and each other, by relative imports that run when they load. For the
supervisor loads this package without ``verl``, and the remote wrapper sends its sources, in the order of ``MODULES``.
"""

from .checker import FAILED, PASSED, REFUSED, check
from .peer import PROGRAM_NAME, UNFINISHED, keep_files
from .program import run_program

MODULES = ("values", "shared", "standins", "wire", "peer", "program", "trust", "test_code", "checker")
"""The modules of this package, each after the modules that it imports."""

__all__ = [
    "FAILED", "MODULES", "PASSED", "PROGRAM_NAME", "REFUSED", "UNFINISHED", "check", "keep_files", "run_program",
]  # fmt: skip
