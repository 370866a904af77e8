"""Running programs that nobody has read: on this machine, kept apart by the kernel, or by a remote service."""

from verl.utils.sandbox.local import Run, SandboxError, Test, isolation_problem, run_tests

__all__ = ["Run", "SandboxError", "Test", "isolation_problem", "run_tests"]
