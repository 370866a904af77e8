"""Training on the scores of a reward model, in the workers of the other roles and in separate workers."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from verl.utils.observe.timeline import timelines_of

from .conftest import Workspace

STEPS = 2
PHASE, DIES_AT = "reward", 2


OWN_POOL = {
    "reward_model.enable_resource_pool": True,
    "reward_model.n_gpus_per_node": 1,
    "reward_model.nnodes": 1,
    "ray_kwargs.ray_init.num_cpus": 2,  # on fewer cores the workers share them
}


def write_reward_model(workspace: Workspace) -> Path:
    """Write a small reward model with a tokenizer and a template of its own."""
    from tests.workers.roles.reward_cases import write_models

    write_models(workspace.folder / "reward")
    return workspace.folder / "reward" / "token"


def scored_by(model: Path, workspace: Workspace) -> dict[str, object]:
    """Return overrides for training on the scores of a reward model."""
    return {
        "data.return_raw_chat": True,
        "reward_model.enable": True,
        "reward_model.model.path": model,
        "reward_model.model.input_tokenizer": workspace.model,
        "reward_model.micro_batch_size_per_gpu": 8,
        "reward_model.max_length": 128,
    }


@pytest.fixture(scope="module")
def model(workspace):
    return write_reward_model(workspace)


@pytest.fixture(scope="module")
def changes(workspace, model):
    return scored_by(model, workspace) | {
        "algorithm.adv_estimator": "remax",  # whose greedy pass is scored too
        "reward_model.model.use_remove_padding": True,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": STEPS,
    }


@pytest.fixture(scope="module")
def shared(workspace, changes):
    return workspace.train(
        "reward-shared", changes | {"trainer.rollout_data_dir": workspace.folder / "reward-rollouts"}
    )


@pytest.fixture(scope="module")
def apart(workspace, changes, tmp_path_factory):
    """Score beside the other passes, until the worker of the reward model dies in the second step."""
    fault = tmp_path_factory.mktemp("reward") / "fault"
    pool = OWN_POOL | {"reward_model.launch_reward_fn_async": True}
    kill = {"VERL_FAULT": f"kill:compute_rm_score:rank=0:step={DIES_AT}", "VERL_FAULT_FILE": str(fault)}
    run = workspace.train("reward-apart", changes | pool, env=kill, fails=True)
    assert fault.read_text().split(maxsplit=1)[1] == f"compute_rm_score rank=0 step={DIES_AT}"
    return run


@torch.no_grad()
def test_a_reward_model_scores_training(workspace, model, shared):
    """Prompts are told by their text; of a response, special tokens are not written down: those rows differ."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    messages = {
        prompt[0]["content"]: list(prompt) for prompt in pd.read_parquet(workspace.folder / "train.parquet").prompt
    }
    tokenizer, scorer = AutoTokenizer.from_pretrained(model), AutoModelForTokenClassification.from_pretrained(model)
    for step in range(1, STEPS + 1):
        lines = (workspace.folder / "reward-rollouts" / f"{step}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len({row["score"] for row in rows}) > 16
        same = 0
        for row in rows:
            chat = [*messages[row["input"]], {"role": "assistant", "content": row["output"]}]
            ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
            same += abs(scorer(input_ids=ids).logits[0, -1, 0].item() - row["score"]) < 1e-4
        assert same > len(rows) / 2, f"{same} of {len(rows)}"
        scores = torch.tensor([row["score"] for row in rows])
        assert shared.steps[step]["critic/score/mean"] == pytest.approx(scores.mean().item(), abs=1e-5)
        assert shared.steps[step]["reward_model/truncated_ratio"] == 0
        assert shared.steps[step]["actor/grad_norm"] > 0
    assert "val-core/letters/reward/mean@1" in shared.steps[STEPS]  # these rows are judged by the rule


@pytest.mark.full  # trainer/ppo/test_resources.py places them, workers/roles/test_reward_model.py has their scores
def test_workers_of_its_own_change_no_number(shared, apart):
    assert sorted(apart.steps) == [1]
    assert apart.numbers(1) == shared.numbers(1)


@pytest.mark.full
def test_its_workers_score_while_agent_loops_generate(workspace, changes):
    """Each agent loop worker's trajectories are scored as soon as they are there; the numbers are those of a batch."""
    served = changes | {"actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.agent.num_workers": 2}
    late = workspace.train("reward-after", served | {"trainer.record_digests": True})
    early = workspace.train("reward-meanwhile", served | OWN_POOL)
    for step in range(1, STEPS + 1):
        after, meanwhile = late.numbers(step), early.numbers(step)
        assert after.keys() == meanwhile.keys()
        for name, value in after.items():
            if not name.startswith("perf/"):
                # fp32: a matrix product of other rows at the same time is rounded in another order
                assert meanwhile[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    (path,) = timelines_of(early.folder)
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    gen = max((each for each in events if each["name"] == "gen"), key=lambda each: each["dur"])
    scored = [each for each in events if each["name"] == "start_rm_score"]
    inside = [each for each in scored if gen["ts"] < each["ts"] and each["ts"] + each["dur"] < gen["ts"] + gen["dur"]]
    assert len(inside) == 2, "one call for each agent loop worker"


@pytest.mark.full
def test_the_death_of_its_worker_is_named(apart):
    message = apart.output[apart.output.rindex("\nError: ") :]
    assert "WorkerDiedError" in message and "rank 0" in message
    assert PHASE in message and f"step {DIES_AT}" in message and "reward_pool" in message and "rm" in message, message


JUDGE = """
def preprocess(rollout_question, rollout_response, ground_truth):
    return f"{rollout_question} | {rollout_response} | {ground_truth}"


def postprocess(text):
    return len(text.encode())
"""


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_a_generative_reward_model_scores_training(workspace, engine):
    """It is the policy's own model; a score is the length of what it writes."""
    if engine == "sglang":
        pytest.importorskip("sglang")
    (workspace.folder / "judge.py").write_text(JUDGE)
    overrides = {
        "data.return_raw_chat": True,
        "reward_model.enable": True,
        "reward_model.model_type": "generative",
        "reward_model.model.path": workspace.model,
        "reward_model.name": engine,
        "reward_model.dtype": "float32",
        "reward_model.prompt_length": 160,
        "reward_model.response_length": 12,
        "reward_model.tensor_model_parallel_size": 1,
        "reward_model.data_processor_config.path": workspace.folder / "judge.py",
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": -1,
        "trainer.rollout_data_dir": workspace.folder / f"judged-{engine}",
    }
    run = workspace.train(f"judged-by-{engine}", overrides | ({} if engine == "hf" else OWN_POOL))
    for step in range(1, STEPS + 1):
        lines = (workspace.folder / f"judged-{engine}" / f"{step}.jsonl").read_text().splitlines()
        scores = [json.loads(line)["score"] for line in lines]
        assert all(score == int(score) and 0 <= score <= 40 for score in scores) and len(set(scores)) > 2
        assert run.steps[step]["reward_model/failed_ratio"] == 0
        assert run.steps[step]["reward_model/truncated_ratio"] == 0
        assert run.steps[step]["actor/grad_norm"] > 0
