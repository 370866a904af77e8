"""The recipe one_step_off_policy in runs by its own entry: what samples what, and what is repeated after a death."""

import json

import pytest
import yaml

from verl.utils.observe.attempts import read_attempts
from verl.utils.observe.record import read_entries
from verl.utils.report.flags import find_flags

from .conftest import assert_bit_for_bit
from .features import GAP
from .test_signals import assert_saves_and_goes_on

MODULE = "recipe.one_step_off_policy.main_ppo"
ROLLOUT = "actor_rollout_ref.rollout"
RECIPE = {
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 1,
    f"{ROLLOUT}.agent.num_workers": 2,
    "ray_kwargs.ray_init.num_cpus": 6,
    "trainer.total_training_steps": 3,
    "trainer.test_freq": -1,
}
MAIN = {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.mode": "async"}
TWO_SERVERS = {f"{ROLLOUT}.n_gpus_per_node": 2}
RESUMED = {
    "data.train_batch_size": 16,  # four batches are an epoch
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "trainer.total_training_steps": 6,
    "trainer.save_freq": 2,
    "trainer.test_freq": 3,
    "trainer.record_digests": True,
}
MEGATRON = {
    "--config-name": "one_step_off_ppo_megatron_trainer",
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
}
ADAPTERS = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora_alpha": 16}


def train(workspace, name, overrides=None, module=MODULE, **options):
    dumps = {"trainer.rollout_data_dir": workspace.folder / name / "rollouts"}
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, RECIPE | dumps | (overrides or {}), env=env, module=module, **options)


def rows_of(run, step):
    lines = (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def outputs_of(run, step):
    return [row["output"] for row in rows_of(run, step)]


def behind_of(run):
    return {step: numbers.get("weight_sync/versions_behind") for step, numbers in run.steps.items()}


def assert_one_update_behind(run, versions_of_an_update=1):
    """Each batch but the first is sampled by weights of one update before; the engine and the trainer then differ."""
    assert behind_of(run) == {step: versions_of_an_update * (step > 1) for step in run.steps}
    for step, numbers in run.steps.items():
        assert numbers["weight_sync/versions_planned"] == behind_of(run)[step]
        assert {row["versions_behind"] for row in rows_of(run, step)} == {behind_of(run)[step]}
        assert numbers["timing_s/wait_prev_gen"] >= 0 and "timing_s/gen" not in numbers
        assert numbers["actor/grad_norm"] > 0
    assert run.steps[1][GAP] < 1e-4  # rounding of fp32
    assert min(numbers[GAP] for step, numbers in run.steps.items() if step > 1) > 1e-3
    assert not [flag for flag in find_flags(read_entries(run.folder / "metrics.jsonl")) if flag.name == "stale weights"]


def test_a_batch_is_sampled_one_update_before_the_step_that_trains_on_it(workspace):
    assert_one_update_behind(train(workspace, "one_step_off"))


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides, versions",
    [
        pytest.param({"actor_rollout_ref.actor.ppo_mini_batch_size": 4}, 2, id="two mini-batches"),
        pytest.param({"trainer.n_gpus_per_node": 2} | TWO_SERVERS, 1, id="two workers and servers"),
        pytest.param(ADAPTERS, 1, id="adapters"),
        pytest.param({f"{ROLLOUT}.name": "sglang"}, 1, id="sglang"),
        pytest.param(MEGATRON, 1, id="megatron"),
        pytest.param(MEGATRON | {f"{ROLLOUT}.name": "sglang"}, 1, id="megatron and sglang"),
        pytest.param({"actor_rollout_ref.actor.strategy": "fsdp2"}, 1, id="fsdp2"),
    ],
)
def test_layouts_and_engines(workspace, request, overrides, versions):
    name = request.node.callspec.id.replace(" ", "_")
    assert_one_update_behind(train(workspace, f"one_step_off_{name}", overrides), versions)


@pytest.mark.full
def test_with_fixed_weights_it_is_the_synchronous_run(workspace):
    """Prompts, seeds and their order are those of the main trainer: only the weights that sample are older."""
    fixed = {"actor_rollout_ref.actor.optim.lr": 0.0, "trainer.test_freq": 2}
    whole = train(workspace, "one_step_sync", fixed | MAIN, module="verl.trainer.main_ppo")
    run = train(workspace, "one_step_fixed", fixed)
    for step in whole.steps:
        assert outputs_of(run, step) == outputs_of(whole, step)
        numbers = run.numbers(step)
        assert {key: value for key, value in numbers.items() if key.partition("/")[0] != "fully_async"} == (
            whole.numbers(step)
        )


