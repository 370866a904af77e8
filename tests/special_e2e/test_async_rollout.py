"""Whole runs whose rollout serves: single-turn agent loops give what the synchronous rollout gives."""

import json
import re
from typing import Any

import pytest

from tests.metrics_page import unknown
from tests.utils.observe.test_timeline import check_nesting
from verl.utils.observe.record import read_entries
from verl.utils.observe.timeline import timelines_of

from . import shapes, test_vision
from .features import GAP

ASYNC = {"actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.agent.num_workers": 1}
SHORT = {"trainer.total_training_steps": 2, "trainer.record_digests": True, "trainer.test_freq": 2}
TWO = {"trainer.n_gpus_per_node": 2}
TENSOR_PARALLEL = TWO | {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    "layout, loops",
    [
        pytest.param(TENSOR_PARALLEL, 1, id="tensor parallel", marks=pytest.mark.full),
        pytest.param({"trainer.total_training_steps": 5}, 2, id="one worker", marks=pytest.mark.full),
        pytest.param(TWO | {"trainer.total_training_steps": 5}, 3, id="two workers", marks=pytest.mark.full),
    ],
)
def test_single_turn_loops_equal_the_synchronous_rollout(workspace, request, layout, loops):
    """Tokens, log-probabilities, rewards, metrics and weights are equal bit for bit."""
    name = request.node.callspec.id.replace(" ", "_")
    plain = workspace.train(f"sync_{name}", SHORT | layout)
    changes = ASYNC | {"actor_rollout_ref.rollout.agent.num_workers": loops}
    served = workspace.train(f"async_{name}", SHORT | layout | changes)
    for step in plain.steps:
        numbers = served.numbers(step)
        own = {key: numbers.pop(key) for key in list(numbers) if "num_turns" in key or key.startswith("attempts/")}
        assert numbers == plain.numbers(step), f"step {step}"
        assert own["attempts/started"] == 32 and own["attempts/failed"] == 0
    assert served.steps[2]["weight_sync/checksum_ok"] == 1
    assert {numbers["weight_sync/versions_behind"] for numbers in served.steps.values()} == {0}
    assert served.steps[2]["timing_s/agent_loop/generate_sequences/max"] > 0
    digests = [
        [phases_of(entry) for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in (plain, served)
    ]
    assert digests[0] == digests[1]


@pytest.mark.full
@pytest.mark.parametrize("action, what", [("kill", "died"), ("hang", "SIGSTOP holds its process")])
def test_a_lost_engine_ends_the_run_by_name(workspace, tmp_path, action, what):
    fault = {"VERL_FAULT": f"{action}:generate:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    limits = {
        "trainer.worker_call_timeout_s": 120,
        "trainer.test_freq": -1,
    }  # the models too are built within this limit
    run = workspace.train(f"async-{action}", ASYNC | TWO | limits, env=fault, fails=True)
    assert (tmp_path / "fault").exists(), run.output[-4000:]
    message = run.output[run.output.rindex("\nError: ") :]
    assert re.search(r"worker rank 1 of group 'global_pool' .* phase generate, step 2", message), message
    assert what in message, message


@pytest.mark.full
def test_prompts_with_images(workspace, tmp_path):
    """A prompt reaches the engine with its images, and training with the tokens that the engine saw."""
    shapes.write(tmp_path, train=32, test=4, supervised=4)
    model = test_vision.tiny(tmp_path, "qwen2_5_vl")
    changes = test_vision.overrides(tmp_path, model, steps=2, prompts=4, samples=2) | test_vision.LETTERS
    changes |= {"trainer.record_digests": True, "trainer.n_gpus_per_node": 1, "trainer.val_before_train": False}
    changes |= {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8}
    plain, served = (workspace.train(f"images-{len(mode)}", changes | mode) for mode in ({}, ASYNC))
    digests = [
        [phases_of(entry) for entry in read_entries(run.folder / "metrics.jsonl").values()] for run in (plain, served)
    ]
    assert digests[0] == digests[1]


def test_a_run_with_tools(workspace, tmp_path):
    """Training reads the sampled tokens of all turns and segments; dumps and metrics show the calls."""
    changes = short_turns(tmp_path) | TENSOR_PARALLEL | {"trainer.rollout_data_dir": tmp_path / "dumps"}
    run = workspace.train("tools", changes)
    for step in (1, 2):
        metrics = run.steps[step]
        assert metrics[GAP] < 1e-4 and metrics["training/rollout_log_prob_diff_mean"] < 1e-5  # whole trajectories, fp32
        rows = [json.loads(line) for line in (tmp_path / "dumps" / f"{step}.jsonl").read_text().splitlines()]
        check_segments(metrics, rows, 2)
        calls = [call for row in rows for turn in row["turns"] for call in turn.get("calls", [])]
        assert metrics["tool_calls/count"] == len(calls) > 0 and metrics["tool_calls/failed"] == 0
        assert all(call["text"] == "42" for call in calls)
        assert metrics["tokens/tool"] > 0 and metrics["critic/score/max"] >= 0
    assert not unknown(set(run.steps[2]))
    check_timeline(run, rows)


def check_timeline(run, rows):
    """The timeline of the last step has each phase, trajectory, turn, tool call and request, nested and in time."""
    (path,) = timelines_of(run.folder)
    trace = json.loads(path.read_text())
    check_nesting(trace)
    names = {each["pid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"}
    spans = [each | {"process": names[each["pid"]]} for each in trace["traceEvents"] if each["ph"] == "X"]
    assert {"trainer", "actor_rollout rank 0", "agent loops 0", "tool calculator"} < set(names.values())
    (step,) = [each for each in spans if each["name"] == "step"]
    of_trainer = [each["name"] for each in spans if each["process"] == "trainer"]
    assert {"step", "gen", "reward", "adv", "update_actor", "testing"} <= set(of_trainer)
    of_worker = {each["name"] for each in spans if each["process"] == "actor_rollout rank 0"}
    assert {"sync_weights", "wake_and_sync", "update_actor"} <= of_worker
    loops = [each for each in spans if each["process"] == "agent loops 0" and "-train-" in each["args"]["group"]]
    by_category = {name: [each for each in loops if each["cat"] == name] for name in ("trajectory", "turn", "tool")}
    assert len({each["args"]["group"] for each in by_category["trajectory"]}) == len(rows)
    assert all(each["args"]["outcome"] == "ok" for each in by_category["trajectory"])
    turns = [turn for row in rows for turn in row["turns"]]
    assert len(by_category["turn"]) == sum(turn["role"] == "assistant" for turn in turns)
    assert len(by_category["tool"]) == sum(len(turn.get("calls", [])) for turn in turns)
    gen = max((each for each in spans if each["name"] == "gen"), key=lambda each: each["ts"])  # the first one syncs
    for inner, outer in [(gen, step), *((each, gen) for each in loops)]:  # one host: one clock, but for the rounding
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01
    served = [each for each in spans if each["cat"] == "request" and "-train-" in each["args"]["group"]]
    for turn in by_category["turn"]:
        parts = {each["name"]: each for each in served if each["args"]["request"] == turn["args"]["request"]}
        queue, sample = parts["queue"], parts["sample"]
        assert turn["ts"] <= queue["ts"] + 0.01 and sample["dur"] > 0
        assert sample["ts"] + sample["dur"] <= turn["ts"] + turn["dur"] + 0.01


def short_turns(folder, **turns):
    """Let every trajectory call a tool, and every other one return a segment for each turn of the model."""
    tools = folder / "tools.yaml"
    tools.write_text("tools: [{class_name: verl.tools.calculator_tool.CalculatorTool, config: {type: native}}]")
    turns = {"enable": True, "format": "always_calls", "tool_config_path": tools, "max_assistant_turns": 2} | turns
    changes = ASYNC | SHORT | {f"actor_rollout_ref.rollout.multi_turn.{name}": value for name, value in turns.items()}
    return changes | {
        "actor_rollout_ref.model.external_lib": "tests.special_e2e.always_calls",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "short_turns",
        "data.max_response_length": 64,
    }


def check_segments(metrics, rows, most):
    """Each trajectory counts once, and its line of the dump shows all its segments, of which there are ``most``."""
    assert len(rows) == 32 and metrics["num_turns/max"] == 2 * most
    assert metrics["segments/max"] == most and 1 < metrics["segments/mean"] < most and metrics["segments/cut"] == 0
    segments = [1 + len(row["earlier_segments"] or ()) for row in rows]
    assert sum(segments) == metrics["segments/rows"] > 32 and {1, most} <= set(segments)
    roles = [turn["role"] for turn in rows[segments.index(most)]["turns"]]
    assert roles.count("segment") == most - 1 and roles.count("assistant") == most
    assert 0 < metrics["actor/grad_norm"] < 100


@pytest.mark.full
def test_a_trajectory_in_segments_trains_as_in_one_row(workspace, tmp_path):
    """On two workers with a critic: the first step has the numbers of a run whose loop does not cut trajectories."""
    changes = short_turns(tmp_path, max_assistant_turns=3) | TWO
    changes |= {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 0.9,
        "algorithm.lam": 0.8,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "custom_reward_function.name": "last_letter",  # a reward function reads the last segment only
        "critic.model.path": workspace.model,
        "critic.optim.lr": 1e-3,
        "critic.ppo_mini_batch_size": 8,
        "critic.ppo_micro_batch_size_per_gpu": 4,
    }
    whole, cut, small = (
        workspace.train(name, changes | {"trainer.rollout_data_dir": tmp_path / name} | more)
        for name, more in {
            "whole": {"actor_rollout_ref.rollout.agent.default_agent_loop": "whole_turns"},
            "cut": {},
            "small_steps": {"actor_rollout_ref.actor.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 2},
        }.items()
    )
    for run, name in ((cut, "cut"), (small, "small_steps")):
        for step in (1, 2):
            lines = (tmp_path / name / f"{step}.jsonl").read_text().splitlines()
            check_segments(run.steps[step], [json.loads(line) for line in lines], 3)
    compared = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm")
    compared += tuple(f"critic/{name}/mean" for name in ("score", "rewards", "advantages", "returns", "values"))
    expected = {name: whole.steps[1][name] for name in compared}
    # fp32: sums over other rows, and values of tokens whose context is in other batches
    assert {name: cut.steps[1][name] for name in compared} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert small.steps[1]["critic/score/mean"] == expected["critic/score/mean"]
    assert small.steps[1]["actor/grad_norm"] != expected["actor/grad_norm"], "two optimizer steps"


def phases_of(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the digests of a step by phase, without the metrics, and without the messages that agent loops get."""
    phases = {name: dict(parts) for name, parts in entry["phases"].items() if name != "metrics"}
    phases["prepare"].pop("raw_prompt", None)
    for parts in phases.values():
        parts.pop("rm_scores", None)  # of loops that score; the phase shape has the scores of both
    return phases
