"""A run on two nodes of a Ray cluster, which here share a machine."""

import pytest
import ray
from ray.cluster_utils import Cluster

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
