"""Small recipes and the entropy recipe: they learn or run on CPU, and resume after a kill."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Run, assert_bit_for_bit, call

pytestmark = pytest.mark.full

LOSS = "actor_rollout_ref.actor.policy_loss"
COMMON = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "custom_reward_function.name": "two_letters",
    "trainer.total_training_steps": 4,
    "trainer.test_freq": -1,
    "trainer.save_freq": 2,
}
FILTER = {
    "data.gen_batch_size": 6,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
}
ENTROPY = "recipe.entropy.main_entropy"
MAIN = "verl.trainer.main_ppo"
RUNS = {
    "kl_cov": (ENTROPY, FILTER | {f"{LOSS}.loss_mode": "kl_cov", f"{LOSS}.kl_cov_ratio": 0.05}),
    "clip_cov": (
        ENTROPY,
        FILTER | {f"{LOSS}.loss_mode": "clip_cov", f"{LOSS}.clip_cov_ratio": 0.05, f"{LOSS}.clip_cov_lb": 0.0},
    ),
    "gspo": (MAIN, {f"{LOSS}.loss_mode": "gspo", "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}),
    "char_count": (
        MAIN,
        {
            "custom_reward_function.path": REPOSITORY / "recipe/char_count/reward_function.py",
            "custom_reward_function.name": "char_count_reward_function",
        },
    ),
}
ACCURACY = re.compile(r"val-core/.*(?:acc|reward)/mean@1")
REWARD = re.compile(r"val-aux/screens/reward/mean@1")


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_bit_for_bit(workspace, tmp_path, name):
    module, changes = RUNS[name]
    changes = COMMON | changes
    whole = workspace.train(f"{name}-whole", changes, module=module)
    fault = {"VERL_FAULT": "kill:update_actor:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train(f"{name}-killed", changes, env=fault, fails=True, module=module)
    assert "step 3" in killed.output[killed.output.rindex("\nError: ") :]
    resumed = workspace.train(f"{name}-killed", changes, module=module)
    assert sorted(resumed.steps) == [1, 2, 3, 4]
    assert_bit_for_bit(resumed, whole, resumed.steps)
    if module == ENTROPY:
        for numbers in whole.steps.values():
            assert numbers["actor/covariance/max"] > numbers["actor/covariance/mean"]
            assert 0 <= numbers["actor/covariance/share_in_bounds"] <= 1


def test_clip_cov_that_selects_nothing_trains_as_two_sided_clipping(workspace):
    """The same run with ``vanilla``, whose second bound is out of reach, has the same numbers up to rounding."""
    nothing = {f"{LOSS}.loss_mode": "clip_cov", f"{LOSS}.clip_cov_lb": 1e6, f"{LOSS}.clip_cov_ub": 2e6}
    plain = {"actor_rollout_ref.actor.clip_ratio_c": 1e6}
    runs = [
        workspace.train(f"cov-{name}", COMMON | FILTER | changes | {"trainer.save_freq": -1}, module=ENTROPY)
        for name, changes in (("nothing", nothing), ("plain", plain))
    ]
    for step in (1, 2):
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/covariance/mean"):
            assert runs[0].steps[step][key] == pytest.approx(runs[1].steps[step][key], rel=1e-3, abs=1e-6), key


def learn(
    script: str,
    folder: Path,
    *overrides: str,
    run: str = "",
    metric: re.Pattern[str] = ACCURACY,
    **env: str | Path,
) -> tuple[float, float]:
    """Run the CPU script of a recipe, which writes to ``run``; return a metric of validation before and after."""
    call(["bash", f"recipe/{script}", "trainer.save_freq=-1", *overrides], OUT_DIR=folder, **env)
    steps = Run(0, "", 0.0, folder / run).steps
    found = [(step, value) for step, values in steps.items() for key, value in values.items() if metric.fullmatch(key)]
    return min(found)[1], max(found)[1]


@pytest.mark.parametrize(("loss", "least"), [("kl_cov", 0.9), ("clip_cov", 0.75)])
def test_the_losses_of_entropy_learn(warmed_up, tmp_path, loss, least):
    """From 0.36: KL-Cov reached 0.98 and 0.99 in two runs, Clip-Cov, whose runs differ more, 0.95 and 0.86."""
    steps = ["trainer.total_training_steps=20", "trainer.test_freq=20"]
    before, after = learn("entropy/run_entropy_tiny_cpu.sh", tmp_path, *steps, LOSS=loss, **warmed_up)
    assert before < 0.5 and after >= least


def test_gspo_learns(warmed_up, tmp_path):
    steps = ["trainer.total_training_steps=20", "trainer.test_freq=20"]
    before, after = learn("gspo/run_gspo_tiny_cpu.sh", tmp_path, *steps, **warmed_up)
    assert before < 0.5 and after >= 0.85


@pytest.mark.parametrize(
    ("script", "run", "metric", "gain"),
    [
        ("char_count/run_char_count_tiny_cpu.sh", "grpo", ACCURACY, 0.05),  # from 0.26 to 0.37
        ("infigui-g1/run_infigui_tiny_cpu.sh", "rloo", REWARD, 0.2),  # from 0.47 to 0.78
    ],
)
@pytest.mark.timeout(1800)
def test_tasks_with_a_warm_up_learn(tmp_path, script, run, metric, gain):
    before, after = learn(script, tmp_path, run=run, metric=metric)
    assert after > before + gain


@pytest.mark.timeout(1800)
def test_running_code_is_learnt(tmp_path):
    """Supervised rows teach the form of a call, reinforcement to make it; without the tool the trained model fails."""
    call(["bash", "recipe/retool/run_retool_tiny_cpu.sh"], OUT_DIR=tmp_path)
    trained, without = (Run(0, "", 0.0, tmp_path / name).steps for name in ("grpo", "without_tool"))
    accuracy, last = "val-core/powers/acc/mean@1", max(trained)
    assert trained[0][accuracy] <= 0.4 and trained[last][accuracy] >= 0.9 and without[0][accuracy] <= 0.1
    assert trained[last]["tool_calls/count"] > trained[1]["tool_calls/count"]


@pytest.mark.parametrize("agent", ["math_expression", "math_expression_endpoint"])
@pytest.mark.timeout(1200)
def test_an_agent_of_langgraph_learns_to_call_its_tool(tmp_path, agent):
    """Supervised rows teach the form of a call, and mostly answer without one; reinforcement teaches to make it.

    The second agent knows nothing of verl: it has a client of the OpenAI API, and trains through the endpoint.
    """
    pytest.importorskip("langgraph", reason="the extra langgraph is not installed")
    script = "langgraph_agent/example/run_math_expression_tiny_cpu.sh"
    before, after = learn(script, tmp_path, run="grpo", AGENT=agent)
    assert before <= 0.4 and after >= 0.9
    steps = Run(0, "", 0.0, tmp_path / "grpo").steps
    assert all(steps[step]["training/rollout_log_prob_diff_max"] < 1e-4 for step in range(1, max(steps) + 1))
    assert steps[max(steps)]["num_turns/mean"] > steps[1]["num_turns/mean"]


@pytest.mark.timeout(1200)
def test_a_model_learns_when_to_ask_its_user(tmp_path):
    """From 0.46 over both kinds of requests: it asks where it has to, and only there, since each token costs 0.01."""
    asking = re.compile(r"val-core/has_to_be_asked/reward/mean@1")
    script = "collabllm/run_collabllm_tiny_cpu.sh"
    before, after = learn(script, tmp_path, run="grpo", metric=asking, PORT="8618")
    assert before < 0.1 and after > 0.8
    steps = Run(0, "", 0.0, tmp_path / "grpo").steps
    assert steps[max(steps)]["val-core/says_it/reward/mean@1"] > 0.9


@pytest.mark.timeout(1200)
def test_looking_is_learnt(tmp_path):
    """Supervised rows teach what a zoom shows, and half of them guess; reinforcement teaches to look, and where."""
    before, after = learn("deepeyes/run_deepeyes_tiny_cpu.sh", tmp_path, run="grpo", JUDGE_PORT="18911")
    assert before <= 0.4 and after >= 0.9
    steps = Run(0, "", 0.0, tmp_path / "grpo").steps
    assert steps[max(steps)]["tool_calls/count"] > steps[1]["tool_calls/count"]


def scores_printed(script: str, folder: Path) -> list[dict[str, float]]:
    """Run a script that ends with an evaluation, and return the scores that it prints."""
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", f"recipe/{script}"],
        cwd=REPOSITORY,
        env=environment | {"OUT_DIR": str(folder), "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"test_score/')]


def test_the_evaluation_of_r1_runs_without_a_network(tmp_path):
    (scores,) = scores_printed("r1/run_r1_tiny_cpu.sh", tmp_path)
    assert len(scores) == 5 and all(0 <= score <= 1 for score in scores.values())


def test_supervised_training_on_solutions_raises_the_score(tmp_path):
    before, after = scores_printed("open_math_reasoning/run_open_math_tiny_cpu.sh", tmp_path)
    assert all(score == 0 for score in before.values()) and all(score >= 0.5 for score in after.values())
