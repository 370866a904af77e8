"""The module ``torch.npu``."""

from contextlib import nullcontext

import psutil
import torch

from torch_npu.npu import memory, mstx
from torch_npu.npu._state import generator, library, visible

__all__ = ["memory", "mstx"]

_current = 0


def is_available():
    return device_count() > 0


def is_initialized():
    return True


def _is_in_bad_fork():
    return False


def device_count():
    return len(visible())


def get_device_name(device_name=None):
    return "Ascend910B3"


def current_device():
    return library.current() if library else _current


def set_device(device):
    global _current
    _current = int(getattr(device, "index", device) or 0)
    if not _current < device_count():
        raise RuntimeError(f"set_device: there is no npu:{_current}")
    if library:
        library.select(_current)


def synchronize(device=None):
    pass


class device:  # the name of torch_npu
    def __init__(self, device):
        self.chosen = device

    def __enter__(self):
        self.before = current_device()
        set_device(self.chosen)

    def __exit__(self, *error):
        set_device(self.before)


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16, torch.float32]


# ---- streams; every call is synchronous


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Stream:
    def __init__(self, device=None, priority=0):
        self.device = device

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass


if library:  # torch creates the streams and events of such a device and accepts no others
    Event = torch.Event
    Stream = torch.Stream
_stream = None if library else Stream()


def current_stream(device=None):
    return torch.accelerator.current_stream() if library else _stream


def default_stream(device=None):
    return current_stream()


def stream(stream):
    return nullcontext(stream)


# ---- random numbers


def get_rng_state(device="npu"):
    return generator.get_state()


def set_rng_state(new_state, device="npu"):
    generator.set_state(new_state)


def manual_seed(seed):
    generator.manual_seed(seed)


manual_seed_all = manual_seed

# ---- memory


def empty_cache():
    pass


def mem_get_info(device=None):
    machine = psutil.virtual_memory()
    return machine.available, machine.total


def memory_allocated(device=None):
    return memory.allocated()


def memory_reserved(device=None):
    return memory.allocated()


def max_memory_allocated(device=None):
    return memory.peak()


def max_memory_reserved(device=None):
    return memory.peak()


def reset_peak_memory_stats(device=None):
    memory.reset_peak()
