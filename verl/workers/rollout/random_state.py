"""Protect the random state of the trainer from an engine in the same process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from verl.utils.device import get_device_name, get_torch_device


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of ``random``, numpy, torch and the current accelerator on exit, also after an error."""
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    device = None if get_device_name() == "cpu" else get_torch_device()
    on_device = None if device is None else device.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            device.set_rng_state(on_device)
