"""Whole runs on two standalone servers: tools fail and hang, servers and processes die, everything is late.

Nothing is missing without a line that says why, and what is made again is the same bit for bit.
"""

from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from tests.metrics_page import unknown
from verl.utils.observe.attempts import read_attempts
from verl.utils.observe.record import read_entries

from .conftest import assert_bit_for_bit
from .test_standalone_servers import APART

pytestmark = pytest.mark.full

ROLLOUT = "actor_rollout_ref.rollout"
PROMPTS, SAMPLES, STEPS = 8, 4, 3
SCHEMA = {
    "type": "function",
    "function": {
        "name": "luck",
        "description": "Answers with some luck.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


def changes_of(folder: Path, tool: str, loop: str, **more: object) -> dict[str, object]:
    """Return a run of three steps on two servers, whose trajectories call a tool once."""
    tools = folder / "tools.yaml"
    item = {"class_name": f"tests.special_e2e.unlucky.{tool}", "config": {"type": "native"}, "tool_schema": SCHEMA}
    tools.write_text(yaml.dump({"tools": [item]}))
    turns = {
        "enable": True,
        "format": "calls_with_its_text",
        "tool_config_path": tools,
        "max_assistant_turns": 2,
    }
    return APART | {
        f"{ROLLOUT}.mode": "async",
        f"{ROLLOUT}.n_gpus_per_node": 2,
        "ray_kwargs.ray_init.num_cpus": 6,
        "actor_rollout_ref.model.external_lib": "tests.special_e2e.unlucky",
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ROLLOUT}.agent.default_agent_loop": loop,
        "data.max_response_length": 64,
        "trainer.total_training_steps": STEPS,
        "trainer.record_digests": True,
        "trainer.test_freq": -1,
        **{f"{ROLLOUT}.multi_turn.{name}": value for name, value in turns.items()},
        **{f"{ROLLOUT}.{name}": value for name, value in more.items()},
    }


@pytest.mark.parametrize("policy, retries", [("retry", 12), ("drop", 0), ("replace", 2)])
def test_failing_and_hanging_tools_and_a_dead_server(workspace, tmp_path, policy, retries):
    """30 % of the calls fail, 5 % hang, and a server is killed: the run finishes, and every attempt has its line."""
    agent = {"agent.on_failure": policy, "agent.num_retries": retries, "agent.tool_timeout_s": 2}
    fault = {"VERL_FAULT": "kill:generate:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = workspace.train(f"unlucky-{policy}", changes_of(tmp_path, "UnluckyTool", "strict", **agent), env=fault)
    assert "generate rank=1 step=2" in (tmp_path / "fault").read_text()
    lines = defaultdict(list)
    for line in read_attempts(run.folder):
        lines[line["step"]].append(line)
    entries = read_entries(run.folder / "metrics.jsonl")
    assert sorted(lines) == sorted(run.steps) == [1, 2, 3]
    causes: Counter[str] = Counter()
    for step, of_step in lines.items():
        metrics, outcomes = run.steps[step], Counter(line["outcome"] for line in of_step)
        assert len({line["id"] for line in of_step}) == len(of_step) == metrics["attempts/started"]
        assert all(line["reason"] for line in of_step if line["outcome"] != "ok")
        last = {(line["uid"], line["sample"]): line["outcome"] for line in of_step}
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        for (uid, _), outcome in last.items():
            groups[uid][outcome] += 1
        trained = sum(entries[step]["response_length"]["counts"])
        if policy == "replace":
            whole = [uid for uid, group in groups.items() if group == {"ok": SAMPLES}]
            gone = [uid for uid, group in groups.items() if group == {"replaced": SAMPLES}]
            assert len(whole) == PROMPTS and len(whole) + len(gone) == len(groups)
            assert trained == PROMPTS * SAMPLES and metrics["attempts/replaced"] == outcomes["replaced"]
        else:
            assert [sum(group.values()) for group in groups.values()] == [SAMPLES] * PROMPTS
            assert set(last.values()) <= ({"ok"} if policy == "retry" else {"ok", "dropped"})
            assert trained == list(last.values()).count("ok")
            assert metrics["attempts/dropped"] == outcomes["dropped"] == PROMPTS * SAMPLES - trained
        causes.update(cause for line in of_step for cause in ("sandbox is full", "timeout") if cause in _text(line))
        assert len({server for line in of_step for server in line["servers"]}) == 2
    assert causes["sandbox is full"] > 0 and causes["timeout"] > 0
    assert not unknown(set(run.steps[3]))


def _text(line):
    return line["reason"] or ""


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory):
    """A run in which nothing dies, and its changes; each run has other delays."""
    folder = tmp_path_factory.mktemp("whole")
    server = {"agent.custom_async_server.path": Path(__file__).parent / "unlucky.py"}
    server["agent.custom_async_server.name"] = "SlowServer"
    changes = changes_of(folder, "SlowTool", "short", **server) | {"trainer.save_freq": 1}
    return workspace.train("late", changes), changes


@pytest.mark.parametrize(
    "fault, where",
    [
        ("kill:tool", "agent_loop_worker_0"),
        ("kill:weight_sync:rank=0:step=3", "phase weight_sync, step 3"),
        ("kill:trainer_update_actor:step=3", "phase update_actor, step 3"),
        ("kill:trainer_generate:step=3", "phase generate, step 3"),
    ],
    ids=["in a tool", "in a sync", "in an update", "in generation"],
)
def test_a_run_that_is_late_and_killed_resumes_bit_for_bit(workspace, whole, tmp_path, fault, where):
    """Tokens, rewards, losses and weights, with random delays in servers and tools."""
    run, changes = whole
    name = tmp_path.name
    struck = {"VERL_FAULT": fault, "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train(name, changes, env=struck, fails=True)
    assert (tmp_path / "fault").exists()
    message = killed.output[killed.output.rindex("\nError: ") :]
    assert where in message, message
    assert sorted(killed.steps) == [1, 2]
    assert_bit_for_bit(workspace.train(name, changes), run, (1, 2, 3))


def test_a_server_that_dies_changes_nothing(workspace, whole, tmp_path):
    """Its requests are made again on the other one."""
    run, changes = whole
    fault = {"VERL_FAULT": "kill:generate:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    struck = workspace.train("late-server", changes, env=fault)
    assert "generate rank=1 step=2" in (tmp_path / "fault").read_text()
    assert_bit_for_bit(struck, run, (1, 2, 3))
    lines = [line for line in read_attempts(struck.folder) if line["step"] == 2]
    assert max(len(line["servers"]) for line in lines) == 2
