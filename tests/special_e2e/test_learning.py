"""The examples for CPU learn the task of the quick start from its warmed-up model, in every layout."""

import json
from pathlib import Path

import pytest

from .conftest import Run, call
from .features import GAP
from .verification import record

pytestmark = pytest.mark.full

LAYOUTS = {"one worker": (1, 1), "two workers": (2, 1), "two workers, TP 2": (2, 2)}
MEGATRON = {"Megatron-Core, TP 2": {"TP": "2", "PP": "1"}, "Megatron-Core, PP 2": {"TP": "1", "PP": "2"}}
STEPS = {"grpo": 20, "ppo": 40}
WITH_CRITIC = [
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=128",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.optim.lr=2e-4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "critic.model.path={MODEL_PATH}",
    "critic.model.enable_gradient_checkpointing=false",
    "critic.optim.lr=5e-4",
    "critic.ppo_epochs=2",
    "critic.use_dynamic_bsz=true",
    "critic.ppo_max_token_len_per_gpu=4096",
]
"""What makes the example for GRPO that for PPO."""
MEAN_GAP = "training/rollout_log_prob_diff_mean"
ACCURACY = "val-core/openai/gsm8k/reward/mean@1"
GRPO = "examples/grpo_trainer/run_tiny_cpu.sh"
ON_MEGATRON = "examples/grpo_trainer/run_tiny_megatron_cpu.sh"
WITH_SGLANG = {
    "SGLang, one worker": (GRPO, 1, {"WORKERS": "1"}),
    "SGLang, two workers, TP 2": (GRPO, 2, {"WORKERS": "2"}),
    "SGLang, Megatron-Core, TP 2": (ON_MEGATRON, 2, {"TP": "2", "PP": "1"}),
}
"""Layout -> script, tensor parallelism of the engine, and environment."""


def mean(run: Run, name: str, steps: range) -> float:
    return sum(run.steps[step][name] for step in steps) / len(steps)


def learn(
    script: str, algorithm: str, overrides: list[str], folder: Path, page: Path | None, name: str, **env: str
) -> None:
    """Train by an example and hold what it learnt to the limits; the row ``name`` of the page takes the figures."""
    last = STEPS[algorithm]
    common = [f"trainer.total_training_steps={last}", f"trainer.test_freq={last}", "trainer.save_freq=-1"]
    call(["bash", script, *common, *overrides], OUT_DIR=folder, **env)
    run = Run(0, "", 0.0, folder)
    before, after = run.steps[0][ACCURACY], run.steps[last][ACCURACY]
    gap = max(run.steps[step][GAP] for step in range(1, last + 1))
    losses = []
    if algorithm == "ppo":
        losses = [mean(run, "critic/vf_loss", range(1, 6)), mean(run, "critic/vf_loss", range(last - 4, last + 1))]
    shown = [f"{loss:.3f}" for loss in losses] or ["", ""]
    row = [f"{algorithm.upper()}, {name}", str(last), f"{before:.2f}", f"{after:.2f}", *shown, f"{gap:.1e}"]
    record(page, "## Learning", row)
    assert before < 0.5 and after >= 0.9
    assert gap < 1e-4
    if losses:
        assert losses[1] < 2 / 3 * losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", STEPS)
def test_the_example_learns(warmed_up, verification_page, tmp_path, algorithm, layout):
    """Greedy accuracy rises from under one half to nine tenths; with a critic, the value loss falls by a third."""
    workers, tensor_parallel = LAYOUTS[layout]
    overrides = [f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}"]
    script = f"examples/{algorithm}_trainer/run_tiny_cpu.sh"
    learn(script, algorithm, overrides, tmp_path, verification_page, layout, WORKERS=str(workers), **warmed_up)


@pytest.mark.parametrize(("layout", "sizes"), MEGATRON.items())
@pytest.mark.parametrize("algorithm", STEPS)
def test_the_example_learns_on_megatron_core(warmed_up, verification_page, tmp_path, algorithm, layout, sizes):
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    overrides = WITH_CRITIC if algorithm == "ppo" else []
    overrides = [each.format(**warmed_up) for each in overrides]
    learn(ON_MEGATRON, algorithm, overrides, tmp_path, verification_page, layout, **sizes, **warmed_up)