@pytest.mark.full
def test_batches_are_those_of_the_weights_that_are_said_to_sample_them(workspace):
    """Batch 2 is that of the first weights, batch 3 that of the weights after step 1: the reference samples so."""
    run = train(workspace, "one_step_off_reference")
    moved = train(workspace, "one_step_main", MAIN, module="verl.trainer.main_ppo")
    still = train(workspace, "one_step_still", {"actor_rollout_ref.actor.optim.lr": 0.0})
    assert outputs_of(run, 1) == outputs_of(moved, 1) == outputs_of(still, 1)
    assert outputs_of(run, 2) == outputs_of(still, 2) != outputs_of(moved, 2)
    assert outputs_of(run, 3) != outputs_of(still, 3)


@pytest.mark.full
@pytest.mark.parametrize("step", [3, 5])
def test_a_killed_run_resumes_bit_for_bit(workspace, tmp_path, step):
    """A checkpoint holds the responses of the next step; step 5 begins an epoch. Validation changes nothing."""
    whole = train(workspace, "one_step_whole", RESUMED)
    fault = {"VERL_FAULT": f"kill:update_actor:rank=0:step={step}", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, f"one_step_killed_{step}", RESUMED, env=fault, fails=True)
    message = killed.output[killed.output.rindex("\nError: ") :]
    assert "WorkerDiedError" in message and "update_actor" in message and f"step {step}" in message
    resumed = train(workspace, f"one_step_killed_{step}", RESUMED)
    assert sorted(resumed.steps) == list(range(1, 7))
    assert_bit_for_bit(resumed, whole, range(1, 7))
    assert behind_of(resumed) == behind_of(whole)
    assert all(rows_of(resumed, step) == rows_of(whole, step) for step in range(1, 7))


@pytest.mark.full
def test_a_run_is_replayed_from_its_ledger(workspace):
    run = train(workspace, "one_step_recorded", {"trainer.record_digests": True})
    follows = {"async_training.replay": run.folder / "ledger.sqlite", "trainer.record_digests": True}
    replay = train(workspace, "one_step_replay", follows)
    assert len(replay.steps) == 3 and "vLLMServer" not in replay.output


@pytest.mark.full
def test_the_main_trainer_has_the_mode_too(workspace):
    mode = MAIN | {"async_training.mode": "one_step_off"}
    assert_one_update_behind(train(workspace, "one_step_of_main", mode, module="verl.trainer.main_ppo"))


@pytest.mark.full
def test_without_a_lead_it_is_the_synchronous_run(workspace):
    """Fully asynchronous training that sends nothing ahead and publishes after every update."""
    own = {f"{ROLLOUT}.calculate_log_probs": True, "actor_rollout_ref.actor.use_rollout_log_probs": True}
    whole = train(workspace, "one_step_turns", MAIN | own, module="verl.trainer.main_ppo")
    mode = {"async_training.mode": "fully_async", "async_training.staleness_threshold": 0}
    mode |= {"async_training.trigger_parameter_sync_step": 1, "data.gen_batch_size": 1, f"{ROLLOUT}.nnodes": 1}
    run = train(workspace, "one_step_no_lead", MAIN | own | mode, module="verl.trainer.main_ppo")
    for step in whole.steps:
        assert rows_of(run, step) == [row | {"versions_behind": 0} for row in rows_of(whole, step)]
        assert run.steps[step]["actor/grad_norm"] == whole.steps[step]["actor/grad_norm"]


@pytest.mark.full
def test_a_run_saves_after_sigterm(workspace):
    """A step that has begun is finished, since the servers already generate the next one."""
    overrides = RESUMED | {"trainer.test_freq": -1}
    whole = train(workspace, "one_step_for_sigterm", overrides)
    assert_saves_and_goes_on(workspace, RECIPE | overrides, whole, saved=3, module=MODULE)


@pytest.mark.full
def test_checkpoints_of_the_main_trainer_and_of_this_one_are_exchanged(workspace):
    """A run of the main trainer goes on here, its next step with the newest weights; and the other way round."""
    for first, second in (("verl.trainer.main_ppo", MODULE), (MODULE, "verl.trainer.main_ppo")):
        name = f"exchanged_{first.rpartition('.')[2]}_{first.partition('.')[0]}"
        steps = {"trainer.save_freq": 2, "trainer.total_training_steps": 4}
        keys = {module: MAIN if module.startswith("verl") else {} for module in (first, second)}
        stopped = {"VERL_FAULT": "raise:update_actor:rank=0:step=3"}
        train(workspace, name, steps | keys[first], module=first, env=stopped, fails=True)
        run = train(workspace, name, steps | keys[second], module=second)
        assert sorted(run.steps) == [1, 2, 3, 4]
        assert run.steps[3]["weight_sync/versions_behind"] == 0
        assert run.steps[4]["weight_sync/versions_behind"] == (second == MODULE)


