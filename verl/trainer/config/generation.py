"""The configuration of offline generation: its types and its checks, without torch and Ray."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation, as_yaml, matches, parse_node, read_fields
from verl.trainer.config.rules.files import data_file_rules
from verl.trainer.config.run_config import RayConfig
from verl.utils.dataset.config import DataConfig
from verl.utils.fs import existing_part
from verl.utils.vision.limits import MediaConfig
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.config.engine import DEVICES, NCCL_TIMEOUT_S
from verl.workers.config.engines import media_engine
from verl.workers.config.model import path_problems, read_config_json
from verl.workers.config.overrides import override_problems
from verl.workers.config.tokenizer_files import tokenizer_problems
from verl.workers.rollout.engine_settings import media_settings

_MOST = 65536
"""Of samples, rows in a batch, nodes and workers of a node."""


@dataclass(frozen=True)
class PromptOptions:
    """The node ``data``: input and output, samples per prompt, and prompts per batch."""

    path: str
    prompt_key: str
    n_samples: int
    output_path: str
    batch_size: int
    apply_chat_template_kwargs: dict[str, Any]
    image_key: str | None
    video_key: str | None


@dataclass(frozen=True)
class WorkerOptions:
    """The node ``trainer``: number and device of the workers."""

    nnodes: int
    n_gpus_per_node: int
    device: str


@dataclass(frozen=True)
class GenerationConfig:
    """A ``generation`` tree with types; ``worker`` is the tree that a rollout worker parses."""

    worker: DictConfig
    data: PromptOptions
    trainer: WorkerOptions
    rollout: RolloutConfig
    model: HFModelConfig
    cluster: RayConfig
    media: MediaConfig

    @classmethod
    def parse(cls, config: DictConfig) -> Self:
        """Parse and check a tree. This imports no ``model.external_lib``.

        Raises: ConfigError listing everything that is wrong.
        """
        tree: Any = OmegaConf.to_container(config, resolve=True)
        tree["nccl_timeout"] = NCCL_TIMEOUT_S
        tree["model"] = {"_target_": "verl.workers.config.HFModelConfig", **tree["model"]}
        nodes, wrong = parse_node({name: tree[name] for name in ("rollout", "model")})
        cluster, wrong_cluster = parse_node(tree["ray_kwargs"], RayConfig, "ray_kwargs")
        media, wrong_media = parse_node(tree["data"].get("media") or {}, MediaConfig, "data.media")
        parsed = cls(
            worker=OmegaConf.create({name: tree[name] for name in ("model", "rollout", "actor", "nccl_timeout")}),
            data=read_fields(PromptOptions, config.data),
            trainer=read_fields(WorkerOptions, config.trainer),
            rollout=nodes["rollout"],
            model=nodes["model"],
            cluster=cluster,
            media=media,
        )
        violations = [*wrong, *wrong_cluster, *wrong_media, *parsed._violations({violation.key for violation in wrong})]
        if violations:
            raise ConfigError(violations)
        return parsed

    def media_settings(self) -> DataConfig:
        """Return the columns of images and videos, and the limits and processor arguments of the engine."""
        engine = media_engine(self.rollout.name)
        limits, options = media_settings(engine, self.rollout.engine_kwargs.get(engine) or {})
        return DataConfig(
            image_key=self.data.image_key,
            video_key=self.data.video_key,
            limit_images=self.rollout.limit_images,
            limit_mm_per_prompt=limits,
            mm_processor_kwargs=options,
            media=self.media,
        )

    def _violations(self, broken: set[str]) -> Iterator[Violation]:
        """Yield violations outside the nodes of rollout and model, whose wrong keys are ``broken``."""
        data = self.data
        rollout = self.rollout
        trainer = self.trainer
        yield from data_file_rules("data.path", data.path, required=True)
        if not matches(data.apply_chat_template_kwargs, dict):
            yield Violation("data.apply_chat_template_kwargs", data.apply_chat_template_kwargs, "must be a mapping")
        if "model.path" not in broken:
            path = self.model.path
            fields = read_config_json(path)
            changes = self.model.override_config
            problems = [*path_problems(path)] or [*tokenizer_problems(path, fields)]
            yield from (Violation("model.path", path, problem) for problem in problems)
            wrong = override_problems(fields, changes)
            yield from (Violation("model.override_config", as_yaml(changes), problem) for problem in wrong)
        for key in ("data.n_samples", "data.batch_size", "trainer.nnodes", "trainer.n_gpus_per_node"):
            value = attrgetter(key)(self)
            if not matches(value, int) or not 1 <= value <= _MOST:
                yield Violation(key, value, f"must be an integer in [1, {_MOST}]")
                return
        if data.n_samples > 1 and (rollout.temperature == 0 or not rollout.do_sample):
            unsampled = "rollout.temperature=0 or do_sample=false"
            expected = f"must be 1 without sampling ({unsampled}): all samples would be equal"
            yield Violation("data.n_samples", data.n_samples, expected)
        if rollout.mode != "sync":
            yield Violation("rollout.mode", rollout.mode, "must be sync: this command starts no server")
        if rollout.load_format == "dummy":
            yield Violation("rollout.load_format", "dummy", "waits for the weights of a trainer: write auto")
        if rollout.share_weights:
            yield Violation("rollout.share_weights", True, "needs a trainer, and this command has none: write false")
        if trainer.device not in DEVICES:
            yield Violation("trainer.device", trainer.device, f"must be one of {', '.join(DEVICES)}")
        workers = trainer.nnodes * trainer.n_gpus_per_node
        if rollout.workers_per_engine > 0 and workers % rollout.workers_per_engine:
            expected = f"times data_parallel_size={rollout.data_parallel_size} must divide the {workers} workers"
            yield Violation("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size, expected)
        yield from _output_violations(data)


def _output_violations(data: PromptOptions) -> Iterator[Violation]:
    output = os.path.abspath(os.path.expanduser(str(data.output_path)))
    if output == os.path.abspath(os.path.expanduser(str(data.path))):
        yield Violation("data.output_path", data.output_path, "must not be data.path")
    elif os.path.isdir(output):
        yield Violation("data.output_path", data.output_path, "is a folder: write the path of a parquet file")
    parent = existing_part(os.path.dirname(output))
    if not os.access(parent, os.W_OK) or not os.path.isdir(parent):
        expected = f"cannot be made: {parent} is not a writable folder: write another path"
        yield Violation("data.output_path", data.output_path, expected)
