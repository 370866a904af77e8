"""Runs on a Ray cluster: two nodes, which here share a machine, and a job that is submitted to one."""

import shlex
import sys
import time
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from tests.special_e2e.conftest import REPOSITORY, Run
from tests.waiting import wait_until
from verl.utils.net_utils import get_free_port

STEPS = {"trainer.total_training_steps": 2, "trainer.test_freq": -1}


@pytest.mark.slow
@pytest.mark.full
def test_two_nodes_train_as_two_workers_of_one(workspace):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        address = {"RAY_ADDRESS": cluster.address}
        two_nodes = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}
        apart = workspace.train("two-nodes", STEPS | two_nodes, env=address)
        for_three = {"trainer.nnodes": 3, "data.train_batch_size": 6, "actor_rollout_ref.actor.ppo_mini_batch_size": 6}
        too_many = workspace.train("three-nodes", STEPS | two_nodes | for_three, env=address, fails=True)
    finally:
        cluster.shutdown()
        ray.shutdown()
    together = workspace.train("one-node", STEPS | {"trainer.n_gpus_per_node": 2})
    for step in (1, 2):
        assert apart.numbers(step) == together.numbers(step)
    assert "missing 1" in too_many.output


@pytest.mark.slow
@pytest.mark.full
def test_a_submitted_job_trains_as_a_run_of_its_own(workspace):
    """``ray job submit`` with our runtime environment: the code travels, and the numbers are those of a launch."""
    from ray.job_submission import JobSubmissionClient

    agent = {"dashboard_agent_listen_port": get_free_port()}  # its own port may be another cluster's
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True} | agent)
    try:
        client = JobSubmissionClient(f"http://{cluster.webui_url}")
        environment = yaml.safe_load((REPOSITORY / "verl/trainer/runtime_env.yaml").read_text())
        _, *words = workspace.command("submitted", STEPS)
        environment["working_dir"] = str(REPOSITORY)
        job = submit(client, entrypoint=shlex.join([sys.executable, *words]), runtime_env=environment)
        wait_until(lambda: client.get_job_status(job).is_terminal(), pause_s=1)
        assert client.get_job_status(job) == "SUCCEEDED", client.get_job_logs(job)[-4000:]
    finally:
        cluster.shutdown()
    submitted = Run(0, "", 0.0, workspace.folder / "submitted")
    launched = workspace.train("launched", STEPS)
    for step in (1, 2):
        assert submitted.numbers(step) == launched.numbers(step)


def submit(client: Any, timeout_s: float = 300.0, **job: Any) -> str:
    """Submit a job; where the node's agent, which starts after the dashboard, is not there yet, ask again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(client.submit_job(**job))
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)
