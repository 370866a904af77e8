"""Generate responses for a file of prompts: ``python -m verl.trainer.main_generation data.path=... model.path=...``.

The output is the file with one more column, ``responses``. Finished rows are kept next to it, so that the same command
continues after an interruption. Each response has its own seed, so the result is the same.
"""

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation, parse_node
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.files import data_file_rules

if TYPE_CHECKING:
    from verl.trainer.generation import Generation

logger = logging.getLogger(__name__)


def run_generation(config: DictConfig) -> None:
    """Check the configuration, start Ray, generate and write ``data.output_path``."""
    from verl.trainer.run.launch import checked, offline_session

    generation = checked(lambda: prepare(config))
    with offline_session(config.ray_kwargs, config.trainer.device):
        generation.run()


def prepare(config: DictConfig) -> "Generation":
    """Check configuration, machine, model and rows.

    Raises: ValueError naming the keys, or file, row and column.
    """
    violations = list(generation_violations(config))
    if violations:
        raise ConfigError(violations)
    from verl.trainer.run.inputs import check_machine, check_model
    from verl.trainer.run.launch import cluster_of

    trainer = config.trainer
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    check_machine(trainer.device, pools, cluster_of(config.ray_kwargs), {"rollout.name": config.rollout.name})
    check_model("model.path", config.model.path)
    from verl.trainer.generation import Generation, GenerationConfig

    return Generation(GenerationConfig.parse(config, worker_config(config)))


def worker_config(config: DictConfig) -> DictConfig:
    """Return the tree of a rollout worker, with a whole model node."""
    tree: Any = OmegaConf.to_container(config, resolve=True)
    tree["model"] = {"_target_": "verl.workers.config.HFModelConfig", **tree["model"]}
    from verl.workers.config.engine import NCCL_TIMEOUT_S

    nodes = {name: tree[name] for name in ("model", "rollout", "actor")}
    return OmegaConf.create(nodes | {"nccl_timeout": NCCL_TIMEOUT_S})


def generation_violations(config: DictConfig) -> Iterator[Violation]:
    """Yield the errors of a ``generation`` tree, without torch and Ray."""
    from verl.workers.config.engine import DEVICES
    from verl.workers.config.model import path_problems, tokenizer_problems

    data = config.data
    rollout = config.rollout
    trainer = config.trainer
    tree: Any = OmegaConf.to_container(worker_config(config), resolve=True)
    yield from parse_node({"rollout": tree["rollout"], "model": tree["model"]})[1]
    yield from data_file_rules("data.path", data.path, required=True)
    if isinstance(config.model.path, str):
        problems = [*path_problems(config.model.path)] or [*tokenizer_problems(config.model.path)]
        yield from (Violation("model.path", config.model.path, problem) for problem in problems)
    for key in ("data.n_samples", "data.batch_size", "trainer.nnodes", "trainer.n_gpus_per_node"):
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Violation(key, value, "must be an integer of 1 or more")
            return
    if data.n_samples > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        expected = "must be 1 without sampling (rollout.temperature=0 or do_sample=false): all samples would be equal"
        yield Violation("data.n_samples", data.n_samples, expected)
    if rollout.mode != "sync":
        yield Violation("rollout.mode", rollout.mode, "must be sync: this command starts no server")
    if rollout.load_format == "dummy":
        yield Violation("rollout.load_format", "dummy", "waits for the weights of a trainer: write auto")
    if trainer.device not in DEVICES:
        yield Violation("trainer.device", trainer.device, f"must be one of {', '.join(DEVICES)}")
    workers = trainer.nnodes * trainer.n_gpus_per_node
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.name != "hf" and isinstance(size, int) and size > 0 and workers % size:
        expected = f"times data_parallel_size={rollout.data_parallel_size} must divide the {workers} workers"
        yield Violation("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size, expected)
    yield from _output_violations(data)


def _output_violations(data: DictConfig) -> Iterator[Violation]:
    output = os.path.abspath(os.path.expanduser(str(data.output_path)))
    if output == os.path.abspath(os.path.expanduser(str(data.path))):
        yield Violation("data.output_path", data.output_path, "must not be data.path")
    elif os.path.isdir(output):
        yield Violation("data.output_path", data.output_path, "is a folder: write the path of a parquet file")
    parent = os.path.dirname(output)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK) or not os.path.isdir(parent):
        yield Violation("data.output_path", data.output_path, f"cannot be made: {parent} is not a writable folder")


@hydra_main("generation")
def main(config: DictConfig) -> None:
    """Generate with the composed configuration."""
    run_generation(config)


if __name__ == "__main__":
    main()
