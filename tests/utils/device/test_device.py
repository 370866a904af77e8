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


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_keep_the_other_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """torch resets what a call does not name; an engine may have reset them, or a user's code set others."""
    settings = [""]
    monkeypatch.setattr(device, "is_cuda_available", True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setenv(variable, "expandable_segments:True, roundup_power2_divisions:[256:1,>:8],max_split_size_mb:512")
    device.set_expandable_segments(False)
    assert settings[-1] == "expandable_segments:False,roundup_power2_divisions:[256:1,>:8],max_split_size_mb:512"
    settings.append("garbage_collection_threshold:0.6")
    device.set_expandable_segments(True)
    assert settings[-1].split(",max_")[1] == "split_size_mb:512,garbage_collection_threshold:0.6"
    assert settings[-1].startswith("expandable_segments:True,roundup_power2_divisions:[256:1,>:8],")
