"""Generate responses for a file of prompts on rollout servers, through their OpenAI endpoint.

``python -m verl.trainer.main_generation_server data.train_files=... data.output_path=... actor_rollout_ref...``

The keys are those of the main trainer; ``actor_rollout_ref.rollout.n`` is the number of responses for a prompt. The
output is the file with one more column, ``responses``. Finished rows are kept next to it, as ``main_generation`` does.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main

if TYPE_CHECKING:
    from verl.trainer.generation_server import ServerGeneration
    from verl.utils.process.owner import Ownership


def run_generation_server(config: DictConfig) -> None:
    """Check the configuration, start Ray and the servers, generate and write ``data.output_path``."""
    from verl.trainer.config.invocation import only_checks
    from verl.trainer.run.launch import run_offline
    from verl.trainer.run.refusal import checked, end_of_checks
    from verl.utils.process.owner import Ownership

    with Ownership(takes=not only_checks()) as owner:
        generation = checked(lambda: prepare(config, owner))
        end_of_checks()
        run_offline(generation.config.cluster, generation.config.trainer.device, generation.run)


def prepare(config: DictConfig, owner: "Ownership") -> "ServerGeneration":
    """Check configuration, machine, model and rows, and let ``owner`` take the output folder.

    Raises: ValueError naming the keys, or file, row and column.
    """
    from verl.trainer.config.generation_server import parse_generation_server

    parsed = parse_generation_server(config)
    from verl.trainer.run.cluster import choose_cluster
    from verl.trainer.run.inputs import check_machine, check_model, check_remote, check_written_columns
    from verl.trainer.run.user_code import check_engine
    from verl.utils.engine_versions import STANDALONE

    trainer = parsed.trainer
    pools = {"trainer": (trainer.n_gpus_per_node, trainer.nnodes)}
    choose_cluster(parsed.cluster, {"trainer.nnodes": trainer.nnodes})
    engines = {"actor_rollout_ref.rollout.name": (parsed.rollout.name, STANDALONE)}
    check_machine(trainer.device, pools, parsed.cluster, engines)
    if parsed.cluster.is_local:
        files = {"actor_rollout_ref.model.path": [parsed.model.path], "data.train_files": [parsed.data.path]}
        check_remote(files)
    check_model("actor_rollout_ref.model.path", parsed.model.path)
    columns = {f"data.{kind}_key": (name, f"{kind}s") for kind, name in parsed.media_settings().media_columns().items()}
    check_written_columns(columns, [parsed.data.path])
    demand = parsed.rollout.demand(trainer.device)._replace(mode="async")
    check_engine(demand, parsed.rollout.name, parsed.cluster)
    output = Path(parsed.data.output_path).expanduser()
    owner.take("data.output_path", parsed.data.output_path, output.with_name(f".{output.name}.owner"))
    from verl.trainer.generation_server import ServerGeneration

    return ServerGeneration(parsed)


@hydra_main("generation_server")
def main(config: DictConfig) -> None:
    """Generate with the composed configuration."""
    run_generation_server(config)


if __name__ == "__main__":
    main()
