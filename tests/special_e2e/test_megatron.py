"""Whole runs on Megatron-Core: layouts give the same numbers, resume, and end clearly when they cannot go on.

``--verification tests/special_e2e/verification_results.md`` writes down how far rollout and trainer are apart, and
what was compared.
"""

import pytest

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

from tests.special_e2e.features import GAP
from tests.special_e2e.test_signals import assert_saves_and_goes_on
from tests.special_e2e.test_train import PPO, assert_names_the_death
from tests.special_e2e.verification import record
from verl.utils.checkpoint import verify_checkpoint

LAYOUT = "actor_rollout_ref.actor.megatron"
ON_MEGATRON = {"--config-name": "ppo_megatron_trainer", "trainer.n_gpus_per_node": 2}
TP2 = ON_MEGATRON | {f"{LAYOUT}.tensor_model_parallel_size": 2}
PP2 = ON_MEGATRON | {
    f"{LAYOUT}.pipeline_model_parallel_size": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
}
OFFLOAD = {
    f"{node}.megatron.{part}_offload": True
    for node in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    for part in ("param", "grad", "optimizer")
}
COMPARED = ("critic/score/mean", "response_length/mean", "actor/grad_norm", "actor/entropy")
PPO_ON_MEGATRON = {key: value for key, value in PPO.items() if key != "critic.model.use_remove_padding"}


@pytest.fixture(scope="module")
def tp2(workspace, verification_page):
    run = workspace.train("tp2", TP2 | {"trainer.save_freq": 2})
    write_down(verification_page, "GRPO, TP 2", run)
    return run


def write_down(page, name, run, base=None, of=""):
    """Put a run into the table of the page: what it was compared with, how far they are apart, and the gap."""
    apart = ""
    if base is not None:
        pairs = [(run.steps[step][key], base.steps[step][key]) for step in run.steps for key in COMPARED]
        furthest = max(abs(found / expected - 1) for found, expected in pairs)
        apart = f"{furthest:.1e}" if furthest else "none"
    gap = max(numbers[GAP] for numbers in run.steps.values())
    record(page, "## Megatron-Core", [name, of, apart, f"{gap:.1e}"])


def assert_close(run, base, steps, rel=2e-3):
    for step in steps:
        for key in COMPARED:
            assert run.steps[step][key] == pytest.approx(base.steps[step][key], rel=rel), (step, key)


def assert_agrees(run):
    """Rollout and trainer differ by rounding after every sync, and the policy moves."""
    for step in range(1, 5):
        numbers = run.steps[step]
        assert numbers["training/rollout_log_prob_diff_max"] < 1e-4
        assert numbers["weight_sync/checksum_ok"] == 1
        assert numbers["actor/grad_norm"] > 0


def test_grpo_with_cut_layers(tp2):
    assert sorted(tp2.steps) == [1, 2, 3, 4]
    assert_agrees(tp2)
    assert "megatron/core" not in tp2.output, "warnings of the library reach the terminal"


@pytest.mark.full
def test_pipelines_give_the_numbers_of_cut_layers(workspace, tp2, verification_page):
    """Weights, rows and samples are the same, so that what each step finds is, up to rounding."""
    run = workspace.train("pp2", PP2)
    assert_agrees(run)
    write_down(verification_page, "GRPO, PP 2", run, tp2, "GRPO, TP 2")
    assert_close(run, tp2, range(1, 5))


@pytest.mark.full
def test_a_fused_head_gives_the_numbers_of_the_plain_one(workspace, tp2, verification_page):
    """With half of the vocabulary on each worker."""
    run = workspace.train("tp2-fused", TP2 | {"actor_rollout_ref.model.use_fused_kernels": True})
    assert_agrees(run)
    write_down(verification_page, "GRPO, TP 2, fused head", run, tp2, "GRPO, TP 2")
    assert_close(run, tp2, range(1, 5), rel=1e-4)


