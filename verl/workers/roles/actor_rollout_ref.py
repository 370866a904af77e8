"""The actor, its rollout engine and the reference policy: one worker class for every combination of the three."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl.algos.mismatch import finish_gap_metrics
from verl.base_config import build_node, omega_conf_to_dataclass
from verl.errors import WrongInput
from verl.models.transformers.vision import is_vision_config
from verl.protocol import OLD_LOG_PROBS_VERSION, DataProto, tensors_of
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import read_ahead
from verl.utils.hub import cached_folder
from verl.utils.import_utils import is_own
from verl.utils.json_types import Json
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import RequestSeeds
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.profile import DistProfiler
from verl.utils.profiler.ranges import reduce_timing, simple_timer, topk_reduce_ratio_min_max
from verl.utils.vision.multi_modal import take_fetched_bytes
from verl.workers.config.actor_critic import FSDPActorConfig
from verl.workers.config.actor_rollout_ref import FSDPRefConfig, McoreRefConfig, ref_class
from verl.workers.engine import BaseEngine, FSDPEngine
from verl.workers.engine.background_load import load_in_background
from verl.workers.engine.base import ModelOutput
from verl.workers.engine.passes import PassSpec
from verl.workers.roles import batching
from verl.workers.roles.accounting import begin_peak, memory_metrics, memory_of, mfu
from verl.workers.roles.base import AnyTrainedConfig, EngineRoleConfig, EngineWorker
from verl.workers.roles.losses import ppo_loss, select_tokens
from verl.workers.roles.own_actor import BasePPOActor, DataParallelPPOActor
from verl.workers.rollout import BaseRollout, begin_rollout, get_rollout_class
from verl.workers.rollout.base import STAYS_AWAKE
from verl.workers.rollout.engine_rope import rope_length
from verl.workers.sharding_manager import ServerSync, build_sharding_manager, complete

if TYPE_CHECKING:
    from verl.single_controller.base.actor import Actor
    from verl.workers.config import ActorRolloutRefConfig, HFModelConfig, OptimizerConfig, RefConfig, RolloutConfig
    from verl.workers.config.actor_critic import McoreActorConfig

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_ref", "actor_rollout_ref")


class ActorRolloutRefWorker(EngineWorker):
    """Trains, generates and scores with the policy; ``role`` says which of these this worker does.

    Args: ``config`` is the node ``actor_rollout_ref``; ``role`` is one of ``ROLES``.
    """

    def __init__(self, config: "ActorRolloutRefConfig | DictConfig", role: str, **kwargs: Any) -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {role!r}")
        super().__init__(timeout_s=config.nccl_timeout)
        self.config = config
        self._is_actor = "actor" in role
        self._is_rollout = "rollout" in role
        self._is_ref = role == "ref" or role.endswith("_ref")
        self.model_config: HFModelConfig = omega_conf_to_dataclass(config.model)
        self.rollout_config: RolloutConfig = omega_conf_to_dataclass(config.rollout)
        if self._is_actor:
            self.actor_config: FSDPActorConfig | McoreActorConfig = omega_conf_to_dataclass(config.actor)
        self._is_lora = self.model_config.lora_rank > 0  # then the actor without its adapters is the reference
        plays_ref = self._is_ref or self._is_lora
        ref = config.get("ref") if plays_ref else None
        self.ref_config = None if ref is None else build_node(ref, ref_class(ref))
        self._nodes: dict[str, tuple[HFModelConfig, EngineRoleConfig]] = {}
        self._engines: dict[str, BaseEngine] = {}
        self._actor: DataParallelPPOActor | None = None
        self._weight_sync: dict[str, float] = {}
        self._sync_timing: dict[str, float] = {}
        self._step: int | None = None
        self._servers: ServerSync | None = None
        self._begun: BaseRollout | None = None
        self._register_meshes()
        self.use_profilers(**self._profilers())
        # The driver may still be loading its data.
        folder = cached_folder(self.model_config.path or "")
        if folder is not None:
            read_ahead(folder)
        if self._is_rollout:
            with suppress(Exception):  # ``init_model`` raises it again
                get_rollout_class(self.rollout_config.name, self.rollout_config.mode).import_engine(self.rollout_config)

    def _register_meshes(self) -> None:
        if self._is_actor:
            self.register_engine_mesh("actor", self.actor_config)
        elif self._is_ref:
            self.register_engine_mesh("actor", self._ref_node)
        else:
            self.register_mesh("actor", 1)
        if self._is_rollout:
            infer_size = self.rollout_config.workers_per_engine
            if self.world_size % infer_size:
                raise WrongInput(
                    f"actor_rollout_ref.rollout.tensor_model_parallel_size x data_parallel_size = {infer_size} must "
                    f"divide the {self.world_size} workers"
                )
            self.register_mesh("rollout", infer_size)

    def _profilers(self) -> dict[str, ProfilerConfig | None]:
        """Return the profiler nodes of the roles that this worker plays, that of the actor first."""
        configs: dict[str, ProfilerConfig | None] = {}
        if self._is_actor:
            config = self.actor_config.profiler or ProfilerConfig()
            if config.tool == "torch_memory":  # the driver asks the actor for the snapshots of every role
                config = dataclasses.replace(config, enable=True)
            configs["actor"] = config
        if self._is_rollout:
            configs["rollout"] = self.rollout_config.profiler
        if self._is_ref or self._is_lora:
            configs["ref"] = self.ref_config.profiler if self.ref_config is not None else None
        return configs

    # ---- start

    @property
    def optimizer_nodes(self) -> "list[OptimizerConfig | DictConfig]":
        """The actor's optimizer nodes: in its typed configuration, and in ``config``, which a subclass may read."""
        return [self.actor_config.optim, self.config.actor.optim] if self._is_actor else []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the parts of the role: training engine, reference engine, rollout and sharding manager."""
        if self._is_rollout:
            self._begin_rollout()
        # Loading in the background is safe only if no user code runs meanwhile, which could read unloaded weights.
        is_plain = is_own(type(self)) and self.model_config.external_lib is None
        with load_in_background() if self._is_rollout and is_plain else nullcontext():
            if self._is_actor:
                self._build_actor()
            if self._is_ref:
                self._build_ref()
            if self._is_actor and self.actor_config.uses_full_kl:
                self.engine.set_reference(self.ref_engine if self._is_ref else None)
            if self._is_rollout:
                self._build_rollout(trust_remote_code=self.model_config.trust_remote_code)
        if self._is_actor and not self._is_rollout:
            bucket_bytes = self.rollout_config.update_weights_bucket_megabytes << 20
            self._servers = ServerSync(self.engine, bucket_bytes, self.config.nccl_timeout)
        if self._is_rollout:
            self.rollout.seeds = self._request_seeds()
            self.sharding_manager = build_sharding_manager(self.engine if self._is_actor else None, self.rollout)
            if self.rollout_config.share_weights:
                self.sharding_manager.share_weights()

    @property
    def _ref_node(self) -> FSDPRefConfig | McoreRefConfig:
        assert self.ref_config is not None
        return self.ref_config

    def _build_actor(self) -> None:
        config = self.actor_config
        self.engine = self._build("actor", self.model_config, config)
        dp_size = self.engine.get_data_parallel_size()
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        self.rows_per_step = batching.per_rank_mini_batch(
            key, config.ppo_mini_batch_size, self.rollout_config.n, dp_size
        )
        self.train_spec = batching.training_spec(config, dp_size)
        self.log_prob_spec = log_prob_spec(self.rollout_config, dp_size, self.rollout_config.temperature)
        if isinstance(self.engine, FSDPEngine) and isinstance(config, FSDPActorConfig):
            per_rank: dict[str, Any] = {"ppo_mini_batch_size": self.rows_per_step, "ppo_micro_batch_size": None}
            per_rank["ppo_micro_batch_size_per_gpu"] = self.train_spec.micro_batch_size
            self.actor = DataParallelPPOActor.around(self.engine, dataclasses.replace(config, **per_rank))
            if isinstance(self.config, DictConfig):
                # A subclass may give ``self.config.actor`` to its own actor, which counts rows of this rank.
                known = {name: value for name, value in per_rank.items() if name in self.config.actor}
                merged: Any = OmegaConf.merge(self.config, {"actor": known})
                self.config = merged

    @property
    def actor(self) -> DataParallelPPOActor:
        """The actor whose overridable methods run the passes of this worker; a subclass may set another one.

        Raises: RuntimeError on Megatron-Core, before ``init_model``, and for a worker that does not train.
        """
        if self._actor is None:
            raise RuntimeError(f"{type(self).__name__} has no actor: call init_model, with a role that trains on FSDP")
        return self._actor

    @actor.setter
    def actor(self, actor: DataParallelPPOActor) -> None:
        engine: Any = self.engine
        actor.run_in(engine)
        self._actor = actor

    def _build_ref(self) -> None:
        config = self._ref_node
        model_config = self.model_config
        if config.model_path:
            model_config = model_config.changed(config.model or {})
        self.ref_engine = self._build("ref", model_config, config)
        dp_size = self.ref_engine.get_data_parallel_size()
        self.ref_spec = log_prob_spec(config, dp_size, self.rollout_config.temperature)
        if not self._is_actor:
            self.engine = self.ref_engine

    def _build(self, role: str, model_config: "HFModelConfig", config: EngineRoleConfig) -> BaseEngine:
        """Return the engine of ``actor`` or ``ref``, with the model and optimizer of ``_build_model_optimizer``."""
        self._nodes[role] = (model_config, config)
        module, optimizer, scheduler, hf_config = self._build_model_optimizer(
            model_path=model_config.path,
            fsdp_config=config.engine,
            optim_config=config.optim if isinstance(config, AnyTrainedConfig) else None,
            override_model_config=model_config.override_config,
            use_remove_padding=model_config.use_remove_padding,
            use_fused_kernels=model_config.use_fused_kernels,
            enable_gradient_checkpointing=model_config.enable_gradient_checkpointing,
            trust_remote_code=model_config.trust_remote_code,
            use_liger=model_config.use_liger,
            role=role,
            enable_activation_offload=model_config.enable_activation_offload,
        )
        if role not in self._engines:  # the method of a subclass has built everything itself
            self._engines[role] = self.build_engine(
                "language_model", model_config, config, initialize=False, **self._rope_options(model_config)
            )
        engine = self._engines[role]
        engine.adopt(module, optimizer, scheduler)
        if role == "actor":
            self.actor_module = self.actor_module_fsdp = module
            self.actor_optimizer = optimizer
            self.actor_lr_scheduler = scheduler
            self.actor_model_config = hf_config
        else:
            self.ref_module = self.ref_module_fsdp = module
        return engine

    def _rope_options(self, model_config: "HFModelConfig") -> dict[str, Any]:
        """Return the length that selects the rollout's RoPE frequencies, if they depend on the length."""
        length = rope_length(self.rollout_config, model_config.hf_config)
        return {} if length is None else {"rope_length": length}

    def _build_model_optimizer(
        self,
        model_path: str | None = None,
        fsdp_config: Any = None,
        optim_config: Any = None,
        override_model_config: Mapping[str, Json] | None = None,
        use_remove_padding: bool | None = None,
        use_fused_kernels: bool | None = None,
        enable_gradient_checkpointing: bool | None = None,
        trust_remote_code: bool | None = None,
        use_liger: bool | None = None,
        role: str = "actor",
        enable_activation_offload: bool | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Build model, optimizer and schedule of ``actor`` or ``ref``; a subclass may change the result.

        Args: None stands for the value of the configuration. On Megatron-Core ``fsdp_config`` is the node ``megatron``.
        Returns: the model (on Megatron-Core a list of chunks), its optimizer and schedule (None for a reference), and
            the model's configuration.
        """
        model_config, config = self._nodes[role]
        asked = {
            "path": model_path,
            "override_config": override_model_config,
            "use_remove_padding": use_remove_padding,
            "use_fused_kernels": use_fused_kernels,
            "enable_gradient_checkpointing": enable_gradient_checkpointing,
            "trust_remote_code": trust_remote_code,
            "use_liger": use_liger,
            "enable_activation_offload": enable_activation_offload,
        }
        changes = {name: value for name, value in asked.items() if value not in (None, model_config[name])}
        if changes:
            model_config = model_config.changed(changes)
        own_nodes = {"optim": optim_config, "megatron" if "megatron" in config else "fsdp_config": fsdp_config}
        given = {name: node for name, node in own_nodes.items() if node is not None and node is not config[name]}
        if given:
            config = dataclasses.replace(config, **given)
        frozen = role == "actor" and self.actor_config.freeze_vision_tower
        rope = self._rope_options(model_config)
        engine: Any = self.build_engine("language_model", model_config, config, frozen, **rope)
        self._engines[role] = engine
        return engine.module, engine.optimizer, engine.lr_scheduler, model_config.hf_config

    def _begin_rollout(self) -> None:
        """Start the engine while this process builds the models, if the engine can start apart."""
        builds_its_own = type(self)._build_rollout is not ActorRolloutRefWorker._build_rollout
        name = self.rollout_config.name
        mode = self.rollout_config.mode
        if not builds_its_own and get_rollout_class(name, mode).starts_apart():
            self._begun = begin_rollout(self.rollout_config, self.model_config, has_trainer=self._is_actor)

    def _build_rollout(self, trust_remote_code: bool = False) -> None:
        """Start the generation engine, ``self.rollout``."""
        self.rollout = self._begun or begin_rollout(self.rollout_config, self.model_config, has_trainer=self._is_actor)
        self.rollout.wait_until_started()

    def _request_seeds(self) -> RequestSeeds:
        """Return the seeds of the requests whose caller sends none."""
        shards = self.world_size // self.rollout_config.workers_per_engine
        updates = (lambda: self.engine.schedule_steps) if self._is_actor else int
        return RequestSeeds(self.rollout_config.seed, self._mesh("rollout")[0], shards, updates)

    # ---- rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self, step: int | None = None) -> None:
        """Bring the rollout engine to the trainer's weights and keep it awake for the generation that follows.

        Nothing happens if it has them. ``generate_sequences`` does the same, so a caller may leave this out.
        """
        if self.sharding_manager.is_behind:
            begin_peak()
            with simple_timer("wake_and_sync", self._sync_timing):
                self.sharding_manager.sync(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_servers(self, handles: Mapping[str, "Actor"], step: int | None = None) -> dict[str, str]:
        """Send the weights to the standalone servers that do not have them, and let all of them answer requests.

        Args: the actors of the servers by name; the step of the run, for messages.
        Returns: why servers were lost, by name; on rank 0 only.
        """
        assert self._servers is not None, "only an actor without a rollout in its process sends to servers"
        begin_peak()
        with simple_timer("wake_and_sync", self._sync_timing):
            return self._servers.run(handles, step)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @DistProfiler.annotate(color="red", role="rollout_generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Bring the engine's weights up to date if they are not, and continue every prompt.

        Then the engine sleeps, unless the meta ``stays_awake`` says that the next call is another generation.
        """
        prompts.meta_info.setdefault("eos_token_id", self.model_config.eos_token_id)
        prompts.meta_info.setdefault("pad_token_id", self.model_config.pad_token_id)
        timing = self._sync_timing
        self._sync_timing = {}
        if not timing:  # otherwise the peak and the seconds began with the sync
            begin_peak()
        self._step = batching.BatchInfo.of(prompts).step
        with simple_timer("wake_and_sync", timing):
            complete(self.rollout_mode())
        behind = {}
        if self._is_actor:
            updates = self.engine.weights_version - self.rollout.weights_version
            behind = {"weight_sync/versions_behind": float(updates)}
        stays_awake = False
        try:
            with simple_timer("generate_sequences", timing):
                output = self.rollout.generate_sequences(prompts)
            stays_awake = bool(prompts.meta_info.get(STAYS_AWAKE))
        finally:
            with simple_timer("sleep", timing):
                if not stays_awake:
                    complete(self.trainer_mode())
        batch = tensors_of(output)
        lengths = batch["attention_mask"].sum(-1).tolist() if "attention_mask" in batch.keys() else None
        figures = self._generation_figures(timing, lengths, self.rollout_config.workers_per_engine)
        output.meta_info |= figures
        output.meta_info["metrics"] |= behind
        return output

    def _generation_figures(
        self, timing: dict[str, float], lengths: Sequence[int] | None, num_workers: int
    ) -> dict[str, dict[str, float]]:
        """Return ``timing`` and ``metrics`` of a generation; collective over the workers.

        Args: the seconds of each part, and the tokens of each sequence that ``num_workers`` have generated together.
        """
        seconds = timing["generate_sequences"]
        self.seconds_by_call["generation"] = self.seconds_by_call.get("generation", 0.0) + seconds
        ratio, shortest, longest = topk_reduce_ratio_min_max(seconds)
        reduced = reduce_timing(timing) | {
            "generation_timing/max": longest,
            "generation_timing/min": shortest,
            "generation_timing/topk_ratio": ratio,
        }
        used = memory_of("rollout")
        counter = self.flops_counters.get(id(self.engine)) if self._is_actor else None
        if counter is not None and lengths is not None:
            used["perf/mfu/rollout"] = mfu(counter, lengths, seconds, num_workers, forward_only=True)
        return {"timing": reduced, "metrics": self._weight_sync_metrics() | used}

    async def rollout_mode(self) -> None:
        """Give the devices and the current weights to the rollout."""
        await self.sharding_manager.give_to_rollout(self._step)

    async def trainer_mode(self) -> None:
        """Take the devices back from the rollout."""
        await self.sharding_manager.give_to_trainer()

    def _sleep_rollout(self) -> None:
        """Free the memory of a rollout that was synced but has not generated, as in a user's fork of verl."""
        if self._is_rollout and self.sharding_manager.is_awake:
            complete(self.trainer_mode())

    def _weight_sync_metrics(self) -> dict[str, float]:
        """Return the figures of the sync that brought the present weights, which an earlier call may have run."""
        last_sync = self.sharding_manager.last_sync if self._servers is None else self._servers.last_sync
        if last_sync:
            self._weight_sync = last_sync
        return {f"weight_sync/{name}": value for name, value in self._weight_sync.items() if name != "version"}

    def _last_generation(self) -> dict[str, float]:
        return self.rollout.last_generation if self._is_rollout else {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint; the rollout, which may share its weights, sleeps."""
        self._sleep_rollout()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    # ---- log-probabilities

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` (B, R); without adapters if meta ``is_lora`` is set."""
        without_adapter = batching.BatchInfo.of(data).without_adapter
        spec = dataclasses.replace(self.log_prob_spec, entropy="value")
        metrics: dict[str, float] = {}
        with self.accounted(metrics, "actor_infer", data):
            if self._overrides("compute_log_prob") and not without_adapter:
                output = self._infer_by_actor(data, spec)
            else:
                output = self._infer(self.engine, data, spec, without_adapter)
        meta_info = {"temperature": self.rollout_config.temperature, "metrics": metrics}
        if self._is_actor and not without_adapter:
            meta_info[OLD_LOG_PROBS_VERSION] = self.engine.weights_version
        return DataProto.from_dict(
            tensors={"old_log_probs": output["log_probs"], "entropys": output["entropy"]}, meta_info=meta_info
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="olive", role="ref_compute_log_prob")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` (B, R): the reference model, or the actor without its adapters."""
        metrics: dict[str, float] = {}
        engine, spec = (self.ref_engine, self.ref_spec) if self._is_ref else (self.engine, self.log_prob_spec)
        with self.accounted(metrics, "ref", data, engine=engine):
            output = self._infer(engine, data, spec, without_adapter=self._is_lora and not self._is_ref)
        meta_info = {"temperature": spec.temperature, "metrics": metrics}
        return DataProto.from_dict(tensors={"ref_log_prob": output["log_probs"]}, meta_info=meta_info)

    def _infer(self, engine: BaseEngine, data: DataProto, spec: PassSpec, without_adapter: bool) -> ModelOutput:
        self._sleep_rollout()
        with engine.disable_adapter() if without_adapter else nullcontext(), engine.eval_mode():
            return engine.infer_batch(data, spec)

    # ---- update

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", mini_batches=True)
    def update_actor(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` passes over this rank's shard and return metrics only."""
        config = self.actor_config
        self._sleep_rollout()
        spec = batching.policy_update_spec(self.train_spec, config, data, self.rollout_config.temperature)
        prepare = partial(select_tokens, config, self.engine)
        with self.ref_engine.eval_mode() if self._is_ref and config.uses_full_kl else nullcontext():
            if self._overrides("update_policy"):
                metrics = self._update_by_actor(data)
            else:
                metrics = self.update("actor", data, config, partial(ppo_loss, config), spec, prepare)
        metrics = finish_gap_metrics(metrics) | memory_metrics()
        # Multiply by the world size, because the driver averages metrics over ranks.
        if is_vision_config(self.model_config.hf_config):
            metrics["multi_modal/bytes_fetched"] = float(take_fetched_bytes() * self.world_size)
        return DataProto(meta_info={"metrics": metrics})

    # ---- an actor of a subclass, which computes by itself

    def _overrides(self, method: str) -> bool:
        """Whether a subclass has set an actor that overrides a method."""
        return self._actor is not None and getattr(type(self._actor), method) is not getattr(BasePPOActor, method)

    def _infer_by_actor(self, data: DataProto, spec: PassSpec) -> ModelOutput:
        self._sleep_rollout()
        data.meta_info |= spec.as_meta()
        with self.engine.eval_mode():
            log_probs, entropy = self.actor.compute_log_prob(data=data, calculate_entropy=True)
        assert entropy is not None
        return {"log_probs": log_probs.cpu(), "entropy": entropy.cpu()}

    def _update_by_actor(self, data: DataProto) -> dict[str, float]:
        data.meta_info.setdefault("temperature", self.rollout_config.temperature)
        metrics: dict[str, float] = {}
        version = self.engine.weights_version
        with self.accounted(metrics, "actor", data, self.actor_config.ppo_epochs), self.engine.train_mode():
            metrics |= reduce_metrics(self.actor.update_policy(data=data))
        if self.engine.weights_version == version:
            # The actor has stepped the optimizer itself, and the rollout must learn of the new weights.
            self.engine.weights_version += 1
        metrics["actor/lr"] = self.engine.lr_scheduler_step()
        return metrics


def log_prob_spec(node: "RolloutConfig | RefConfig", dp_size: int, temperature: float) -> PassSpec:
    """Return the options of a log-probability pass, from the ``log_prob_*`` keys of a node."""
    return PassSpec(
        node.log_prob_use_dynamic_bsz,
        batching.per_rank_micro_batch(node.log_prob_micro_batch_size_per_gpu, node.log_prob_micro_batch_size, dp_size),
        node.log_prob_max_token_len_per_gpu,
        temperature,
    )
