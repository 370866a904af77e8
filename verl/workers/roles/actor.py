"""The actor alone, for trainers that keep generation elsewhere or bring their own loss."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from verl.algos.mismatch import finish_gap_metrics
from verl.base_config import omega_conf_to_dataclass
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.profiler.profile import DistProfiler
from verl.workers.config.engine import NCCL_TIMEOUT_S
from verl.workers.engine.base import LossFn
from verl.workers.engine.passes import PassSpec, temperature_of
from verl.workers.roles.accounting import memory_metrics
from verl.workers.roles.base import EngineWorker
from verl.workers.roles.batching import per_rank_mini_batch, policy_update_spec, training_spec
from verl.workers.roles.losses import LossResult, as_engine_loss, ppo_loss, select_tokens

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import FSDPActorConfig, HFModelConfig, McoreActorConfig


class ActorWorker(EngineWorker):
    """Log-probabilities and updates of a policy.

    Args: ``config`` is an actor node whose ``model_config`` holds the model node and whose ``rollout_n`` says how many
    responses a prompt has; ``timeout_s`` bounds a collective.
    """

    def __init__(
        self, config: "FSDPActorConfig | McoreActorConfig | DictConfig", timeout_s: int = NCCL_TIMEOUT_S
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.config: FSDPActorConfig | McoreActorConfig = omega_conf_to_dataclass(config)
        if self.config.model_config is None:
            raise ValueError("actor.model_config=None: ActorWorker needs the model node there, an HFModelConfig")
        self.model_config: HFModelConfig = omega_conf_to_dataclass(self.config.model_config)
        self.register_engine_mesh("actor", self.config)
        self.loss_fn: LossFn = partial(ppo_loss, self.config)
        self.prepare: Callable[[DataProto, int, PassSpec], None] | None = None
        self.use_profilers(actor=self.config.profiler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the policy, its optimizer and schedule."""
        config = self.config
        self.engine = self.build_engine("language_model", self.model_config, config)
        self.prepare = partial(select_tokens, config, self.engine)
        if config.uses_full_kl:
            self.engine.set_reference(None)
        dp_size = self.engine.get_data_parallel_size()
        key = "actor.ppo_mini_batch_size"
        self.rows_per_step = per_rank_mini_batch(key, config.ppo_mini_batch_size, config.rollout_n, dp_size)
        self.train_spec = training_spec(config, dp_size)
        self.infer_spec = PassSpec(
            config.use_dynamic_bsz,
            config.ppo_infer_micro_batch_size_per_gpu or self.train_spec.micro_batch_size,
            config.ppo_infer_max_token_len_per_gpu,
            entropy="value",
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., LossResult]) -> None:
        """Train with ``loss_fn(model_output=, data=)`` from now on; ``losses.ppo_loss`` documents its result."""
        self.loss_fn = as_engine_loss(loss_fn)
        self.prepare = None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropy`` (B, R) at the ``temperature`` of ``meta_info``."""
        spec = dataclasses.replace(self.infer_spec, temperature=temperature_of(data))
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data, spec)
        return DataProto.from_dict(tensors={"old_log_probs": output["log_probs"], "entropy": output["entropy"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update_actor(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's shard and return metrics only."""
        spec = policy_update_spec(self.train_spec, self.config, data, temperature_of(data))
        metrics = self.update("actor", data, self.config, self.loss_fn, spec, self.prepare)
        return DataProto(meta_info={"metrics": finish_gap_metrics(metrics) | memory_metrics()})
