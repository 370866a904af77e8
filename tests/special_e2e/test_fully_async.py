"""The recipe fully_async_policy in runs by its own entry: its bound, kill and resume, and the replay of its ledger."""

import json
import random
import time
from collections import Counter

import psutil
import pytest

from verl.errors import LedgerFileError
from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.history import unpacked
from verl.trainer.asynchronous.ledger import LedgerReader

from .conftest import Workspace, is_of_session, leftovers
from .counted_updates import digest
from .features import GAP
from .test_async_rollout import short_turns

MODULE = "recipe.fully_async_policy.fully_async_main"
DELAYED = "tests.special_e2e.delayed_runs"
ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 6
RECIPE = {
    "data.train_batch_size": 0,
    "rollout.n_gpus_per_node": 1,
    "rollout.total_rollout_steps": 8 * STEPS,
    "rollout.test_freq": -1,
    "trainer.total_training_steps": None,
    "trainer.test_freq": 3,
    "trainer.save_freq": 2,
    f"{ROLLOUT}.agent.num_workers": 2,
    "ray_kwargs.ray_init.num_cpus": 6,
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.staleness_threshold": 1.0,
    "async_training.max_off_policy_threshold": 1,
}


def train(workspace, name, overrides=None, **options):
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, RECIPE | (overrides or {}), env=env, module=MODULE, **options)


def audited(run, most_age=1):
    """Check the ledger of a run that has ended, and return its audit."""
    reader = LedgerReader(run.folder / "ledger.sqlite")
    reader.verify()
    audit = Audit.of(reader.events())
    assert audit.is_exact, audit.lines()
    assert sorted(audit.updates) == list(range(STEPS)) and max(audit.ages) <= most_age
    return audit


def assert_replays(workspace, name, run, overrides=None):
    """A replay ends by itself where weights differ."""
    follows = {"async_training.replay": run.folder / "ledger.sqlite", "trainer.save_freq": -1}
    replay = train(workspace, f"{name}_replay", (overrides or {}) | follows)
    assert len(replay.steps) == STEPS and "vLLMServer" not in replay.output


def test_a_killed_run_goes_on_and_its_ledger_is_replayed(workspace, tmp_path):
    fault = {"VERL_FAULT": "kill:update_actor:rank=0:step=4", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, "async_killed", env=fault, fails=True)
    before = LedgerReader(killed.folder / "ledger.sqlite")
    batches = {event.facts["update"]: event.facts["numbers"] for event in before.events("batch")}
    run = train(workspace, "async_killed")
    audit = audited(run)
    assert sorted(batches) == [0, 1, 2, 3]
    assert {update: audit.updates[update] for update in batches} == batches  # also that of the update that was killed
    reader = LedgerReader(run.folder / "ledger.sqlite")
    resumed = next(iter(reader.events("resumed"))).facts
    assert resumed["step"] == 2 and resumed["updates"] == [2, 3]
    weights = [(event.facts["update"], tuple(event.facts["weights"])) for event in reader.events("update")]
    assert len(weights) == STEPS + 1 and len(set(weights)) == STEPS  # update 2 twice, with the same weights
    for step, numbers in run.steps.items():
        assert numbers["fully_async/versions_behind/max"] <= 1
        assert numbers["fully_async/count/current_param_version"] == step - 1
        assert numbers["actor/grad_norm"] > 0
    assert max(numbers[GAP] for numbers in run.steps.values()) > 1e-3  # responses of older weights
    assert_replays(workspace, "async_killed", run)


