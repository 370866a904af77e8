"""The actor, its rollout engine and the reference policy: one worker class for every combination of the three."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.performance import reduce_timing, simple_timer, topk_reduce_ratio_min_max
from verl.utils.profiler.profile import DistProfiler
from verl.utils.vision.multi_modal import take_fetched_bytes
from verl.workers.config import CheckpointConfig
from verl.workers.engine import BaseEngine
from verl.workers.roles.accounting import begin_peak, memory_metrics, memory_of, mfu
from verl.workers.roles.base import EngineWorker, average_metrics, effective_engine_config
from verl.workers.roles.batching import Cut, per_rank_micro_batch, per_rank_mini_batch, policy_update_meta
from verl.workers.roles.losses import ppo_loss
from verl.workers.roles.mismatch import finish_mismatch
from verl.workers.roles.selection import LOG_PROBS_VERSION, select_tokens
from verl.workers.rollout import build_rollout
from verl.workers.sharding_manager import build_sharding_manager

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


class ActorRolloutRefWorker(EngineWorker):
    """Trains, generates and scores with the policy; ``role`` says which of these this worker does.

    Args: ``config`` is the node ``actor_rollout_ref``; ``role`` is one of ``ROLES``.
    """

    def __init__(self, config: "DictConfig", role: str, **kwargs: Any) -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {role!r}")
        super().__init__(timeout_s=config.nccl_timeout)
        self.config = config
        self._is_actor, self._is_rollout = "actor" in role, "rollout" in role
        self._is_ref = role == "ref" or role.endswith("_ref")
        self._is_lora = config.model.get("lora_rank", 0) > 0
        self._weight_sync: dict[str, float] = {}
        self._sync_timing: dict[str, float] = {}
        node = config.actor if self._is_actor or not self._is_ref else config.ref
        self.register_engine_mesh("actor", engine_node(node), effective_sequence_parallel_size(node))
        if self._is_rollout:
            infer_size = rollout_group_size(config.rollout)
            if self.world_size % infer_size:
                raise ValueError(
                    f"actor_rollout_ref.rollout.tensor_model_parallel_size x data_parallel_size = {infer_size} must "
                    f"divide the {self.world_size} workers"
                )
            self.register_mesh("rollout", infer_size)
        self.use_profilers(**self._profiler_nodes())

    def _profiler_nodes(self) -> dict[str, Any]:
        """Return the profiler nodes of the roles that this worker plays, that of the actor first."""
        config, nodes = self.config, dict[str, Any]()
        if self._is_actor:
            node = nodes["actor"] = omega_conf_to_dataclass(config.actor.get("profiler")) or ProfilerConfig()
            if node.tool == "torch_memory":  # the driver asks the actor for snapshots, for whomever they show
                nodes["actor"] = dataclasses.replace(node, enable=True)
        if self._is_rollout:
            nodes["rollout"] = config.rollout.get("profiler")
        if self._is_ref or self._is_lora:  # the actor without its adapters
            nodes["ref"] = config.ref.get("profiler") if config.get("ref") is not None else None
        return nodes

    # ---- start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build what the role needs: training engine, reference engine, rollout and the manager between them."""
        self.model_config = omega_conf_to_dataclass(self.config.model)
        if self._is_actor:
            self._build_actor()
        if self._is_ref:
            self._build_ref()
        if self._is_actor and self.actor_config.uses_full_kl:
            self.engine.set_reference(self.ref_engine if self._is_ref else None)
        if self._is_rollout:
            self.rollout_config = omega_conf_to_dataclass(self.config.rollout)
            engine = self.engine if self._is_actor else None
            self.rollout = build_rollout(self.rollout_config, self.model_config, engine)
            self.sharding_manager = build_sharding_manager(engine, self.rollout)

    def _build_actor(self) -> None:
        config = self.actor_config = omega_conf_to_dataclass(self.config.actor)
        engine_config = effective_engine_config(config.engine, config)
        self.engine = self.build_engine(
            "language_model",
            self.model_config,
            engine_config,
            config.optimizer(),
            config.checkpoint,
            config.freeze_vision_tower,
            config.get("load_weight", True),
        )
        dp_size = self.engine.get_data_parallel_size()
        self.mini_batch_size = per_rank_mini_batch(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            config.ppo_mini_batch_size,
            self.config.rollout.get("n", 1),
            dp_size,
        )
        self.train_cut = Cut.for_training(config, dp_size)
        self.log_prob_cut = log_prob_cut(self.config.rollout, dp_size)

    def _build_ref(self) -> None:
        config = self.config.ref
        engine = omega_conf_to_dataclass(engine_node(config))
        engine_config = effective_engine_config(engine, config, forward_only=True)
        model_config = self.model_config
        if config.get("model", None) is not None and config.model.get("path", None):
            node = self.config.model.copy()
            OmegaConf.set_struct(node, False)  # as under the actor's model, free nodes take any key
            node.merge_with(config.model)
            model_config = omega_conf_to_dataclass(node)
        self.ref_engine = self.build_engine(
            "language_model",
            model_config,
            engine_config,
            None,
            CheckpointConfig(),
            load_weight=config.get("load_weight", True),
        )
        self.ref_cut = log_prob_cut(config, self.ref_engine.get_data_parallel_size())
        if not self._is_actor:
            self.engine = self.ref_engine

    # ---- rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, step: int | None = None) -> None:
        """Bring the rollout engine to the trainer's weights and keep it awake for the generation that follows.

        Nothing happens if it has them. ``generate_sequences`` does the same, so a caller may leave this out.
        """
        if self.sharding_manager.is_behind:
            self.sharding_manager.step = step
            begin_peak()
            with simple_timer("wake_and_sync", self._sync_timing):
                self.sharding_manager.sync()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @DistProfiler.annotate(color="red", role="rollout_generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Bring the engine's weights up to date if they are not, and continue every prompt."""
        prompts.meta_info.setdefault("eos_token_id", self.model_config.eos_token_id)
        prompts.meta_info.setdefault("pad_token_id", self.model_config.pad_token_id)
        timing = self._sync_timing
        self._sync_timing = {}
        self.sharding_manager.step = prompts.meta_info.get("global_steps")
        if not timing:  # else the peak and the seconds began with the sync
            begin_peak()
        with simple_timer("wake_and_sync", timing):
            self.sharding_manager.__enter__()
        behind = self._versions_behind()
        try:
            with simple_timer("generate_sequences", timing):
                output = self.rollout.generate_sequences(prompts)
        finally:
            with simple_timer("sleep", timing):
                self.sharding_manager.__exit__(None, None, None)
        self.seconds_by_call["generation"] = self.seconds_by_call.get("generation", 0.0) + timing["generate_sequences"]
        ratio, shortest, longest = topk_reduce_ratio_min_max(timing["generate_sequences"])
        output.meta_info["timing"] = reduce_timing(timing) | {
            "generation_timing/max": longest,
            "generation_timing/min": shortest,
            "generation_timing/topk_ratio": ratio,
        }
        used = self._rollout_use(output, timing["generate_sequences"])
        output.meta_info["metrics"] = self._weight_sync_metrics() | behind | used
        return output

    def _rollout_use(self, output: DataProto, seconds: float) -> dict[str, float]:
        """Return the memory of a generation, and the MFU of this rank's group: each token goes forward once."""
        used = memory_of("rollout")
        counter = self.flops_counters.get(id(self.engine)) if self._is_actor else None
        if counter is not None and "attention_mask" in output.batch.keys():
            lengths = output.batch["attention_mask"].sum(-1).tolist()
            group = rollout_group_size(self.config.rollout)
            used["perf/mfu/rollout"] = mfu(counter, lengths, seconds, group, forward_only=True)
        return used

    def _versions_behind(self) -> dict[str, float]:
        """Return by how many updates the weights that are about to generate are older than the trainer's."""
        if not self._is_actor:
            return {}
        return {"weight_sync/versions_behind": float(self.engine.weights_version - self.rollout.weights_version)}

    def _weight_sync_metrics(self) -> dict[str, float]:
        """Return the figures of the sync that brought the weights in use, which a validation may have asked for."""
        if self.sharding_manager.last_sync:
            self._weight_sync = self.sharding_manager.last_sync
        return {f"weight_sync/{name}": value for name, value in self._weight_sync.items() if name != "version"}

    # ---- log-probabilities

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` (B, R); without adapters where meta ``is_lora`` is set."""
        without_adapter = data.meta_info.pop("is_lora", False)
        metrics: dict[str, Any] = {}
        with self.accounted(metrics, "actor_infer", data):
            output = self._infer(self.engine, data, self.log_prob_cut, entropy=True, without_adapter=without_adapter)
        meta_info = {"temperature": self.config.rollout.temperature, "metrics": metrics}
        if self._is_actor and not without_adapter:
            meta_info[LOG_PROBS_VERSION] = self.engine.weights_version
        return DataProto.from_dict(
            tensors={"old_log_probs": output["log_probs"], "entropys": output["entropy"]}, meta_info=meta_info
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="olive", role="ref_compute_log_prob")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` (B, R): the reference model, or the actor without its adapters."""
        metrics: dict[str, Any] = {}
        engine, cut = (self.ref_engine, self.ref_cut) if self._is_ref else (self.engine, self.log_prob_cut)
        with self.accounted(metrics, "ref", data, engine=engine):
            without_adapter = self._is_lora and not self._is_ref
            output = self._infer(engine, data, cut, entropy=False, without_adapter=without_adapter)
        return DataProto.from_dict(tensors={"ref_log_prob": output["log_probs"]}, meta_info={"metrics": metrics})

    def _infer(
        self, engine: BaseEngine, data: DataProto, cut: Cut, entropy: bool, without_adapter: bool = False
    ) -> dict[str, Any]:
        data.meta_info.update(cut.as_meta(), temperature=self.config.rollout.temperature, calculate_entropy=entropy)
        with engine.disable_adapter() if without_adapter else nullcontext(), engine.eval_mode():
            return engine.infer_batch(data)

    # ---- update

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update_actor(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's shard and return metrics only."""
        config = self.actor_config
        meta = policy_update_meta(config, data, self.train_cut, self.config.rollout.temperature)
        data.meta_info.update(meta, fault_point="update_actor")
        metrics: dict[str, Any] = {}
        reference = self.ref_engine.eval_mode() if self._is_ref and config.uses_full_kl else nullcontext()
        with self.accounted(metrics, "actor", data, config.ppo_epochs), reference, self.engine.train_mode():
            steps = self.train_mini_batches(
                data,
                self.mini_batch_size,
                config.ppo_epochs,
                config.shuffle,
                partial(ppo_loss, config),
                partial(select_tokens, config, self.engine),
                seed=config.data_loader_seed,
            )
            metrics["actor/lr"] = self.engine.lr_scheduler_step()
        step = finish_mismatch(average_metrics(steps, prefix="actor/"))
        return DataProto(meta_info={"metrics": metrics | step | memory_metrics() | self._transfer_metrics()})

    def _transfer_metrics(self) -> dict[str, float]:
        """Return the bytes of images and their tensors that came to the workers since the last update.

        The driver averages over the ranks: each tells its share of the sum.
        """
        if getattr(self.model_config.hf_config, "vision_config", None) is None:
            return {}
        return {"multi_modal/bytes_fetched": float(take_fetched_bytes() * self.world_size)}


def rollout_group_size(rollout: "DictConfig") -> int:
    """Return how many workers hold one generation engine; each has its own of transformers'."""
    size: int = rollout.tensor_model_parallel_size * rollout.get("data_parallel_size", 1)
    return 1 if rollout.name == "hf" else size


def engine_node(node: "DictConfig") -> "DictConfig":
    """Return the node of a role's engine."""
    return node.megatron if node.strategy == "megatron" else node.fsdp_config


def effective_sequence_parallel_size(node: "DictConfig") -> int:
    """Return the Ulysses degree of a role: its own key, or that of its engine."""
    own: int = node.get("ulysses_sequence_parallel_size", 1)
    return own if own > 1 else engine_node(node).get("ulysses_sequence_parallel_size", 1)


def log_prob_cut(node: "DictConfig", dp_size: int) -> Cut:
    """Return how a log-probability pass is cut, from the ``log_prob_*`` keys of a node."""
    return Cut(
        node.log_prob_use_dynamic_bsz,
        per_rank_micro_batch(node.log_prob_micro_batch_size_per_gpu, node.log_prob_micro_batch_size, dp_size),
        node.log_prob_max_token_len_per_gpu,
    )
