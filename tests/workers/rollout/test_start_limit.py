"""How long a standalone server may take to start, and what is told meanwhile."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from verl.errors import ServerError
from verl.workers.config import ServerConfig
from verl.workers.config.rollout import start_limit_s
from verl.workers.rollout import server_replica as replica
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica


@pytest.mark.parametrize(
    ("written", "device", "limit_s"),
    [(None, "cpu", 300.0), (None, "cuda", 1800.0), (None, "npu", 1800.0), (90.0, "cuda", 90.0), (300.0, "cuda", 300.0)],
)
def test_accelerators_have_more_time_unless_a_limit_is_written(
    written: float | None, device: str, limit_s: float
) -> None:
    assert start_limit_s(ServerConfig(max_start_wait_time=written).max_start_wait_time, device) == limit_s


class Start:
    """A server that answers after so many seconds of a clock that only waiting moves."""

    def __init__(self, ready_after_s: float) -> None:
        self.now, self._ready_after_s = 1000.0, ready_after_s
        self._began = self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, ref: Any, timeout: float) -> dict[str, Any]:
        left_s = self._began + self._ready_after_s - self.now
        self.now += min(timeout, max(left_s, 0.0))
        if left_s > timeout:
            raise ray.exceptions.GetTimeoutError("not yet")
        return {"pid": 5}


def waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> vLLMReplica:
    monkeypatch.setattr(replica, "time", start)
    monkeypatch.setattr(replica.ray, "get", start.get)
    server: Any = vLLMReplica.__new__(vLLMReplica)
    server.config, server.device_name = SimpleNamespace(server=ServerConfig()), "cuda"
    server._server_handle = SimpleNamespace(ready=SimpleNamespace(remote=lambda: "ref"))
    server._server_name, server._ended_pid, server._may_end_until = "vllm_server_0_0", None, 0.0
    return server


def test_a_slow_start_is_told_every_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=replica.logger.name)
    assert waiting(Start(1500.0), monkeypatch).wait_until_ready() == {"pid": 5}
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "rollout server vllm_server_0_0 has been starting for 60 s, of at most 1800 s"
    assert len(told) == 24


def test_a_start_that_takes_too_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(5000.0)
    with pytest.raises(ServerError, match="rollout server vllm_server_0_0 has not started within 1800 s"):
        waiting(start, monkeypatch).wait_until_ready()
    assert 1800 <= start.now - 1000 < 1810
