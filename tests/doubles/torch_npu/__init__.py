"""Stands in for torch_npu in tests: its registrations with torch, and the calls of it that are used here.

``tests/utils/device/test_torch_npu.py`` lists these calls and holds whichever torch_npu is installed to the list.
There are two devices, or those that ``ASCEND_RT_VISIBLE_DEVICES`` leaves. Tensors can be on them where
``TORCH_NPU_DEVICE`` names the library that is built of ``device.cpp``.
"""

import torch
import torch.distributed

from torch_npu import npu, profiler
from torch_npu.npu._state import library

__all__ = ["npu", "npu_fusion_attention", "profiler"]
__version__ = "0+double"


def npu_fusion_attention(query, key, value, head_num, input_layout, **options):
    """Is imported by transformers wherever torch_npu is; nothing here calls it."""
    raise RuntimeError("the double of torch_npu has no fused attention")


def _hccl(store, rank, size, timeout):
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    return library.hccl(gloo) if library else gloo


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
if library:
    library.start(npu.device_count())
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
torch.distributed.Backend.register_backend("hccl", _hccl, devices=["npu"])
