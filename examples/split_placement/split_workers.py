"""Workers whose updates are not blocking: the driver gets a future at once."""

from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker


class SplitActorRolloutRefWorker(ActorRolloutRefWorker):
    """Actor, rollout and reference policy on one half of the devices."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def update_actor(self, data: DataProto) -> DataProto:
        """Update the actor."""
        return super().update_actor(data)


class SplitCriticWorker(CriticWorker):
    """The critic on the other half."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"), blocking=False)
    def update_critic(self, data: DataProto) -> DataProto:
        """Update the critic."""
        return super().update_critic(data)
