"""Replicas of vLLM."""

from verl.workers.rollout.replica import RolloutReplica


class vLLMReplica(RolloutReplica):
    """An engine in the processes of the trainer; the first of its workers takes the requests."""

    def launch_servers(self) -> None:
        """Let the first worker serve: it has the engine in its process, and needs no other one."""
        self._server_handle = self.workers[0]
