"""A fake torch_npu for tests: its registrations with torch, and the part of its interface that verl uses.

``tests/fakes/torch_npu_calls.py`` lists this part, and ``tests/utils/device/test_torch_npu.py`` checks the installed
torch_npu against the list. There are two devices, or those in ``ASCEND_RT_VISIBLE_DEVICES``. They can hold tensors if
``TORCH_NPU_DEVICE`` names the library built from ``device.cpp``.
"""

import torch
import torch.distributed

from torch_npu import npu, profiler
from torch_npu.npu._state import library

__all__ = ["npu", "npu_fusion_attention", "profiler"]
__version__ = "0+fake"


def npu_fusion_attention(query, key, value, head_num, input_layout, **options):
    """Exist for transformers, which imports it; nothing calls it."""
    raise RuntimeError("the fake torch_npu has no fused attention")


def _hccl(store, rank, size, timeout):
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    return library.hccl(gloo) if library else gloo


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
if library:
    library.start(npu.device_count())
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
torch.distributed.Backend.register_backend("hccl", _hccl, devices=["npu"])