@pytest.mark.parametrize("layout", WITH_SGLANG)
def test_the_example_learns_with_sglang(warmed_up, verification_page, tmp_path, layout):
    """As with vLLM; log-probabilities of rollout and trainer differ by rounding alone."""
    script, overrides, env = with_sglang(layout)
    learn(script, "grpo", overrides, tmp_path, verification_page, layout, **env, **warmed_up)
    steps = Run(0, "", 0.0, tmp_path).steps
    assert max(steps[step][MEAN_GAP] for step in range(1, STEPS["grpo"] + 1)) < 1e-5


@pytest.mark.parametrize("layout", WITH_SGLANG)
def test_rollout_and_trainer_agree_at_a_lower_temperature(warmed_up, tmp_path, layout):
    """SGLang returns log-probabilities of the distribution that it draws from."""
    script, overrides, env = with_sglang(layout)
    overrides += ["actor_rollout_ref.rollout.temperature=0.7", "trainer.total_training_steps=4", "trainer.test_freq=-1"]
    call(["bash", script, *overrides, "trainer.save_freq=-1"], OUT_DIR=tmp_path, **env, **warmed_up)
    steps = Run(0, "", 0.0, tmp_path).steps
    gaps = {name: max(steps[step][name] for step in range(1, 5)) for name in (MEAN_GAP, GAP)}
    print(layout, gaps)
    assert gaps[MEAN_GAP] < 1e-5 and gaps[GAP] < 1e-4
    assert steps[4]["actor/grad_norm"] > 0


def with_sglang(layout: str) -> tuple[str, list[str], dict[str, str]]:
    """Return script, overrides and environment of a run with SGLang."""
    pytest.importorskip("sglang")
    script, tensor_parallel, env = WITH_SGLANG[layout]
    size = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}"
    return script, ["actor_rollout_ref.rollout.name=sglang", size], env


TOOLS = {
    "calculator": ("run_calculator_cpu.sh", "products", {}),
    "calculator, SGLang": ("run_calculator_cpu.sh", "products", {"ENGINE": "sglang"}),
    "search": ("search_r1_like/run_search_cpu.sh", "lockers", {"SEARCH_PORT": "8617"}),
}
"""Tool -> script below examples/sglang_multiturn, data source, and environment."""


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_is_learnt(verification_page, tmp_path, tool):
    """Supervised rows teach the form of a call; reinforcement teaches to make it; without the tool the model fails."""
    script, source, env = TOOLS[tool]
    if "ENGINE" in env:
        pytest.importorskip(env["ENGINE"])
    call(["bash", f"examples/sglang_multiturn/{script}"], OUT_DIR=tmp_path, **env)
    trained, without = (Run(0, "", 0.0, tmp_path / name) for name in ("grpo", "without_tool"))
    name, last = f"val-core/{source}/reward/mean@1", max(trained.steps)
    before, after, alone = trained.steps[0][name], trained.steps[last][name], without.steps[0][name]
    gap = max(trained.steps[step][GAP] for step in range(1, last + 1))
    row = [f"GRPO with a {tool}", str(last), f"{before:.2f}", f"{after:.2f}", "", "", f"{gap:.1e}"]
    record(verification_page, "## Learning", row)
    assert before <= 0.4 and after >= 0.9 and alone <= 0.3
    assert gap < 1e-4
    assert trained.steps[last]["tool_calls/count"] > trained.steps[1]["tool_calls/count"]


def test_mending_an_answer_is_learnt(tmp_path):
    """Supervised rows teach the form of a second attempt, which errs again; reinforcement teaches to mend it."""
    call(["bash", "examples/sglang_multiturn/run_gsm8k_interaction_tiny_cpu.sh"], OUT_DIR=tmp_path)
    steps = Run(0, "", 0.0, tmp_path / "grpo").steps
    assert steps[0][ACCURACY] <= 0.4 and steps[max(steps)][ACCURACY] >= 0.85
    last = (tmp_path / "grpo" / "validation" / f"{max(steps)}.jsonl").read_text().splitlines()
    mended = [row["score"] for row in map(json.loads, last) if len(row["turns"]) == 3]
    assert sum(mended) >= 0.4 * len(mended) > 0
