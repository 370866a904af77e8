"""No process of a run imports what it does not need: that costs CPU seconds at the start, and memory to the end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"vllm", "sglang", "megatron", "openai", "cv2", "av", "xgrammar", "outlines"}
PLOTS_AND_TRACKERS = {"matplotlib", "wandb", "mlflow", "tensorboard", "swanlab", "IPython", "scipy", "sklearn"}
DATA = {"datasets", "pandas", "pyarrow"}
MODELS = {"torch", "transformers", "tensordict", "accelerate", "tokenizers"}

CODE = """
import importlib, sys
for step in sys.argv[1:]:
    modules, _, forbidden = step.partition("!")
    for name in modules.split(","):
        importlib.import_module(name)
    found = sorted(set(forbidden.split(",")) & {name.partition(".")[0] for name in sys.modules})
    if found:
        sys.exit(f"{modules} import {', '.join(found)}")
"""


def step(modules: str, *forbidden: set[str]) -> str:
    return f"{modules}!{','.join(sorted(set.union(*forbidden)))}"


@pytest.mark.parametrize(
    "steps",
    [
        [
            step("verl.trainer.run.prestart", MODELS, ENGINES, DATA, PLOTS_AND_TRACKERS, {"ray", "hydra", "numpy"}),
            step(
                "verl.trainer.main_ppo,verl.trainer.preflight,verl.trainer.run.launch",
                MODELS, ENGINES, DATA, PLOTS_AND_TRACKERS, {"numpy"},
            ),
        ],
        [step("verl.utils.process.pool", MODELS, ENGINES, DATA, PLOTS_AND_TRACKERS, {"ray", "hydra", "numpy"})],
        [
            step("verl.workers.fsdp_workers", ENGINES, DATA, PLOTS_AND_TRACKERS),
            step("verl.trainer.main_ppo,verl.trainer.ppo.ray_trainer", ENGINES, PLOTS_AND_TRACKERS),
        ],
    ],
    ids=["launching process", "scorer", "worker before its engine, then trainer"],
)  # fmt: skip
def test_a_process_imports_nothing_heavy_that_it_does_not_need(steps: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *steps], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("file", ["verl/utils/process/guard.py", "verl/utils/fork_server/client.py"])
def test_a_process_without_site_packages_needs_the_standard_library_only(file: str) -> None:
    """They start at once and stay small."""
    code = f"import sys; exec(open({file!r}).read(), {{'__name__': 'it'}}); sys.exit('typing' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True)
