"""The place of the files by which processes of vLLM meet."""

import pytest

from verl.workers.rollout.vllm_rollout.sockets import in_folder


@pytest.mark.parametrize(
    ("place", "address", "found"),
    [
        ("/tmp/verl-vllm-x", "file:///tmp/vllm_dist_1", "file:///tmp/verl-vllm-x/vllm_dist_1"),
        ("/tmp/verl-vllm-x", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"),
        ("/tmp/of-the-user", "file:///tmp/vllm_dist_1", "file:///tmp/vllm_dist_1"),
        (None, "file:///tmp/vllm_dist_1", "file:///tmp/vllm_dist_1"),
    ],
)
def test_workers_meet_in_the_folder_of_the_sockets(
    monkeypatch: pytest.MonkeyPatch, place: str | None, address: str, found: str
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    if place is not None:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", place)
    assert in_folder(address) == found