VARIANTS = {
    "fsdp2": {"actor_rollout_ref.actor.strategy": "fsdp2"},
    "sglang": {f"{ROLLOUT}.name": "sglang"},
    "whole_responses": {"async_training.partial_rollout": False, "async_training.trigger_parameter_sync_step": 2},
    "decoupled": {
        "async_training.use_rollout_log_probs": False,
        "algorithm.rollout_is": True,
        "algorithm.rollout_is_threshold": 2.0,
        "async_training.max_off_policy_threshold": None,
        "async_training.staleness_threshold": 2.0,
    },
    "two_servers": {
        "rollout.n_gpus_per_node": 2,
        "async_training.require_batches": 2,
        "rollout.total_rollout_steps": 96,
    },
    "megatron": {
        "--config-name": "fully_async_ppo_megatron_trainer",
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
    },
}


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_replayed(workspace, name):
    run = train(workspace, f"async_{name}", VARIANTS[name])
    audited(run, most_age=2 if name == "decoupled" else 1)
    assert_replays(workspace, f"async_{name}", run, VARIANTS[name])


@pytest.mark.full
def test_the_main_trainer_has_the_mode_too(workspace):
    keys = {
        "async_training.mode": "fully_async",
        "actor_rollout_ref.hybrid_engine": False,
        f"{ROLLOUT}.mode": "async",
        f"{ROLLOUT}.n_gpus_per_node": 1,
        f"{ROLLOUT}.nnodes": 1,
    }
    keys |= {key: value for key, value in RECIPE.items() if not key.startswith("rollout.")}
    keys |= {"trainer.total_training_steps": STEPS}
    run = workspace.train("async_main", keys)
    audited(run)


