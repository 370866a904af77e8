"""The critic: one value per token, and its updates."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from verl.base_config import omega_conf_to_dataclass
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.profiler.profile import DistProfiler
from verl.workers.config import FSDPCriticConfig
from verl.workers.engine.base import LossFn
from verl.workers.engine.passes import PassSpec
from verl.workers.roles.base import EngineWorker
from verl.workers.roles.batching import per_rank_micro_batch, per_rank_mini_batch, training_spec
from verl.workers.roles.losses import LossResult, as_engine_loss, value_loss

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import McoreCriticConfig, OptimizerConfig


class CriticWorker(EngineWorker):
    """Values of the tokens of a response under the current policy."""

    def __init__(self, config: "FSDPCriticConfig | McoreCriticConfig | DictConfig") -> None:
        self.config: FSDPCriticConfig | McoreCriticConfig = omega_conf_to_dataclass(config)
        super().__init__(timeout_s=self.config.nccl_timeout)
        self.register_engine_mesh("critic", self.config)
        self.loss_fn: LossFn = partial(value_loss, self.config)
        self.use_profilers(critic=self.config.profiler)

    @property
    def optimizer_nodes(self) -> "list[OptimizerConfig | DictConfig]":
        """The optimizer nodes of the critic."""
        return [self.config.optim]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the value model, its optimizer and schedule."""
        config = self.config
        freezes_tower = isinstance(config, FSDPCriticConfig) and config.model.freeze_vision_tower
        self.engine = self.build_engine("value_model", config.model.as_model_config(), config, freezes_tower)
        dp_size = self.engine.get_data_parallel_size()
        key = "critic.ppo_mini_batch_size"
        self.rows_per_step = per_rank_mini_batch(key, config.ppo_mini_batch_size, config.rollout_n, dp_size)
        self.train_spec = training_spec(config, dp_size)
        self.infer_spec = PassSpec(
            config.use_dynamic_bsz,
            per_rank_micro_batch(config.forward_micro_batch_size_per_gpu, config.forward_micro_batch_size, dp_size),
            config.forward_max_token_len_per_gpu,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable[..., LossResult]) -> None:
        """Train with ``loss_fn(model_output=, data=)`` from now on; ``losses.value_loss`` documents its result."""
        self.loss_fn = as_engine_loss(loss_fn)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    @DistProfiler.annotate(color="cyan", role="critic_compute_values")
    def compute_values(self, data: DataProto) -> DataProto:
        """Return ``values`` (B, R), zero outside the response mask."""
        metrics: dict[str, float] = {}
        with self.accounted(metrics, "critic_infer", data), self.engine.eval_mode():
            output = self.engine.infer_batch(data, self.infer_spec)
        return DataProto.from_dict(tensors={"values": output["values"]}, meta_info={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    @DistProfiler.annotate(color="pink", role="critic_update", mini_batches=True)
    def update_critic(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's shard and return metrics only."""
        metrics = self.update("critic", data, self.config, self.loss_fn, self.train_spec)
        return DataProto(meta_info={"metrics": metrics})
