"""The worker of SPIN: a policy that is trained on pairs, and a reference that copies its weights from time to time."""

import dataclasses
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.errors import WrongInput
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.profiler.profile import DistProfiler
from verl.workers.config import CheckpointConfig
from verl.workers.roles import ActorRolloutRefWorker
from verl.workers.roles.accounting import memory_metrics

from .config import SPINActorConfig
from .dp_actor import add_pairs, preference_loss

REFERENCE = "reference"
"""The name of the reference's folder in a checkpoint of the actor."""


class SPINRolloutRefWorker(ActorRolloutRefWorker):
    """The worker of the main trainer, with an update on pairs and a reference that can copy the policy's weights."""

    actor_config: SPINActorConfig
    _copied_version: int | None = None
    """The version of the actor's weights that the reference holds; None for the initial weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the models, optimizer and engines of the role.

        Raises: WrongInput if a rank's share of a mini-batch is an odd number of responses.
        """
        super().init_model()
        if self._is_actor and self.rows_per_step % 2:
            size = self.actor_config.ppo_mini_batch_size
            raise WrongInput(
                f"actor_rollout_ref.actor.ppo_mini_batch_size={size}: gives each rank {self.rows_per_step} responses "
                "of a mini-batch, an odd number, but responses come in pairs: write a size that makes it even"
            )
        if self._is_actor and self._is_ref:
            self.ref_engine.checkpoint_config = CheckpointConfig(save_contents=["model"], load_contents=["model"])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update_actor_dpo(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's pairs and return metrics only."""
        self._sleep_rollout()
        spec = dataclasses.replace(self.train_spec, temperature=self.rollout_config.temperature)
        prepare = partial(add_pairs, self.actor_config, self.engine)
        metrics = self.update("actor", data, self.actor_config, preference_loss, spec, prepare)
        return DataProto(meta_info={"metrics": metrics | memory_metrics()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_reference(self) -> None:
        """Copy the policy's weights to the reference; both are sharded alike, so no rank needs data of another.

        Raises: WrongInput if the shards of a parameter differ in shape.
        """
        pairs = zip(self.engine.local_parameters(), self.ref_engine.local_parameters(), strict=True)
        with torch.no_grad():
            for (name, new), (_, old) in pairs:
                source = _local(new)
                target = _local(old)
                if source.shape != target.shape:
                    raise WrongInput(
                        f"policy and reference shard {name} differently, into {tuple(source.shape)} and "
                        f"{tuple(target.shape)}: write the same fsdp_config in actor_rollout_ref.actor and .ref"
                    )
                target.copy_(source)
        self.ref_engine.weights_version += 1
        self._copied_version = self.engine.weights_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; skip the reference if it has the initial or the policy's weights."""
        if self._copied_version not in (None, self.engine.weights_version):
            remote = None if hdfs_path is None else f"{hdfs_path}/{REFERENCE}"
            self.ref_engine.save_checkpoint(f"{local_path}/{REFERENCE}", remote, global_step)
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint, and the reference if the checkpoint holds it."""
        if (Path(local_path) / REFERENCE).is_dir():
            self.ref_engine.load_checkpoint(f"{local_path}/{REFERENCE}")
            self._copied_version = -1
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
