"""The worker of SPPO."""

from recipe.sppo import dp_actor  # noqa: F401  (registers the loss)
from verl.workers.roles import ActorRolloutRefWorker


class SPPOActorRolloutRefWorker(ActorRolloutRefWorker):
    """The worker of the main trainer, with the loss of SPPO: its configuration names it."""
