"""Real runs of ``main_ppo`` in processes of their own, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest

from verl.utils.report.compare import compare_runs

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-m"]
VOLATILE = (
    "timing_s/",
    "time/",
    "timing_per_token_ms/",
    "tool_time/",
    "perf/",
    "weight_sync/",
    "fully_async/total_wait_time",
    "fully_async/update_overlap",
)
"""Metrics of time and memory: what two equal runs may differ in."""


@dataclass
class Run:
    """A finished run."""

    returncode: int
    output: str
    seconds: float
    folder: Path

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by training step, as the run's record has them."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        merged: dict[int, dict[str, float]] = {}
        for row in map(json.loads, lines):
            merged.setdefault(row["step"], {}).update(row["data"])
        return merged

    def numbers(self, step: int) -> dict[str, float]:
        """What of a step does not depend on the speed of the machine."""
        return {key: value for key, value in self.steps[step].items() if not key.startswith(VOLATILE)}


def assert_bit_for_bit(run: Run, whole: Run, steps: Iterable[int]) -> None:
    """Assert that a run that was resumed has the numbers and the digests of one that was not interrupted."""
    for step in steps:
        assert run.numbers(step) == whole.numbers(step), f"the numbers of step {step} differ"
    compared = compare_runs(whole.folder, run.folder)
    assert compared.by_digests and compared.difference is None, f"the runs differ: {compared.difference}"


class Workspace:
    """A folder with a tiny model and data, in which runs are made."""

    def __init__(self, folder: Path, preloaded_workers: dict[str, str] | None = None) -> None:
        self.preloaded_workers = preloaded_workers or {}
        sys.path.insert(0, str(REPOSITORY))
        from examples.tiny_model import make_tiny_model

        self.folder = folder
        self.model = make_tiny_model(str(folder / "model"), hidden_size=128, num_layers=2, seed=0)
        prompts = [{"role": "user", "content": f"say {i * 7919 % 1000} and {'more' * (i % 5)}"} for i in range(64)]
        rows = [
            {
                "data_source": "letters",
                "prompt": [prompt],
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": "letters"},
                "extra_info": {"index": i, "split": "train"},
            }
            for i, prompt in enumerate(prompts)
        ]
        pd.DataFrame(rows).to_parquet(folder / "train.parquet")
        pd.DataFrame(rows[:6]).to_parquet(folder / "test.parquet")
        pairs = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(16)]
        turns = [(pair["question"], pair["answer"]) for pair in pairs]
        talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
        pd.DataFrame(pairs).to_parquet(folder / "pairs.parquet")
        pd.DataFrame({"messages": talks}).to_parquet(folder / "conversations.parquet")
        truth = {"style": "rule", "ground_truth": "2"}
        answers = {"data_source": "openai/gsm8k", "responses": ["#### 2"], "reward_model": truth}
        pd.DataFrame([answers] * 4).to_parquet(folder / "answers.parquet")

    def overrides(self, name: str) -> dict[str, object]:
        """Return the smallest command that trains on one CPU worker."""
        return {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.folder / "train.parquet",
            "data.val_files": self.folder / "test.parquet",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 48,
            "data.max_response_length": 16,
            "data.dataloader_num_workers": 0,
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.model.use_remove_padding": True,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.dtype": "float32",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.temperature": 0.8,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
            "actor_rollout_ref.rollout.enforce_eager": True,
            "actor_rollout_ref.rollout.calculate_log_probs": True,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
            "actor_rollout_ref.nccl_timeout": 60,
            "custom_reward_function.path": REPOSITORY / "tests/special_e2e/rewards.py",
            "ray_kwargs.fork_workers": False if self.preloaded_workers else None,  # which are forks already
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 1,
            "trainer.logger": "[file]",
            "trainer.report": False,
            "trainer.total_epochs": 100,
            "trainer.total_training_steps": 4,
            "trainer.val_before_train": False,
            "trainer.test_freq": 1,
            "trainer.default_local_dir": self.folder / name,
        }

    def command(
        self, name: str, overrides: dict[str, object] | None = None, module: str = "verl.trainer.main_ppo"
    ) -> list[str]:
        """Return the command line of a run."""
        chosen = self.overrides(name) | (overrides or {})
        words = [f"{key}={'null' if value is None else value}" for key, value in chosen.items()]
        words.sort(key=lambda word: not word.startswith("--"))  # flags come before keys
        return [*PYTHON, module, *words]

    def start(
        self,
        name: str,
        overrides: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        module: str = "verl.trainer.main_ppo",
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a run in a session of processes, by way of the command ``wrapper`` if there is one."""
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "VERL_FILE_LOGGER_ROOT": str(self.folder)}
        return subprocess.Popen(
            [*wrapper, *self.command(name, overrides, module)],
            env=environment | self.preloaded_workers | (env or {}),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def train(
        self,
        name: str,
        overrides: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 600,
        fails: bool = False,
        module: str = "verl.trainer.main_ppo",
    ) -> Run:
        """Run to the end, or to the failure that is expected; nothing of the run is left alive."""
        started = time.time()
        with self.start(name, overrides, env, module) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                pytest.fail(f"{name} did not end within {timeout_s} s:\n{process.communicate()[0][-3000:]}")
        run = Run(process.returncode, output, time.time() - started, self.folder / name)
        assert bool(run.returncode) == fails, f"{name} ended with {run.returncode}:\n{output[-4000:]}"
        left = leftovers(process.pid)
        assert not left, f"{name} left processes behind: {left}"
        return run


def leftovers(session: int, patience_s: float = 90) -> list[str]:
    """Return the commands of a session that are still alive after a while; Ray's agents may take a minute to go."""
    deadline = time.time() + patience_s
    while True:
        found = psutil.process_iter(["name", "cmdline"])
        alive = [" ".join(p.info["cmdline"] or [p.info["name"]])[:300] for p in found if is_of_session(p, session)]
        if not alive or time.time() > deadline:
            return alive
        time.sleep(0.2)


def is_of_session(process: psutil.Process, session: int) -> bool:
    """Whether a process lives and belongs to the session of a run."""
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, preloaded_workers: dict[str, str]) -> Workspace:
    """One tiny model and data set for all runs."""
    return Workspace(tmp_path_factory.mktemp("e2e"), preloaded_workers)


def call(command: list[str], **env: str | Path) -> None:
    """Run a documented command with the Python of the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)} | {k: str(v) for k, v in env.items()}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}"


@pytest.fixture(scope="session")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data and a supervised model, as the quick start makes them, or those of DATA_DIR and MODEL_PATH."""
    given = {name: Path(os.environ[name]) for name in ("DATA_DIR", "MODEL_PATH") if name in os.environ}
    if len(given) == 2:
        return given
    root = tmp_path_factory.mktemp("learning")
    prepare = [sys.executable, "examples/data_preprocess/gsm8k.py", "--source", "synthetic", "--seed", "1"]
    call([*prepare, "--local_save_dir", str(root / "data")])
    call([sys.executable, "examples/tiny_model.py", "--save-dir", str(root / "base"), "--seed", "1"])
    data = {"DATA_DIR": root / "data"}
    call(["bash", "examples/sft/run_tiny_cpu.sh"], MODEL_PATH=root / "base", OUT_DIR=root / "sft", **data)
    step = (root / "sft" / "latest_checkpointed_iteration.txt").read_text().strip()
    return data | {"MODEL_PATH": root / "sft" / f"global_step_{step}" / "huggingface"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test of several runs take as long as each of them may."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1200))
