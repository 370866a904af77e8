"""Whole runs that are resumed with other settings: they take effect, are kept on request, or are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup

from .conftest import assert_bit_for_bit

pytestmark = pytest.mark.full

ACTOR, CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"
SAVED_AT, STEPS = 3, 7
FIRST = {
    "algorithm.adv_estimator": "gae",
    "critic.ppo_micro_batch_size_per_gpu": 8,
    "critic.model.enable_gradient_checkpointing": False,
    "trainer.save_freq": SAVED_AT,
    "trainer.test_freq": -1,
    f"{ACTOR}.lr_warmup_steps": 4,
    f"{CRITIC}.lr": 1e-3,
}
CHANGED = {
    f"{ACTOR}.lr": 3e-3,
    f"{ACTOR}.weight_decay": 0.2,
    f"{ACTOR}.betas": "[0.8,0.95]",
    f"{ACTOR}.lr_warmup_steps": 5,
    f"{CRITIC}.lr": 2e-3,
}
ENGINES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "fsdp": (
        {"critic.model.use_remove_padding": True},
        {f"{CRITIC}.lr_scheduler_type": "cosine", f"{CRITIC}.min_lr_ratio": 0.1},
        "lr_scheduler_type=cosine, and was constant",
    ),
    "megatron": (
        {"--config-name": "ppo_megatron_trainer"},
        {f"{CRITIC}.lr_decay_style": "cosine", f"{CRITIC}.min_lr": 2e-4},
        "lr_decay_style=cosine, and was constant",
    ),
}
"""By engine: keys of both runs, what the resumed one gives the critic besides, and how it names that."""


def rates(lr: float, warmup: int, cosine: bool = False) -> list[float]:
    """Return the rates of all steps by the schedules of transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = get_constant_schedule_with_warmup(optimizer, warmup)
    if cosine:
        schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, STEPS, min_lr_rate=0.1)
    found = []
    for _ in range(STEPS):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return found


@pytest.fixture(scope="module", params=ENGINES)
def whole(request, workspace):
    """A run without an interruption, whose checkpoint of step 3 the others continue."""
    keys = ENGINES[request.param][0] | FIRST | {"critic.model.path": workspace.model}
    run = workspace.train(f"whole-{request.param}", keys | {"trainer.total_training_steps": STEPS - 1})
    return request.param, keys, run


def continued(workspace, whole, name, keys, **options):
    """Continue the checkpoint in a folder of its own."""
    engine, first, run = whole
    folder = workspace.folder / f"{name}-{engine}"
    if not folder.exists():
        folder.mkdir()
        shutil.copytree(run.folder / f"global_step_{SAVED_AT}", folder / f"global_step_{SAVED_AT}")
        shutil.copy(run.folder / "metrics.jsonl", folder)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    return workspace.train(folder.name, first | {"trainer.total_training_steps": STEPS} | keys, **options)


@pytest.mark.parametrize("keeps", [False, True])
def test_other_settings(workspace, whole, keeps):
    engine, _, _ = whole
    _, shape, told = ENGINES[engine]
    keep = {f"{each}.use_checkpoint_opt_param_scheduler": keeps for each in (ACTOR, CRITIC)}
    run = continued(workspace, whole, f"changed-{keeps}", CHANGED | shape | keep)
    actor, critic = (rates(1e-3, 4), rates(1e-3, 0)) if keeps else (rates(3e-3, 5), rates(2e-3, 0, cosine=True))
    for step in range(SAVED_AT + 1, STEPS + 1):
        assert run.steps[step]["actor/lr"] == pytest.approx(actor[step - 1], rel=1e-9)
        assert run.steps[step]["critic/lr"] == pytest.approx(critic[step - 1], rel=1e-9)
    named = ["lr=0.003, and was 0.001", "lr=0.002, and was 0.001", "weight_decay=0.2, and was 0.01"]
    named += ["betas=[0.8,0.95], and was [0.9,0.999]", "lr_warmup_steps=5, and was 4", told]
    for text in named:
        assert f"optim.{text} in the checkpoint" in run.output
    assert ("the run keeps the old value" in run.output) == keeps


def test_the_same_settings(workspace, whole):
    _, _, uninterrupted = whole
    run = continued(workspace, whole, "same", {"trainer.total_training_steps": STEPS - 1})
    assert "in the checkpoint" not in run.output
    assert_bit_for_bit(run, uninterrupted, range(1, STEPS))


def test_a_kill_before_the_first_save_leaves_the_checkpoint_that_the_user_chose(workspace, whole, tmp_path):
    """The newest checkpoint is that of the last step, of a run that saves two."""
    engine, _, uninterrupted = whole
    steps = {"trainer.total_training_steps": STEPS - 1}
    folder = workspace.folder / f"killed-{engine}"
    shutil.copytree(uninterrupted.folder, folder)
    older = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": folder / f"global_step_{SAVED_AT}"}
    killed = []
    for start, step in ((older, SAVED_AT + 2), ({"trainer.resume_mode": "disable"}, 2)):
        fault = {"VERL_FAULT": f"kill:update_actor:step={step}", "VERL_FAULT_FILE": str(tmp_path / str(step))}
        killed.append(continued(workspace, whole, "killed", steps | start, env=fault, fails=True))
        assert sorted(killed[-1].steps) == list(range(1, step))
        if start is older:
            run = continued(workspace, whole, "killed", steps)
            assert_bit_for_bit(run, uninterrupted, range(1, STEPS))
    run = continued(workspace, whole, "killed", steps, fails=True)
    assert f"names no checkpoint, but {folder}/global_step_{STEPS - 1} is complete" in run.output


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "critic.model.path"])
def test_another_model(workspace, whole, key):
    """Weights of the same shapes whose rotary frequencies are others."""
    other = workspace.folder / "other-model"
    shutil.copytree(workspace.model, other, dirs_exist_ok=True)
    config = json.loads((Path(workspace.model) / "config.json").read_text())
    config["rope_parameters"] |= {"rope_theta": 5e5}
    (other / "config.json").write_text(json.dumps(config))
    run = continued(workspace, whole, f"other-{key.split('.')[0]}", {key: other}, fails=True)
    assert "rope_parameters.rope_theta=500000.0, and 10000.0 in the checkpoint" in run.output