@pytest.mark.full
def test_a_checkpoint_without_its_responses_is_refused(workspace):
    steps = {"trainer.save_freq": 2, "trainer.total_training_steps": 4}
    stopped = {"VERL_FAULT": "raise:update_actor:rank=0:step=3"}
    run = train(workspace, "one_step_lost_file", steps, env=stopped, fails=True)
    path = run.folder / "global_step_2" / "groups.pkl"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    damaged = train(workspace, "one_step_lost_file", steps, fails=True)
    assert f"{path.parent} cannot be resumed from: groups.pkl has the right size but the wrong" in damaged.output
    path.unlink()
    missing = train(workspace, "one_step_lost_file", steps, fails=True)
    assert f"{path} is missing" in missing.output


@pytest.mark.full
def test_a_server_that_dies_changes_nothing_while_another_lives(workspace, tmp_path):
    fault = {"VERL_FAULT": "kill:generate:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    whole = train(workspace, "one_step_two_servers", TWO_SERVERS)
    struck = train(workspace, "one_step_struck", TWO_SERVERS, env=fault)
    assert (tmp_path / "fault").exists()
    for step in whole.steps:
        numbers = {key: value for key, value in struck.numbers(step).items() if not key.startswith("attempts/")}
        assert numbers == {key: value for key, value in whole.numbers(step).items() if not key.startswith("attempts/")}
        assert rows_of(struck, step) == rows_of(whole, step)


@pytest.mark.full
def test_the_only_server_that_dies_comes_back_with_the_newest_weights(workspace, tmp_path):
    """The rows that had no answer are sampled by weights that are not behind, and say so."""
    fault = {"VERL_FAULT": "kill:generate:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = train(workspace, "one_step_only_server", env=fault)
    assert (tmp_path / "fault").exists() and sorted(run.steps) == [1, 2, 3]
    assert {row["versions_behind"] for row in rows_of(run, 2)} == {1}
    assert {row["versions_behind"] for row in rows_of(run, 3)} == {0}
    assert run.steps[3][GAP] < 1e-4


@pytest.mark.full
def test_importance_weights_compare_with_the_weights_that_sampled(workspace):
    """They are 1 in the first step, and differ from 1 in later ones."""
    weighed = {"algorithm.rollout_is": True, "algorithm.rollout_is_threshold": 2.0}
    run = train(workspace, "one_step_weighed", weighed)
    spread = {step: numbers["mismatch/rollout_is_std"] for step, numbers in run.steps.items()}
    assert spread[1] < 1e-4 and min(spread[2], spread[3]) > 1e-3


@pytest.mark.full
def test_a_skipped_sync_is_flagged(workspace):
    run = train(workspace, "one_step_skipped", env={"VERL_FAULT": "skip:weight_sync:step=3"})
    assert behind_of(run) == {1: 0, 2: 1, 3: 2}
    (flag,) = [flag for flag in find_flags(read_entries(run.folder / "metrics.jsonl")) if flag.name == "stale weights"]
    assert flag.step == 3 and "up to 2 updates old, 1 planned" in flag.reason


@pytest.mark.full
def test_replaced_prompts_are_the_same_after_a_resume(workspace, tmp_path):
    """The next prompts of the data take the places of those that failed."""
    path = tmp_path / "loops.yaml"
    path.write_text(yaml.dump([{"name": "flaky", "_target_": "tests.special_e2e.flaky_loop.FlakyLoop"}]))
    agent = {"agent_loop_config_path": path, "default_agent_loop": "flaky", "num_retries": 0, "on_failure": "replace"}
    loops = {f"{ROLLOUT}.agent.{name}": value for name, value in agent.items()}
    changes = loops | {f"{ROLLOUT}.agent.trajectory_timeout_s": 30, "trainer.save_freq": 2}
    changes |= {"trainer.total_training_steps": 4, "trainer.record_digests": True}
    whole = train(workspace, "one_step_replacing", changes)
    assert whole.steps[4]["fully_async/count/failed_samples"] > whole.steps[2]["fully_async/count/failed_samples"]
    stopped = {"VERL_FAULT": "raise:update_actor:rank=0:step=3"}
    train(workspace, "one_step_replacing_parts", changes, env=stopped, fails=True)
    parts = train(workspace, "one_step_replacing_parts", changes)
    assert_bit_for_bit(parts, whole, range(1, 5))
    for run in (whole, parts):
        steps = {line["step"] for line in read_attempts(run.folder) if "-train-" in line["id"]}
        assert steps == {1, 2, 3, 4}
