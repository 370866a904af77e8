"""Run untrusted programs, isolated by the kernel of this machine or by a remote service."""

from verl.errors import SandboxError
from verl.utils.sandbox.local import Run, Test, isolation_problem, run_tests

__all__ = ["Run", "SandboxError", "Test", "isolation_problem", "run_tests"]
