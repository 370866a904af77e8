"""Generate responses for a file of prompts: ``python -m verl.trainer.main_generation data.path=... model.path=...``.

The output is the file with one more column, ``responses``. Finished rows are kept next to it, so that the same command
continues after an interruption. Each response has its own seed, so the result is the same.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main

if TYPE_CHECKING:
    from verl.trainer.generation import Generation
    from verl.utils.process.owner import Ownership


def run_generation(config: DictConfig) -> None:
    """Check the configuration, start Ray, generate and write ``data.output_path``."""
    from verl.trainer.config.invocation import only_checks
    from verl.trainer.run.launch import run_offline
    from verl.trainer.run.refusal import checked, end_of_checks
    from verl.utils.process.owner import Ownership

    with Ownership(takes=not only_checks()) as owner:
        generation = checked(lambda: prepare(config, owner))
        end_of_checks()
        run_offline(generation.config.cluster, generation.config.trainer.device, generation.run)


def prepare(config: DictConfig, owner: "Ownership") -> "Generation":
    """Check configuration, machine, model and rows, and let ``owner`` take the output folder.

    Raises: ValueError naming the keys, or file, row and column.
    """
    from verl.trainer.config.generation import GenerationConfig

    parsed = GenerationConfig.parse(config)
    from verl.trainer.run.cluster import choose_cluster
    from verl.trainer.run.inputs import check_machine, check_model, check_remote, check_written_columns
    from verl.trainer.run.user_code import check_engine

    trainer = parsed.trainer
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    choose_cluster(parsed.cluster, {"trainer.nnodes": trainer.nnodes})
    check_machine(trainer.device, pools, parsed.cluster, {"rollout.name": (parsed.rollout.name, "sync")})
    if parsed.cluster.is_local:
        check_remote({"model.path": [parsed.model.path], "data.path": [parsed.data.path]})
    check_model("model.path", parsed.model.path)
    columns = {f"data.{kind}_key": (name, f"{kind}s") for kind, name in parsed.media_settings().media_columns().items()}
    check_written_columns(columns, [parsed.data.path])
    check_engine(parsed.rollout.demand(trainer.device, "rollout"), parsed.rollout.name, parsed.cluster)
    output = Path(parsed.data.output_path).expanduser()
    owner.take("data.output_path", parsed.data.output_path, output.with_name(f".{output.name}.owner"))
    from verl.trainer.generation import Generation

    return Generation(parsed)


@hydra_main("generation")
def main(config: DictConfig) -> None:
    """Generate with the composed configuration."""
    run_generation(config)


if __name__ == "__main__":
    main()
