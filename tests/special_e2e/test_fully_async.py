"""The recipe fully_async_policy in runs by its own entry: its bound, kill and resume, and the replay of its ledger."""

import random
import time

import psutil
import pytest

from verl.errors import LedgerFileError
from verl.trainer.asynchronous.audit import Audit
from verl.trainer.asynchronous.ledger import LedgerReader

from .conftest import Workspace, is_of_session, leftovers
from .features import GAP

MODULE = "recipe.fully_async_policy.fully_async_main"
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


KILLS = 10
LONG = {"rollout.total_rollout_steps": 8 * 40, "trainer.save_freq": 3, "trainer.test_freq": -1, "trainer.logger": "[]"}
TARGETS = {
    "driver": "ray::FullyAsyncTaskRunner",
    "trainer": "ray::WorkerDict",
    "rollouter": "ray::AgentLoopWorker",
    "server": "ray::vLLMServer",
}
INJECTED = {3: "kill:save_checkpoint", 6: "kill:weight_sync", 9: "kill:ledger_append"}


@pytest.mark.full
@pytest.mark.parametrize("role", TARGETS)
def test_a_run_that_is_killed_again_and_again_trains_every_prompt_once(tmp_path, role):
    """One command that goes on where it stopped; every third kill falls into a checkpoint, a sync or a ledger write."""
    workspace = Workspace(tmp_path)  # its own processes, none of which is a fork of the tests'
    source = random.Random(role)
    name = f"async_kills_{role}"
    path = workspace.folder / name / "ledger.sqlite"
    kills = 0
    while True:
        point = INJECTED.get(kills)
        if point is not None and kills < KILLS:
            step = f":step={last_seq(path) + 40}" if "ledger" in point else ""
            fault = {"VERL_FAULT": point + step, "VERL_FAULT_FILE": str(tmp_path / f"fault_{kills}")}
        else:
            fault = {}
        before = last_seq(path)
        with workspace.start(name, RECIPE | LONG, fault, MODULE) as process:
            if kills < KILLS and not fault:
                wanted = before + source.randint(20, 120)
                while process.poll() is None and last_seq(path) < wanted:
                    time.sleep(0.2)
                if process.poll() is None:
                    kill(process.pid, TARGETS[role])
            output, _ = process.communicate(timeout=900)
        assert not leftovers(process.pid)
        kills += 1
        if process.returncode == 0:
            break
        assert kills <= KILLS, output[-3000:]
    reader = LedgerReader(path)
    reader.verify()
    audit = Audit.of(reader.events())
    assert audit.is_exact and sorted(audit.updates) == list(range(40)) and max(audit.ages) <= 1, audit.lines()
    assert kills > 3, "the run ended before it was killed often"


def last_seq(path):
    """Return the number of events of a ledger; 0 if there is none yet."""
    try:
        with LedgerReader(path) as reader:
            return reader.last_seq
    except LedgerFileError:
        return 0


def kill(session, words):
    """Kill the process of a session whose command has these words."""
    for process in psutil.process_iter(["cmdline"]):
        if words in " ".join(process.info["cmdline"] or ()) and is_of_session(process, session):
            process.kill()
            return
    pytest.fail(f"no process is {words}")
