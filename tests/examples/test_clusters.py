"""The launch templates for clusters compose, and the cells of the Ray notebook run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.special_sanity.test_examples import FAKES, SLURM, compose_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RAY = FAKES["ray"] + "if [ \"$1\" = status ]; then printf ' 1 node_a\\n 1 node_b\\n'; fi\n"


def launched(command: list[str], folder: Path, **variables: str) -> list[list[str]]:
    """Run a command in which all tools only note their arguments; return the notes."""
    for name, fake in (FAKES | {"ray": RAY}).items():
        (folder / name).write_text(fake)
        (folder / name).chmod(0o755)
    record = folder / "record"
    environment = os.environ | variables | {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


def run_of(notes: list[list[str]]) -> Any:
    """Return the configuration of the one run among the notes."""
    (words,) = [words for words in notes if "verl.trainer.main_ppo" in words]
    return compose_command(words)


def test_slurm(tmp_path):
    script = str(EXAMPLES / "slurm" / "ray_on_slurm.slurm")
    choice = {"SCRIPT": "examples/grpo_trainer/run_qwen2-7b.sh", "GPUS_PER_NODE": "4"}
    notes = launched(["bash", script, "data.train_batch_size=64"], tmp_path, **SLURM, **choice)
    starts = [words for words in notes if words[0] == "start"]
    assert sorted("--head" in words for words in starts) == [False, True]
    config = run_of(notes)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.data.train_batch_size) == (2, 4, 64)
    address = next(word for words in starts for word in words if word.startswith("--address="))
    assert config.ray_kwargs.ray_init.address == address.removeprefix("--address=")


@pytest.mark.parametrize("name", ["verl-ppo", "verl-grpo"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_skypilot(tmp_path, name, rank):
    task = yaml.safe_load((EXAMPLES / "skypilot" / f"{name}.yaml").read_text())
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": rank}
    given |= {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    (tmp_path / "verl-env" / "bin").mkdir(parents=True)
    (tmp_path / "verl-env" / "bin" / "activate").write_text("")
    notes = launched(["bash", "-c", task["run"]], tmp_path, HOME=str(tmp_path), **task["envs"], **given)
    if rank == "1":
        assert [words[:2] for words in notes] == [["start", "--address=10.0.0.1:6385"]]
        return
    config = run_of(notes)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert config.actor_rollout_ref.model.path == task["envs"]["MODEL_PATH"]
    files = [path for key in ("train_files", "val_files") for path in as_list(config.data[key])]
    prepared = re.findall(r"python3 (\S+) --local_save_dir (\S+)", task["setup"])
    folders = {folder.replace("$HOME", str(tmp_path)) for _, folder in prepared}
    assert {os.path.dirname(path) for path in files} == folders
    assert all((ROOT / script).is_file() for script, _ in prepared)


def as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def test_kuberay(tmp_path):
    job = yaml.safe_load((EXAMPLES / "kuberay" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:2] == ["bash", "-c"]
    notes = launched(["bash", "-c", command[2].removeprefix("cd /shared/verl && ")], tmp_path)
    config = run_of(notes)
    (workers,) = cluster["workerGroupSpecs"]
    assert config.trainer.nnodes == 1 + workers["replicas"]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.trainer.n_gpus_per_node
    assert config.data.train_files.startswith("/shared/data/") and config.trainer.logger == ["console"]


CHECKS = """
assert (first, second) == ([11, 12], [16, 22])
assert scores.batch["score"].tolist() == [1, 5, 9, 13, 17, 21]
assert scores.batch["rank"].tolist() == [0, 0, 0, 1, 1, 1]
assert doubled.flatten().tolist() == [2, 2, 2, 2]
assert counted == [3, 6] and shared.tolist() == [5, 5]
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path, preloaded_workers: dict[str, str]) -> None:
    """In a process of their own, because they start a Ray of their own."""
    notebook = json.loads((EXAMPLES / "ray" / "tutorial.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "tutorial.py"
    script.write_text("\n\n".join([*cells, CHECKS]))
    environment = os.environ | preloaded_workers
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
