"""The typed configuration of a supervised run."""

from dataclasses import dataclass
from typing import Self

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.sft import as_engine_tree
from verl.utils.structured import omega_conf_to_dataclass, read_fields
from verl.workers.config import CheckpointConfig, HFModelConfig
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class DataOptions:
    """The keys of ``data`` that the trainer reads; the data sets read their own."""

    train_files: str | list[str]
    val_files: str | list[str] | None
    train_batch_size: int
    micro_batch_size_per_gpu: int | None
    max_token_len_per_gpu: int | None
    use_dynamic_bsz: bool
    pad_mode: str


@dataclass
class TrainerOptions:
    """Length of the run, records, validation and checkpoints."""

    default_local_dir: str
    default_hdfs_dir: str | None
    project_name: str
    experiment_name: str
    total_epochs: int
    total_training_steps: int | None
    logger: str | list[str]
    record_digests: bool
    report: bool
    seed: int
    save_freq: int | str
    test_freq: int | str
    max_ckpt_to_keep: int | None
    resume_mode: str
    resume_from_path: str | None
    device: str

    @property
    def prometheus(self) -> bool:
        """False: only a run on Ray exports metrics."""
        return False


@dataclass(frozen=True)
class SFTConfig:
    """A ``sft_trainer_engine`` tree with types; ``tree`` is the tree itself, which data sets and trackers read."""

    tree: DictConfig
    data: DataOptions
    trainer: TrainerOptions
    model: HFModelConfig
    engine: FSDPEngineConfig | McoreEngineConfig
    checkpoint: CheckpointConfig

    @classmethod
    def parse(cls, config: DictConfig) -> Self:
        """Parse a tree of either entry point.

        Raises: ConfigError when a value has the wrong type or breaks a rule.
        """
        tree = as_engine_tree(config)
        return cls(
            tree=tree,
            data=read_fields(DataOptions, tree.data),
            trainer=read_fields(TrainerOptions, tree.trainer),
            model=omega_conf_to_dataclass(tree.model),
            engine=omega_conf_to_dataclass(tree.engine),
            checkpoint=omega_conf_to_dataclass(tree.checkpoint),
        )

    def optimizer(self, total_steps: int) -> OptimizerConfig:
        """Return the optimizer's node for a run of ``total_steps``, which only the data set tells."""
        node = self.tree.optim.copy()
        OmegaConf.update(node, "total_training_steps", total_steps, force_add=True)
        return omega_conf_to_dataclass(node)
