"""The typed configuration of a run: one dataclass per node, parsed once from the tree that Hydra composes."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from verl.algos.config import AlgoConfig
from verl.base_config import (
    BaseConfig,
    ConfigError,
    Violation,
    collected_violations,
    config_error,
    field_violation,
    matches,
    setting,
    type_hints,
)
from verl.trainer.config.keys import nearest
from verl.utils import envs
from verl.utils.dataset.config import DataConfig
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CustomRewardFunctionConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    HFModelConfig,
    McoreActorConfig,
    McoreCriticConfig,
    RewardModelConfig,
    RolloutConfig,
)
from verl.workers.config.ref import ref_class
from verl.workers.config.reward_model import WITHOUT_MODEL, with_targets

Tree = Mapping[str, Any]

TRACKERS = (
    "console",
    "file",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "tracking",
    "vemlp_wandb",
    "clearml",
    "trackio",
)


@dataclass
class TrainerConfig(BaseConfig):
    """Length of the run, devices, records, validation and checkpoints."""

    balance_batch: bool = setting(True, "reorder rows so that every worker gets as many tokens")
    total_epochs: int = setting(30, "passes over the training set", at_least=1)
    total_training_steps: int | None = setting(None, "training steps; null: epochs x batches per epoch", at_least=1)
    project_name: str = setting("verl_examples", "project in trackers and in the checkpoint folder", empty=False)
    experiment_name: str = setting("gsm8k", "run in trackers and in the checkpoint folder", empty=False)
    seed: int = setting(1, "seed of the order of the data and of every sampled response")
    logger: str | list[str] = field(default_factory=lambda: ["console", "wandb"])
    log_val_generations: int = setting(0, "validation samples shown in trackers", at_least=0)
    rollout_data_dir: str | None = setting(None, "folder for the responses of each training step")
    validation_data_dir: str | None = setting(None, "folder for the responses of each validation")
    record_samples: int = setting(6, "responses of each step that the record keeps", at_least=0)
    record_digests: bool = setting(True, "keep digests of batch, weights and random state")
    report: bool = setting(True, "write report.html at the end")
    prometheus: bool = setting(False, "export metrics for Prometheus")
    live_view: str = setting("auto", "view on a terminal", one_of=("auto", "table", "bar", "lines", "off"))
    nnodes: int = setting(1, "nodes", at_least=1)
    n_gpus_per_node: int = setting(8, "workers of each node", at_least=1)
    save_freq: int = setting(-1, "steps between checkpoints; 0 or less: none")
    esi_redundant_time: int = setting(0, "seconds of safety before rented capacity expires", at_least=0)
    resume_mode: str = setting("auto", "where to continue", one_of=("auto", "disable", "resume_path"))
    resume_from_path: str | None = setting(None, "global_step_<N> folder, with resume_mode=resume_path")
    val_before_train: bool = setting(True, "validate the starting weights")
    val_only: bool = setting(False, "end after that validation")
    test_freq: int = setting(-1, "steps between validations; 0 or less: none")
    critic_warmup: int = setting(0, "first step in which the actor is updated", at_least=0)
    default_hdfs_dir: str | None = setting(None, "remote folder that checkpoints are copied to")
    del_local_ckpt_after_load: bool = setting(False, "delete the checkpoint that was resumed from")
    default_local_dir: str = setting("checkpoints/verl_examples/gsm8k", "folder of the run", empty=False)
    max_actor_ckpt_to_keep: int | None = setting(None, "actor checkpoints kept; null: all", at_least=1)
    max_critic_ckpt_to_keep: int | None = setting(None, "critic checkpoints kept; null: all", at_least=1)
    remove_previous_ckpt_in_save: bool = setting(False, "deprecated: keep one checkpoint")
    ray_wait_register_center_timeout: float = setting(300, "seconds to wait for the workers to start", above=0)
    worker_call_timeout_s: float = setting(7200, "seconds that one call to the workers may take", above=0)
    device: str = setting("cuda", "device of the workers", one_of=("cuda", "cpu", "npu"))
    use_legacy_worker_impl: str = setting("auto", "every value means the same", one_of=("auto", "enable", "disable"))
    wandb_proxy: str | None = setting(None, "HTTPS proxy for wandb")

    def rules(self) -> Iterator[Violation]:
        """Yield unknown trackers."""
        if not isinstance(self.logger, list | tuple) or any(name not in TRACKERS for name in self.logger):
            if self.logger not in TRACKERS:
                yield Violation("logger", self.logger, f"must be a list of trackers out of {', '.join(TRACKERS)}")

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.n_gpus_per_node * self.nnodes


@dataclass
class RayConfig(BaseConfig):
    """The Ray cluster of the run."""

    ray_init: dict[str, Any] | None = setting(None, "arguments of ray.init")
    timeline_json_file: str | None = setting(None, "file for the Ray timeline at the end of the run")

    @property
    def is_local(self) -> bool:
        """Whether Ray is going to be started on this machine alone."""
        address = (self.ray_init or {}).get("address") or envs.read("RAY_ADDRESS")
        return (address or "local") == "local"


ABSENT = object()
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
    ray_kwargs: RayConfig

    @classmethod
    def parse(cls, config: DictConfig) -> "RunConfig":
        """Parse a tree; nodes and keys that are absent have their defaults.

        Rules between values are not applied: ``validate_config`` has applied them before the launch.

        Raises: ConfigError listing every value of the wrong type.
        """
        tree: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        parsed = parse_tree(tree)
        if parsed.mistyped:
            raise config_error(parsed.mistyped)
        return parsed.run

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term, in the reward or in the loss, asks for a reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def prompts_per_step(self) -> int:
        """The prompts of a training batch: ``data.train_batch_size`` with dynamic sampling, else a loader batch."""
        groups = self.algorithm.filter_groups
        return self.data.train_batch_size if groups and groups["enable"] else self.data.loader_batch_size

    def set_total_training_steps(self, steps: int) -> None:
        """Set the length of the learning-rate schedules, which is known once the data are loaded."""
        self.actor_rollout_ref.actor.optim.total_training_steps = steps
        if self.critic is not None:
            self.critic.optim.total_training_steps = steps


@dataclass(frozen=True)
class Parsed:
    """A parsed tree, what its nodes refuse, and the part of that whose values have the wrong type.

    In ``run`` a value of the wrong type is replaced by its default, so that the remaining rules can be applied.
    """

    run: RunConfig
    violations: list[Violation]
    mistyped: list[Violation]


def parse_tree(tree: Tree, use_critic: bool | None = None) -> Parsed:
    """Parse a resolved tree and collect everything that its nodes refuse.

    ``use_critic`` says whether a critic is trained; None follows the tree.
    """
    reader = _Reader()
    shared = _node(tree, "actor_rollout_ref")
    reward = _node(tree, "reward_model")
    algorithm = reader.node(tree, "algorithm", AlgoConfig)
    critic_node = _node(tree, "critic")
    if use_critic is None:
        use_critic = needs_critic(critic_node.get("enable"), algorithm.adv_estimator)
    ref = ref_class(_node(shared, "ref"))
    actor_rollout_ref = reader.build(
        {name: value for name, value in shared.items() if name in ("hybrid_engine", "nccl_timeout")}
        | {
            "actor": reader.node(shared, "actor", _actor_class(shared), "actor_rollout_ref"),
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
    if reward.get("enable") is True:
        reward = with_targets(reward)
    else:  # only the nodes in it are checked: nothing reads the other keys of a model that is not used
        reader.build({name: value for name, value in reward.items() if name not in WITHOUT_MODEL}, "reward_model")
        reward = {name: value for name, value in reward.items() if name in WITHOUT_MODEL}
    run = RunConfig(
        data=reader.node(tree, "data", DataConfig),
        trainer=reader.node(tree, "trainer", TrainerConfig),
        algorithm=algorithm,
        actor_rollout_ref=actor_rollout_ref,
        critic=reader.node(tree, "critic", _critic_class(critic_node)) if use_critic else None,
        reward_model=reader.node({"reward_model": reward}, "reward_model", RewardModelConfig),
        custom_reward_function=reader.node(tree, "custom_reward_function", CustomRewardFunctionConfig),
        global_profiler=reader.node(tree, "global_profiler", ProfilerConfig),
        ray_kwargs=reader.node(tree, "ray_kwargs", RayConfig),
    )
    return Parsed(run, reader.violations, reader.mistyped)


def parse_node(tree: Tree, cls: type[BaseConfig] | None = None, path: str = "") -> tuple[Any, list[Violation]]:
    """Parse one resolved node and return it with what it refuses.

    ``cls`` is its dataclass unless its ``_target_`` names one; ``path`` is the dotted key of the node.
    """
    reader = _Reader()
    return reader.build(tree, path, cls), reader.violations


def _node(tree: Tree, name: str) -> Tree:
    node = tree.get(name)
    return node if isinstance(node, Mapping) else {}


def _actor_class(shared: Tree) -> type[ActorConfig]:
    return McoreActorConfig if _node(shared, "actor").get("strategy") == "megatron" else FSDPActorConfig


def _critic_class(node: Tree) -> type[CriticConfig]:
    return McoreCriticConfig if node.get("strategy") == "megatron" else FSDPCriticConfig


class _Reader:
    """Builds dataclasses from mappings and keeps what they refuse.

    A node with a ``_target_`` has no other keys than its dataclass; a plain node may hold keys that recipes add.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.mistyped: list[Violation] = []

    def node(self, tree: Tree, name: str, cls: type[BaseConfig], prefix: str = "") -> Any:
        """Return the node ``name`` of a tree; its defaults, unchecked, if it is absent."""
        value = tree.get(name)
        if isinstance(value, Mapping):
            return self.build(value, f"{prefix}.{name}" if prefix else name, cls)
        return _default(cls)

    def build(self, value: Any, path: str, cls: type[BaseConfig] | None = None) -> Any:
        """Return the dataclass of a mapping, or what is not a node with the nodes in it."""
        if not isinstance(value, Mapping) or is_dataclass(value):
            return value
        is_strict = "_target_" in value
        own = self._target_class(value["_target_"], path) if is_strict else cls
        if is_strict and own is None:
            return None if cls is None else _default(cls)
        hints = {} if own is None else type_hints(own)
        children = {
            key: self.build(child, f"{path}.{key}" if path else str(key), _node_class(hints.get(key)))
            for key, child in value.items()
            if key != "_target_"
        }
        if own is None:
            return children
        known = [each.name for each in fields(own) if each.init]
        for key in [key for key in children if key not in known]:
            child = value[key]
            del children[key]
            if is_strict:
                similar = ", ".join(nearest(key, known)) or "none"
                expected = f"there is no such key; the nearest in this node: {similar}"
                self.violations.append(Violation(f"{path}.{key}", child, expected))
        return self._made(own, children, path, is_strict)

    def _made(self, cls: Any, children: dict[str, Any], path: str, is_strict: bool) -> Any:
        """Return the dataclass of the given values, without those of the wrong type."""
        hints = type_hints(cls) if issubclass(cls, BaseConfig) else {}
        external_lib = children.pop("external_lib", None)  # building the node would import it
        self.violations += external_lib_violations(path, external_lib)
        for key in [key for key in hints if key in children]:
            child = children[key]
            if child == "???" or matches(child, hints[key]):
                continue
            del children[key]
            if child is not None or is_strict or _node_class(hints[key]) is None:  # a plain node may be null
                wrong = field_violation(cls, key, child).under(path)
                self.mistyped.append(wrong)
                self.violations.append(wrong)
        with collected_violations() as refused:
            try:
                node = cls(**children)
            except ConfigError as error:  # a class of the user may raise by itself
                refused += error.violations
                node = None
        self.violations += [violation.under(path) for violation in refused]
        if external_lib is not None and node is not None:
            node.__dict__["external_lib"] = external_lib
        return node

    def _target_class(self, target: Any, path: str) -> Any:
        from hydra.utils import get_class

        try:
            cls = get_class(str(target))
        except Exception as error:  # Hydra wraps every failure of an import of the user's own module
            self.violations.append(Violation(f"{path}._target_", target, f"cannot be imported: {error}"))
            return None
        if not is_dataclass(cls):
            self.violations.append(Violation(f"{path}._target_", target, "must be a dataclass"))
            return None
        return cls


def _default(cls: type[BaseConfig]) -> BaseConfig:
    """Return a node with its defaults, also if they lack what must be given."""
    with collected_violations():
        return cls()


def _node_class(hint: Any) -> type[BaseConfig] | None:
    """Return the dataclass among the types of a field, None if its values are not nodes."""
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, type) and issubclass(kind, BaseConfig):
            return kind
    return None


def external_lib_violations(path: str, external_lib: Any) -> list[Violation]:
    """Return what is wrong with modules that workers import; here they need only exist."""
    names = [external_lib] if isinstance(external_lib, str) else [] if external_lib is None else external_lib
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        return [Violation(f"{path}.external_lib", external_lib, "must be the name of a module, or a list of names")]
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    expected = f"cannot find {', '.join(missing)}: write modules that are installed or on PYTHONPATH"
    return [Violation(f"{path}.external_lib", external_lib, expected)] if missing else []
