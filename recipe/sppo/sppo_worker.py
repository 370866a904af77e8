"""The worker of SPPO."""

from verl.workers.roles import ActorRolloutRefWorker

from . import dp_actor  # noqa: F401  (registers the loss)


class SPPOActorRolloutRefWorker(ActorRolloutRefWorker):
    """The worker of the main trainer; importing this module registers the loss, which the configuration selects."""
