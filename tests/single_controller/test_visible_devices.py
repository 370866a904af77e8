"""Workers for which Ray leaves all devices visible."""

from types import SimpleNamespace

import pytest
import ray

from verl.single_controller.base.worker import Worker
from verl.utils import device, envs
from verl.utils.ray_utils import hide_other_devices


@pytest.mark.parametrize(
    ("visible", "given", "place"),
    [
        ("4,5,6,7", "5", 1),
        ("0,1,2,3", "3", 3),
        ("7,4", "4", 1),
        ("GPU-aa,GPU-bb", "GPU-bb", 1),
        (None, "2", 2),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_device_is_taken_by_its_place_among_the_visible_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, visible: str | None, given: str, place: int
) -> None:
    """Ray names it as the variable of visible devices does, and torch counts the visible ones."""
    taken: list[int] = []
    variable = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "ASCEND_RT_VISIBLE_DEVICES"
    monkeypatch.setattr(device, f"is_{kind}_available", True)
    monkeypatch.setattr(device, "get_torch_device", lambda: SimpleNamespace(set_device=taken.append))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv(variable, visible or "")
    if visible is None:
        monkeypatch.delenv(variable)
    ids = {"GPU" if kind == "cuda" else "NPU": [given]}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: ids))
    Worker._take_local_rank_of_accelerator(SimpleNamespace())  # type: ignore[arg-type]
    assert taken == [place] and envs.read("LOCAL_RANK") == str(place)


@pytest.mark.parametrize(("noset", "seen"), [(None, "4,5,6,7,10"), ("1", "5,10")])
def test_a_standalone_server_sees_its_own_devices_alone(
    monkeypatch: pytest.MonkeyPatch, noset: str | None, seen: str
) -> None:
    """The processes of its engine count from zero."""
    monkeypatch.setattr(device, "is_cuda_available", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,10")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", noset or "")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["10", "5"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    hide_other_devices()
    assert envs.read("CUDA_VISIBLE_DEVICES") == seen
