"""The actor with frozen embeddings."""

from fork import algorithms  # noqa: F401  # the loss is looked up in the worker's process

from verl.workers.fsdp_workers import ActorRolloutRefWorker


class FrozenEmbeddingWorker(ActorRolloutRefWorker):
    """Trains everything but the input embeddings."""

    def _build_model_optimizer(self, *args, role="actor", **kwargs):
        module, optimizer, scheduler, config = super()._build_model_optimizer(*args, role=role, **kwargs)
        if role == "actor":
            module.get_input_embeddings().weight.requires_grad_(False)
        return module, optimizer, scheduler, config
