"""Helpers under the established names of ``verl.utils.distributed``, for users' forks that start processes."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.device import get_device_name

logger = logging.getLogger(__name__)


def destroy_global_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _gpu_numa_node(device_index: int) -> int:
    """Read the NUMA node of a GPU from sysfs; -1 if it is unknown."""
    properties: Any = torch.cuda.get_device_properties(device_index)  # the fields differ between torch versions
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return -1
    address = f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    file = Path("/sys/bus/pci/devices") / address / "numa_node"
    return int(file.read_text(encoding="utf-8")) if file.is_file() else -1


def _parse_cpu_list(text: str) -> set[int]:
    """Read the kernel's list format, for instance ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def set_numa_affinity() -> None:
    """Bind this process to the cores of its GPU's NUMA node; do nothing without a GPU or an unknown node."""
    if get_device_name() != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    node = _gpu_numa_node(torch.cuda.current_device())
    cpu_list = Path(f"/sys/devices/system/node/node{node}/cpulist")
    if node < 0 or not cpu_list.is_file():
        return
    cpus = _parse_cpu_list(cpu_list.read_text(encoding="utf-8")) & os.sched_getaffinity(0)
    if not cpus:
        logger.warning("this process may use no core of NUMA node %d: its affinity is unchanged", node)
        return
    os.sched_setaffinity(0, cpus)
