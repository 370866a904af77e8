"""The actor alone, for trainers that keep generation elsewhere or bring a loss of their own."""

from functools import partial
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler.profile import DistProfiler
from verl.workers.config.engine import NCCL_TIMEOUT_S
from verl.workers.roles.accounting import memory_metrics
from verl.workers.roles.base import EngineWorker, average_metrics, effective_engine_config
from verl.workers.roles.batching import Cut, per_rank_mini_batch, policy_update_meta, temperature_of
from verl.workers.roles.losses import as_engine_loss, ppo_loss
from verl.workers.roles.mismatch import finish_mismatch
from verl.workers.roles.selection import select_tokens

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import FSDPActorConfig, McoreActorConfig


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
        self.engine_config = effective_engine_config(self.config.engine, self.config)
        sp_size = self.engine_config.get("ulysses_sequence_parallel_size", 1)
        self.register_engine_mesh("actor", self.engine_config, sp_size)
        self.loss_fn: Any = partial(ppo_loss, self.config)
        self.prepare: Any = None
        self.use_profilers(actor=self.config.profiler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the policy, its optimizer and schedule."""
        config = self.config
        model_config = omega_conf_to_dataclass(config.model_config)
        self.engine = self.build_engine(
            "language_model",
            model_config,
            self.engine_config,
            config.optimizer(),
            config.checkpoint,
            load_weight=config.get("load_weight", True),
        )
        self.prepare = partial(select_tokens, config, self.engine)
        if config.uses_full_kl:
            self.engine.set_reference(None)
        dp_size = self.engine.get_data_parallel_size()
        self.mini_batch_size = per_rank_mini_batch(
            "actor.ppo_mini_batch_size", config.ppo_mini_batch_size, config.rollout_n, dp_size
        )
        self.train_cut = Cut.for_training(config, dp_size)
        self.infer_cut = Cut(
            config.use_dynamic_bsz,
            config.ppo_infer_micro_batch_size_per_gpu or self.train_cut.micro_batch_size_per_gpu,
            config.ppo_infer_max_token_len_per_gpu,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Any) -> None:
        """Train with ``loss_fn(model_output=, data=)`` from now on; see ``losses.ppo_loss`` for what it returns."""
        self.loss_fn, self.prepare = as_engine_loss(loss_fn), None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropy`` (B, R) at the ``temperature`` of ``meta_info``."""
        data.meta_info.update(self.infer_cut.as_meta(), temperature=temperature_of(data), calculate_entropy=True)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)
        return DataProto.from_dict(tensors={"old_log_probs": output["log_probs"], "entropy": output["entropy"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update_actor(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's shard and return metrics only."""
        config = self.config
        meta = policy_update_meta(config, data, self.train_cut, temperature_of(data))
        data.meta_info.update(meta, fault_point="update_actor")
        metrics: dict[str, Any] = {}
        with self.accounted(metrics, "actor", data, config.ppo_epochs), self.engine.train_mode():
            steps = self.train_mini_batches(
                data,
                self.mini_batch_size,
                config.ppo_epochs,
                config.shuffle,
                self.loss_fn,
                self.prepare,
                seed=config.data_loader_seed,
            )
            metrics["actor/lr"] = self.engine.lr_scheduler_step()
        step = finish_mismatch(average_metrics(steps, prefix="actor/"))
        return DataProto(meta_info={"metrics": metrics | step | memory_metrics()})
