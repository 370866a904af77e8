"""The typed configuration of a run: one dataclass per node, parsed once from the tree that Hydra composes."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from omegaconf import DictConfig

from verl.algos.config import AlgoConfig
from verl.base_config import (
    MOST_SECONDS,
    MOST_SEED,
    BaseConfig,
    NodeReader,
    Tree,
    Violation,
    config_error,
    nearest,
    setting,
)
from verl.trainer.config.async_training import AsyncTrainingConfig
from verl.trainer.config.keys import ABSENT, tree_of
from verl.utils import envs
from verl.utils.dataset.config import DataConfig
from verl.utils.engine_arguments import ray_arguments
from verl.utils.observe.tracking import Tracking
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config import ActorRolloutRefConfig, CriticConfig, HFModelConfig, RolloutConfig
from verl.workers.config.actor_critic import FSDPActorConfig, FSDPCriticConfig, McoreActorConfig, McoreCriticConfig
from verl.workers.config.actor_rollout_ref import ref_class
from verl.workers.config.engine import DEVICES
from verl.workers.config.reward_model import WITHOUT_MODEL, CustomRewardFunctionConfig, RewardModelConfig

TRACKERS = Tracking.supported_backend
RESUME_MODES = ("auto", "disable", "resume_path")


def tracker_rules(logger: str | list[str]) -> Iterator[Violation]:
    """Yield unknown trackers in ``trainer.logger``."""
    names = [logger] if isinstance(logger, str) else logger
    if any(name not in TRACKERS for name in names):
        yield Violation("logger", logger, f"must be a list of trackers out of {', '.join(TRACKERS)}")


@dataclass
class TrainerConfig(BaseConfig):
    """Length of the run, devices, records, validation and checkpoints."""

    balance_batch: bool = setting(True, "reorder rows so that workers get similar numbers of tokens")
    lazy_columns: bool = setting(False, "leave columns of tokens with the workers")
    total_epochs: int = setting(30, "passes over the training set", at_least=1)
    total_training_steps: int | None = setting(None, "training steps; null: epochs x batches per epoch", at_least=1)
    project_name: str = setting("verl_examples", "project in trackers and in the checkpoint folder", empty=False)
    experiment_name: str = setting("gsm8k", "run in trackers and in the checkpoint folder", empty=False)
    seed: int = setting(1, "seed of the order of the data and of every sampled response", at_most=MOST_SEED)
    logger: str | list[str] = setting(["console", "wandb"], "trackers of metrics")
    log_val_generations: int = setting(0, "validation samples shown in trackers", at_least=0)
    rollout_data_dir: str | None = setting(None, "folder for the responses of each training step")
    validation_data_dir: str | None = setting(None, "folder for the responses of each validation")
    record_samples: int = setting(6, "responses of each step that the record keeps", at_least=0)
    record_digests: bool = setting(True, "keep digests of batch, weights and random state")
    timeline_steps: list[int] | None = setting([2], "training steps with a timeline; null: none")
    report: bool = setting(True, "write report.html at the end")
    prometheus: bool = setting(False, "export metrics for Prometheus")
    live_view: str = setting("auto", "view on a terminal", one_of=("auto", "table", "bar", "lines", "off"))
    nnodes: int = setting(1, "nodes", at_least=1)
    n_gpus_per_node: int = setting(8, "workers of each node", at_least=1)
    save_freq: int | Literal[False] = setting(-1, "steps between checkpoints; 0 or less, or false: none")
    esi_redundant_time: int = setting(0, "seconds of safety before rented capacity expires", at_least=0)
    save_on_sigterm_s: float | None = setting(
        None, "seconds after SIGTERM to save the last full step", above=0, at_most=MOST_SECONDS
    )
    resume_mode: str = setting("auto", "where to continue", one_of=RESUME_MODES)
    resume_from_path: str | None = setting(None, "global_step_<N> folder, with resume_mode=resume_path")
    trusted_classes: list[str] = setting([], "classes of yours that the loader state of a checkpoint may hold")
    val_before_train: bool = setting(True, "validate the starting weights")
    val_only: bool = setting(False, "end after that validation")
    test_freq: int | Literal[False] = setting(-1, "steps between validations; 0 or less, or false: none")
    critic_warmup: int = setting(0, "first steps, which train only the critic", at_least=0)
    default_hdfs_dir: str | None = setting(None, "remote folder that checkpoints are copied to")
    del_local_ckpt_after_load: bool = setting(False, "delete the checkpoint that was resumed from")
    default_local_dir: str = setting("checkpoints/verl_examples/gsm8k", "folder of the run", empty=False)
    max_actor_ckpt_to_keep: int | None = setting(None, "actor checkpoints kept; null: all", at_least=1)
    max_critic_ckpt_to_keep: int | None = setting(None, "critic checkpoints kept; null: all", at_least=1)
    remove_previous_ckpt_in_save: bool = setting(False, "deprecated: keep one checkpoint")
    ray_wait_register_center_timeout: float = setting(
        300, "seconds to wait for the workers to start", above=0, at_most=MOST_SECONDS
    )
    worker_call_timeout_s: float = setting(
        7200, "seconds that one call to the workers may take", above=0, at_most=MOST_SECONDS
    )
    device: str = setting("cuda", "device of the workers", one_of=DEVICES)
    use_legacy_worker_impl: str = setting("auto", "no effect", one_of=("auto", "enable", "disable"))
    wandb_proxy: str | None = setting(None, "HTTPS proxy for wandb")

    def rules(self) -> Iterator[Violation]:
        """Yield unknown trackers, and steps that are none."""
        yield from tracker_rules(self.logger)
        steps = self.timeline_steps or ()
        if any(isinstance(step, bool) or not isinstance(step, int) or step < 1 for step in steps):
            yield Violation("timeline_steps", self.timeline_steps, "must be null or a list of steps, each 1 or more")

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.n_gpus_per_node * self.nnodes


@dataclass
class RayConfig(BaseConfig):
    """The Ray cluster of the run."""

    ray_init: dict[str, Any] | None = setting(None, "arguments of ray.init")
    timeline_json_file: str | None = setting(None, "file for the Ray timeline at the end of the run")

    def rules(self) -> Iterator[Violation]:
        """Yield arguments that ``ray.init`` does not take; Ray has undocumented ones that begin with _."""
        given = {name: value for name, value in (self.ray_init or {}).items() if not name.startswith("_")}
        # Our YAML sets num_cpus; to get all names takes a while, since it parses Ray's sources.
        for name in given.keys() - {"num_cpus"}:
            if name not in ray_arguments():
                similar = ", ".join(nearest(name, ray_arguments())) or "none"
                expected = f"is no argument of ray.init; the nearest: {similar}"
                yield Violation(f"ray_init.{name}", given[name], expected)

    @property
    def address(self) -> str:
        """The address of the cluster to join; ``local`` if the run starts Ray on this machine only."""
        return str((self.ray_init or {}).get("address") or envs.read("RAY_ADDRESS") or "local")

    @property
    def is_local(self) -> bool:
        """Whether the run starts Ray on this machine only."""
        return self.address == "local"


@dataclass
class TrainingRayConfig(RayConfig):
    """The Ray cluster of a training run."""

    fork_workers: bool | None = setting(None, "start processes from one that has imported; null: if possible")


"""The value of a key that a tree or a dataclass does not have."""


def default_of(run: "RunConfig", key: str) -> Any:
    """Return the default of a dotted key, by the dataclass that holds it in this run; ABSENT if none does."""
    value: Any = run
    for name in key.split("."):
        if isinstance(value, BaseConfig):
            found = next((each for each in fields(value) if each.name == name), None)
            node = value.__dict__.get(name)
            if isinstance(node, BaseConfig):
                value = node
            elif found is None:
                return ABSENT
            else:
                value = found.default if found.default_factory is MISSING else found.default_factory()
        elif isinstance(value, Mapping):
            value = value.get(name, ABSENT)
        else:
            value = getattr(value, name, ABSENT)
    return value


def needs_critic(enable: bool | None, adv_estimator: str) -> bool:
    """Whether a critic is trained: ``critic.enable``, or if that is null whether the estimator is GAE."""
    return adv_estimator == "gae" if enable is None else enable


def needs_reference(use_kl_in_reward: bool, use_kl_loss: bool) -> bool:
    """Whether a KL term, in the reward or in the loss, asks for a reference policy."""
    return use_kl_in_reward or use_kl_loss


@dataclass(frozen=True)
class RunConfig:
    """A ``ppo_trainer`` tree with types: attributes are named as the keys of the YAML.

    The tree itself stays what recipes and forks read and write; keys that they add are not part of this. ``critic``
    is None if none is trained.
    """

    data: DataConfig
    trainer: TrainerConfig
    algorithm: AlgoConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig | None
    reward_model: RewardModelConfig
    custom_reward_function: CustomRewardFunctionConfig
    global_profiler: ProfilerConfig
    ray_kwargs: TrainingRayConfig
    async_training: AsyncTrainingConfig

    @classmethod
    def parse(cls, config: DictConfig) -> "RunConfig":
        """Parse a tree; nodes and keys that are absent have their defaults.

        Rules between values are not applied: ``validate_config`` has applied them before the launch.

        Raises: ConfigError listing every value of the wrong type.
        """
        tree = tree_of(config)
        run, reader = parse_tree(tree)
        if reader.mistyped:
            raise config_error(reader.mistyped)
        return run

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term, or the update of a recipe, asks for a reference policy."""
        return needs_reference(self.algorithm.use_kl_in_reward, self.actor_rollout_ref.actor.needs_reference)

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts in a training batch.

        It is ``data.train_batch_size`` where a step gathers prompts of several draws: with dynamic sampling, and in
        fully asynchronous training.
        """
        groups = self.algorithm.filter_groups
        gathers = (groups and groups["enable"]) or self.async_training.gathers_draws
        return self.data.train_batch_size if gathers else self.data.prompts_per_step

    def set_total_training_steps(self, steps: int) -> None:
        """Set the length of the learning-rate schedules, which is known once the data are loaded."""
        self.actor_rollout_ref.actor.optim.total_training_steps = steps
        if self.critic is not None:
            self.critic.optim.total_training_steps = steps


def parse_tree(tree: Tree, use_critic: bool | None = None) -> tuple[RunConfig, NodeReader]:
    """Parse a resolved tree; the reader holds everything that its nodes refuse.

    In the result a value of the wrong type is replaced by its default, so that the remaining rules can be applied.
    ``use_critic`` says whether a critic is trained; None follows the tree.
    """
    reader = NodeReader()
    shared = _node(tree, "actor_rollout_ref")
    reward = _node(tree, "reward_model")
    algorithm = reader.node(tree, "algorithm", AlgoConfig)
    critic_node = _node(tree, "critic")
    if use_critic is None:
        use_critic = needs_critic(critic_node.get("enable"), algorithm.adv_estimator)
    actor = McoreActorConfig if _node(shared, "actor").get("strategy") == "megatron" else FSDPActorConfig
    critic = critic_class(critic_node)
    ref = ref_class(_node(shared, "ref"))
    actor_rollout_ref = reader.build(
        {name: value for name, value in shared.items() if name in ("hybrid_engine", "nccl_timeout")}
        | {
            "actor": reader.node(shared, "actor", actor, "actor_rollout_ref"),
            "ref": reader.node(shared, "ref", ref, "actor_rollout_ref"),
            "rollout": reader.node(shared, "rollout", RolloutConfig, "actor_rollout_ref"),
            "model": reader.node(shared, "model", HFModelConfig, "actor_rollout_ref"),
        },
        "actor_rollout_ref",
        ActorRolloutRefConfig,
    )
    own_model = _node(shared, "ref").get("model")
    if isinstance(own_model, Mapping):
        strict = {"_target_": "verl.workers.config.HFModelConfig", **own_model}
        reader.build(strict, "actor_rollout_ref.ref.model", HFModelConfig)
    if reward.get("enable") is not True:
        # Only the nodes in it are checked: nothing reads the other keys of a model that is not used.
        reader.build({name: value for name, value in reward.items() if name not in WITHOUT_MODEL}, "reward_model")
        reward = {name: value for name, value in reward.items() if name in WITHOUT_MODEL}
    run = RunConfig(
        data=reader.node(tree, "data", DataConfig),
        trainer=reader.node(tree, "trainer", TrainerConfig),
        algorithm=algorithm,
        actor_rollout_ref=actor_rollout_ref,
        critic=reader.node(tree, "critic", critic) if use_critic else None,
        reward_model=reader.node({"reward_model": reward}, "reward_model", RewardModelConfig),
        custom_reward_function=reader.node(tree, "custom_reward_function", CustomRewardFunctionConfig),
        global_profiler=reader.node(tree, "global_profiler", ProfilerConfig),
        ray_kwargs=reader.node(tree, "ray_kwargs", TrainingRayConfig),
        async_training=reader.node(tree, "async_training", AsyncTrainingConfig),
    )
    return run, reader


def critic_class(node: Tree) -> type[CriticConfig]:
    """Return the dataclass of the node ``critic``, which its strategy chooses."""
    return McoreCriticConfig if node.get("strategy") == "megatron" else FSDPCriticConfig


def _node(tree: Tree, name: str) -> Tree:
    node = tree.get(name)
    return node if isinstance(node, Mapping) else {}
