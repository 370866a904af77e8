"""The devices of the fake: the ones that this process sees, and the library with their tensors."""

import importlib.machinery
import importlib.util
import os

import torch


def visible():
    """Return the devices that are visible to this process."""
    names = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    return [name for name in names.split(",") if name]


def _load(path):
    loader = importlib.machinery.ExtensionFileLoader("npu_device", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("npu_device", loader))
    loader.exec_module(module)
    return module


library = _load(os.environ["TORCH_NPU_DEVICE"]) if os.environ.get("TORCH_NPU_DEVICE") else None
generator = library.generator() if library else torch.Generator()
