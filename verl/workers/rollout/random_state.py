"""Protect the random state of the trainer from an engine in the same process."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of ``random``, numpy, torch and the current accelerator on exit, also after an error."""
    state = BaseCheckpointManager.get_rng_state()
    try:
        yield
    finally:
        BaseCheckpointManager.load_rng_state(state)
