"""The first command of README.md trains as it is written, from what the quick start leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from examples.data_preprocess.gsm8k import synthetic_tables
from examples.tiny_model import make_tiny_model

from .conftest import REPOSITORY, Run, leftovers

ON_A_CPU, ON_A_GPU = re.findall(
    r"```bash\n(python .*?)```",
    (REPOSITORY / "README.md").read_text().partition("## Train your own task")[2],
    re.DOTALL,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the data of the quick start, and its model without the warm-up."""
    tables = synthetic_tables(seed=1)
    data = tmp_path / "outputs/quickstart/data"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        pd.DataFrame(tables[split]).to_parquet(data / f"{split}.parquet")
    make_tiny_model(str(tmp_path / "outputs/quickstart/sft/global_step_200/huggingface"), seed=1)
    return tmp_path


def test_the_command_for_a_cpu_runs_as_written(checkout: Path) -> None:
    no_trackers = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = no_trackers | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "NETRC": "/dev/null",
        "WANDB_CONFIG_DIR": str(checkout),
    }
    started = subprocess.Popen(
        ["bash", "-c", ON_A_CPU],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = started.communicate()
    assert started.returncode == 0, output[-4000:]
    assert output.count("wandb is left out") == 1 and "step:10 - " in output, output[:4000]
    run = Run(0, output, 0.0, checkout / "checkpoints/verl_examples/gsm8k")
    assert max(run.steps) == 10
    assert not leftovers(started.pid)


def test_the_command_for_a_gpu_never_becomes_one_for_a_cpu(checkout: Path) -> None:
    """It names no device, and ends where there is no GPU."""
    assert "trainer.device" not in ON_A_GPU and "trainer.device=cpu" in ON_A_CPU
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    command = ["bash", "-c", ON_A_CPU.replace("trainer.device=cpu", "")]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=checkout, env=environment | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "trainer.device=cuda: this machine has no GPU" in done.stderr
