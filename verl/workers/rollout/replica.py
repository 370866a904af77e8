"""Import path of the replicas of rollout servers and of their registry in the established verl interface."""

from verl.workers.rollout.registry import RolloutReplicaRegistry as RolloutReplicaRegistry
from verl.workers.rollout.registry import get_rollout_replica_class as get_rollout_replica_class
from verl.workers.rollout.server import TokenOutput as TokenOutput
from verl.workers.rollout.server_replica import RolloutMode as RolloutMode
from verl.workers.rollout.server_replica import RolloutReplica as RolloutReplica
