"""Memory statistics; without the library a test sets them."""

from torch_npu.npu._state import library

settings = []
_said = {"allocated": 0, "peak": 0}


def _set_allocator_settings(env):
    settings.append(env)


def say(nbytes):
    """Set the number of allocated bytes."""
    _said.update(allocated=nbytes, peak=max(nbytes, _said["peak"]))


def allocated():
    return library.allocated() if library else _said["allocated"]


def peak():
    return library.peak() if library else _said["peak"]


def reset_peak():
    if library:
        library.reset_peak()
    _said["peak"] = _said["allocated"]
