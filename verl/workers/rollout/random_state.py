"""Keep an engine from touching the random state of the trainer that shares its process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from verl.utils.device import get_device_name, get_torch_device


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of ``random``, numpy and torch (and the current accelerator) afterwards, whatever happened."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
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
