"""Helpers around Ray."""

import os
import shlex
import subprocess
import sys

import pytest

from verl.utils.ray_utils import _lean, lean_cluster, parallel_put, ray_noset_visible_devices


def test_noset_visible_devices() -> None:
    assert not ray_noset_visible_devices({})
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})


def test_parallel_put_keeps_order(ray_cluster: None) -> None:
    import ray

    for workers in (None, 1, 3):
        assert ray.get(parallel_put(list(range(5)), workers)) == list(range(5))


def test_parallel_put_of_nothing_needs_no_cluster() -> None:
    assert parallel_put([]) == []


def test_what_a_lean_cluster_changes_of_rays_command(tmp_path) -> None:
    worker = f"--python_worker_command={sys.executable} setup_worker.py default_worker.py"
    command = [
        "raylet",
        worker,
        "--dashboard_agent_command=python agent.py",
        f"--session_dir={tmp_path}",
        "--node_id=ab",
    ]

    def lean(word: str, keep_agent: bool = False, interpreter: list[str] | None = None) -> str:
        return _lean(word, command, keep_agent, interpreter)

    assert [lean(word, keep_agent=True) for word in command] == command
    assert lean(worker) == worker
    forked = lean(worker, interpreter=["/run/python", "-S"])
    assert forked == "--python_worker_command=/run/python -S setup_worker.py default_worker.py"
    agent = shlex.split(lean(command[2]).removeprefix("--dashboard_agent_command="))
    with subprocess.Popen(agent, stdin=subprocess.PIPE) as process:
        process.stdin.close()  # as when the raylet ends
        assert process.wait() == 0
    names = [f"{name}_port_ab" for name in ("dashboard_agent_listen", "metrics_agent", "metrics_export")]
    assert sorted(os.listdir(tmp_path)) == names
    assert {(tmp_path / name).read_text() for name in names} == {"-1"}, "no port, as Ray's agent says without a server"


def test_ray_is_as_before_after_a_lean_start() -> None:
    from ray._private import services
    from ray._private.node import Node

    before = services.start_ray_process, Node.start_monitor, Node.start_api_server, Node.start_log_monitor
    with pytest.raises(RuntimeError), lean_cluster(keep_agent=False):
        assert services.start_ray_process is not before[0] and Node.start_monitor is not before[1]
        raise RuntimeError
    assert before == (services.start_ray_process, Node.start_monitor, Node.start_api_server, Node.start_log_monitor)
