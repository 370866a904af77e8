"""The accelerator of a process."""

import pytest
import torch

from verl.utils import device


@pytest.mark.parametrize(("value", "said"), [(None, [False, True]), ("1", [False])])
def test_segments_grow_between_generations(
    monkeypatch: pytest.MonkeyPatch, value: str | None, said: list[bool]
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(device, "is_cuda_available", True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.delenv("MEGATRON_CI_DISABLE_EXPANDABLE_SEGMENTS", raising=False)
    if value is not None:
        monkeypatch.setenv("MEGATRON_CI_DISABLE_EXPANDABLE_SEGMENTS", value)
    for enable in (False, True):
        device.set_expandable_segments(enable)
    assert settings == [f"expandable_segments:{enable}" for enable in said]