@pytest.mark.full
def test_fsdp_gives_the_numbers_of_cut_layers(workspace, verification_page):
    """Without decay, which FSDP applies to norms and biases as well.

    Gradients agree to 1e-7, but AdamW turns one that is nearly zero into a step of any size up to the learning rate.
    """
    undecayed = {"actor_rollout_ref.actor.optim.weight_decay": 0.0}
    cut, run = workspace.train("tp2-undecayed", TP2 | undecayed), workspace.train("fsdp", undecayed)
    assert_agrees(run)
    write_down(verification_page, "GRPO, FSDP, one worker, no weight decay", run, cut, "GRPO, TP 2, no weight decay")
    assert_close(run, cut, range(1, 5), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_ppo_with_critic_and_reference(workspace, verification_page, layout):
    """What all roles offload between their turns changes no bit."""
    sizes = (TP2 if layout == "tp" else PP2) | PPO_ON_MEGATRON | {"critic.model.path": workspace.model}
    run = workspace.train(f"ppo-{layout}2", sizes)
    assert_agrees(run)
    write_down(verification_page, f"PPO, {layout.upper()} 2", run)
    assert run.steps[4]["critic/vf_loss"] < run.steps[1]["critic/vf_loss"]
    assert all(run.steps[step]["critic/grad_norm"] > 0 for step in range(1, 5))
    offloaded = workspace.train(f"ppo-{layout}2-offloaded", sizes | OFFLOAD)
    name = f"PPO, {layout.upper()} 2"
    write_down(verification_page, f"{name}, all parts of all roles offloaded", offloaded, run, name)
    for step in range(1, 5):
        assert offloaded.numbers(step) == run.numbers(step)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_killed_run_resumes(workspace, tp2, verification_page, layout, tmp_path):
    """SIGKILL of a worker in the update of step 3; steps 3 and 4 afterwards are those of a whole run."""
    sizes = TP2 if layout == "tp" else PP2
    overrides = sizes | {"trainer.save_freq": 2}
    fault = {"VERL_FAULT": "kill:update_actor:rank=1:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train(f"killed-{layout}2", overrides, env=fault, fails=True)
    assert "update_actor" in (tmp_path / "fault").read_text()
    assert_names_the_death(killed.output, 1, "update_actor", 3)
    whole = tp2 if layout == "tp" else workspace.train("whole-pp2", overrides)
    resumed = workspace.train(f"killed-{layout}2", overrides)
    name = f"GRPO, {layout.upper()} 2"
    write_down(verification_page, f"{name}, killed in step 3 and resumed", resumed, whole, name)
    for step in (3, 4):
        assert resumed.numbers(step) == whole.numbers(step)


@pytest.mark.full
@pytest.mark.parametrize("saves_beside", [False, True])
def test_a_run_saves_after_sigterm(workspace, tp2, saves_beside):
    beside = {"actor_rollout_ref.actor.checkpoint.async_save": saves_beside}
    assert_saves_and_goes_on(workspace, TP2 | beside, tp2, name=f"tp2-{saves_beside}")


@pytest.mark.full
def test_a_run_that_saves_beside_training_resumes(workspace, tp2, verification_page, tmp_path):
    """A worker dies while it writes step 4, and the run goes on from step 2; no number of any step changes."""
    overrides = TP2 | {"trainer.save_freq": 2, "actor_rollout_ref.actor.checkpoint.async_save": True}
    fault = {"VERL_FAULT": "kill:save_checkpoint:rank=1:step=4", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train("async", overrides, env=fault, fails=True)
    assert "save_checkpoint" in (tmp_path / "fault").read_text() and "rank 1" in killed.output
    for step in killed.steps:
        assert killed.numbers(step) == tp2.numbers(step)
    tracker = killed.folder / "latest_checkpointed_iteration.txt"
    parts = {step: verify_checkpoint(killed.folder / f"global_step_{step}" / "actor") for step in (2, 4)}
    assert tracker.read_text() == "2" and parts[2] == [] != parts[4]
    resumed = workspace.train("async", overrides)
    name = "GRPO, TP 2, asynchronous save, killed during the write and resumed"
    write_down(verification_page, name, resumed, tp2, "GRPO, TP 2")
    for step in (3, 4):
        assert resumed.numbers(step) == tp2.numbers(step)
    assert tracker.read_text() == "4" and verify_checkpoint(killed.folder / "global_step_4" / "actor") == []


@pytest.mark.full
def test_a_run_continues_in_another_layout(workspace, tp2, verification_page):
    """What two workers with cut layers saved at step 2 goes on as a pipeline."""
    resumed = PP2 | {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": tp2.folder / "global_step_2",
    }
    run = workspace.train("tp2-to-pp2", resumed)
    assert sorted(run.steps) == [3, 4]
    write_down(verification_page, "GRPO, PP 2, from what TP 2 saved at step 2", run, tp2, "GRPO, TP 2")
    assert_close(run, tp2, (3, 4))


def test_a_layout_that_cannot_be_ends_before_ray(workspace):
    overrides = TP2 | {"trainer.n_gpus_per_node": 3, "data.train_batch_size": 6}
    run = workspace.train("wrong", overrides, fails=True)
    assert run.returncode == 2 and f"{LAYOUT}.tensor_model_parallel_size=2" in run.output
    assert "must divide the 3 workers" in run.output and "Traceback" not in run.output


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp", "pp"])
@pytest.mark.parametrize("fault", ["kill:weight_sync", "kill:generate", "hang:update_actor"])
def test_faults_end_the_run(workspace, tmp_path, layout, fault):
    """A dead worker ends the run at once, one that hangs after the timeout of its groups."""
    timeout_s = 20
    sizes = (TP2 if layout == "tp" else PP2) | {"actor_rollout_ref.nccl_timeout": timeout_s}
    environment = {"VERL_FAULT": f"{fault}:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    name = fault.replace(":", "-")
    run = workspace.train(f"{name}-{layout}2", sizes, env=environment, fails=True)
    _, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith(fault.split(":")[1])
    message = run.output[run.output.rindex("\nError: ") :]
    assert "rank 1" in message and "step 2" in message, message
    assert ("WorkerTimeoutError" if fault.startswith("hang") else "WorkerDiedError") in message, message


@pytest.fixture(scope="module")
def experts(workspace):
    """Write a small Qwen3 with four experts in each layer."""
    import torch
    import transformers

    from examples.tiny_model import byte_tokenizer

    tokenizer, folder = byte_tokenizer(), workspace.folder / "experts"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_experts_over_two_workers(workspace, verification_page, experts):
    """What they find is what two workers find that hold all experts each."""
    model = ON_MEGATRON | {"actor_rollout_ref.model.path": experts}
    run = workspace.train("ep2", model | {f"{LAYOUT}.expert_model_parallel_size": 2})
    assert_agrees(run)
    whole = workspace.train("dp2-experts", model)
    write_down(verification_page, "GRPO, Qwen3 with experts, EP 2", run, whole, "the same without EP")
    assert_close(run, whole, range(1, 5))


@pytest.mark.full
def test_a_reward_model_scores_training(workspace, verification_page, tmp_path):
    """Its scores are those that the same model gives on FSDP: the first step has the same weights and samples."""
    from tests.workers.roles.reward_cases import write_models

    write_models(tmp_path)
    scored = {
        "data.return_raw_chat": True,
        "reward_model.enable": True,
        "reward_model.model.path": tmp_path / "token",
        "reward_model.model.input_tokenizer": workspace.model,
        "reward_model.micro_batch_size_per_gpu": 8,
        "reward_model.max_length": 128,
        "trainer.total_training_steps": 2,
    }
    plain = workspace.train("reward-fsdp", scored)
    for name, sizes in (("tp2", TP2), ("pp2", PP2)):
        run = workspace.train(f"reward-{name}", sizes | scored)
        shown = f"GRPO with a reward model, {name[:2].upper()} 2"
        write_down(verification_page, shown, run, plain, "the same, FSDP, one worker")
        for step in (1, 2):
            assert run.steps[step]["critic/score/mean"] == pytest.approx(
                plain.steps[step]["critic/score/mean"], abs=1e-4
            )
            assert run.steps[step]["actor/grad_norm"] > 0