@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_dies_is_replaced(workspace, tmp_path, servers):
    fault = {"VERL_FAULT": "kill:generate:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = train(workspace, f"async_server_{servers}", {"rollout.n_gpus_per_node": servers}, env=fault)
    assert (tmp_path / "fault").exists()
    audited(run)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("loop", ["delayed_turn", "delayed_tools"])
def test_a_killed_run_with_random_delays_is_replayed_with_others(tmp_path, loop, servers):
    """The whole run is killed once; the replay has no servers, and ends by itself where weights differ."""
    workspace = Workspace(tmp_path)
    name = f"async_{loop}_{servers}"
    keys = short_turns(tmp_path) | RECIPE | {"rollout.n_gpus_per_node": servers}
    keys |= {"trainer.record_digests": False, "actor_rollout_ref.model.external_lib": "tests.special_e2e.delayed_runs"}
    keys |= {f"{ROLLOUT}.agent.default_agent_loop": loop, f"{ROLLOUT}.agent.num_workers": 2}
    if loop == "delayed_tools":
        tools = tmp_path / "tools.yaml"
        tools.write_text(tools.read_text().replace("verl.tools.calculator_tool.Calc", f"{DELAYED}.SlowCalc"))
    path = workspace.folder / name / "ledger.sqlite"
    with workspace.start(name, keys, module=DELAYED) as process:
        assert lives_until(process, path, 220)
        kill_all(process)
    assert not leftovers(process.pid)
    run = workspace.train(name, keys, module=DELAYED, timeout_s=1200)
    audited(run)
    follows = {"async_training.replay": path, "trainer.save_freq": -1}
    replay = workspace.train(f"{name}_replay", keys | follows, module=DELAYED, timeout_s=1200)
    assert len(replay.steps) == STEPS and "vLLMServer" not in replay.output


KILLS = 10
PROMPTS, PASSES, SAMPLES = 64, 5, 4
LONG = {
    "rollout.total_rollout_steps": PROMPTS * PASSES,
    "trainer.save_freq": 3,
    "trainer.test_freq": -1,
    "trainer.logger": "[]",
    "actor_rollout_ref.model.external_lib": "tests.special_e2e.counted_updates",
}
TARGETS = {
    "driver": "ray::FullyAsyncTaskRunner",
    "trainer": "ray::WorkerDict",
    "rollouter": "ray::AgentLoopWorker",
    "server": "ray::vLLMServer",
}
INJECTED = {3: "kill:save_checkpoint", 6: "kill:weight_sync", 9: "kill:ledger_append"}


@pytest.mark.full
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("role", TARGETS)
def test_a_run_that_is_killed_again_and_again_trains_every_prompt_once(tmp_path, role):
    """One command that goes on where it stopped; every third kill falls into a checkpoint, a sync or a ledger write."""
    workspace = Workspace(tmp_path)  # its own processes, none of which is a fork of the tests'
    source = random.Random(role)
    name = f"async_kills_{role}"
    path = workspace.folder / name / "ledger.sqlite"
    counts = tmp_path / "counts.jsonl"
    kills = 0
    returncode = None
    while returncode != 0:
        before = kills
        point = INJECTED.get(kills)
        env = {"COUNTED_UPDATES": str(counts)}
        if point is not None:
            step = f":step={last_seq(path) + 60}" if "ledger" in point else ""
            env |= {"VERL_FAULT": point + step, "VERL_FAULT_FILE": str(tmp_path / f"fault_{kills}")}
        with workspace.start(name, RECIPE | LONG, env, MODULE) as process:
            if point is None:
                while kills < KILLS and kills not in INJECTED and lives_until(process, path, source.randint(30, 180)):
                    kill(process, TARGETS[role])
                    kills += 1
                if role == "server" and kills < KILLS:
                    kill_all(process)  # a run survives the death of a server, and the next kill needs a start
            output, _ = process.communicate(timeout=1800)
            returncode = process.returncode
        assert not leftovers(process.pid)
        if point is not None:
            assert (tmp_path / f"fault_{kills}").exists() and returncode != 0, f"{point} was not reached"
            kills += 1
        assert kills > before or returncode == 0, output[-3000:]
    assert kills == KILLS
    reader = LedgerReader(path)
    reader.verify()
    audit = Audit.of(reader.events())
    assert audit.is_exact and sorted(audit.updates) == list(range(PROMPTS * PASSES // 8)), audit.lines()
    assert max(audit.ages) <= 1, audit.lines()
    assert_counted(counts, reader, audit)


def last_seq(path):
    """Return the number of events of a ledger; 0 if there is none yet."""
    try:
        with LedgerReader(path) as reader:
            return reader.last_seq
    except LedgerFileError:
        return 0


def lives_until(process, path, count):
    """Wait for so many further events of a ledger; return whether the run still lives."""
    wanted = last_seq(path) + count
    while process.poll() is None and last_seq(path) < wanted:
        time.sleep(0.2)
    return process.poll() is None


def kill(run, words):
    """Kill the process of a run whose command has these words; a server may be on its way."""
    while run.poll() is None:
        for process in psutil.process_iter(["cmdline"]):
            if words in " ".join(process.info["cmdline"] or ()) and is_of_session(process, run.pid):
                process.kill()
                return
        time.sleep(0.2)
    pytest.fail(f"the run has ended, and no process was {words}")


def kill_all(run):
    """Kill all processes of a run, as a loss of its machine does."""
    for process in psutil.process_iter():
        if is_of_session(process, run.pid):
            process.kill()


def assert_counted(path, reader, audit):
    """The last attempt of each update had the rows that the ledger names, and each prompt as often as the data."""
    lines = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert sorted(lines) == [update + 1 for update in sorted(audit.updates)]
    prompts = Counter(prompt for line in lines.values() for prompt in line["prompts"])
    assert len(prompts) == PROMPTS and set(prompts.values()) == {PASSES * SAMPLES}
    rows = {}
    for event in reader.events("finished", with_payload=True):
        tensors = unpacked(event.payload, "the test", ()).batch
        (row,) = map(digest, tensors["input_ids"], tensors["attention_mask"])
        rows[event.facts["number"], event.facts["sample"]] = row
    for update, numbers in audit.updates.items():
        wanted = [rows[number, sample] for number in numbers for sample in range(SAMPLES)]
        assert sorted(lines[update + 1]["rows"]) == sorted(wanted), update
