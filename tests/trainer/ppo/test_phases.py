import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.errors import ContractError
from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.phases import PHASES, check_rollout, checked_phase, needs_old_log_probs

PAD, EOS = 0, 9


def rollout() -> tuple[DataProto, DataProto]:
    """Two prompts of width 3, left-padded, with responses of 4 and 2 tokens; the second ends in EOS."""
    prompts = torch.tensor([[PAD, 5, 6], [7, 5, 6]])
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    responses = torch.tensor([[3, 4, 5, 6], [3, EOS, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    uids = np.array(["a", "b"], dtype=object)
    asked = DataProto.from_dict({"input_ids": prompts, "attention_mask": prompt_mask}, {"uid": uids})
    output = DataProto.from_dict(
        {
            "prompts": prompts.clone(),
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], -1),
            "attention_mask": torch.cat([prompt_mask, mask], -1),
            "response_mask": mask.clone(),
            "rollout_log_probs": torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-1.0, 0.0, -1.0, -1.0]]),
        },
        {"uid": uids.copy()},
        meta_info={"eos_token_id": [EOS], "pad_token_id": PAD},
    )
    return asked, output


def test_a_right_rollout_passes():
    check_rollout(*rollout(), step=1)


def put(key, row, column, value, also=()):
    def change(output):
        output.batch[key][row, column] = value
        for other, shift in also:
            output.batch[other][row, column + shift] = value

    return change


def swap_uids(output):
    output.non_tensor_batch["uid"] = output.non_tensor_batch["uid"][::-1].copy()


@pytest.mark.parametrize(
    "change, row, what",
    [
        (put("prompts", 1, 0, 8, [("input_ids", 0)]), 1, "not the one that was asked for"),
        (put("attention_mask", 0, 0, 1), 0, "attention mask was changed"),
        (put("input_ids", 1, 4, 2), 1, "input_ids are not prompt and response"),
        (swap_uids, 0, "another prompt"),
        (put("response_mask", 0, 1, 2), 0, "other than 0 and 1"),
        (put("response_mask", 1, 2, 1), 1, "not attended"),
        (put("response_mask", 0, 1, 0), 0, "not one run"),
        (put("response_mask", 0, 3, 0), 0, "attention mask of the response differ"),
        (put("responses", 1, 3, 4, [("input_ids", 3)]), 1, "a token after the response is not padding"),
        (put("responses", 0, 2, EOS, [("input_ids", 3)]), 0, "after the end-of-sequence"),
        (put("rollout_log_probs", 0, 1, float("nan")), 0, "no finite"),
        (put("rollout_log_probs", 1, 1, float("-inf")), 1, "no finite"),
        (put("rollout_log_probs", 1, 0, 0.01), 1, "above 0"),
    ],
)
def test_each_violation_is_named_with_step_and_row(change, row, what):
    asked, output = rollout()
    change(output)
    with pytest.raises(RuntimeError, match=rf"step 7, row {row} \(uid [ab]\): .*{what}"):
        check_rollout(asked, output, step=7)


def test_what_is_not_a_violation():
    asked, output = rollout()
    output.batch["rollout_log_probs"][1, 2:] = 5.0  # outside the mask anything may stand
    check_rollout(asked, output, step=1)
    output.batch["attention_mask"][1] = 0  # an aborted request is a row of padding
    output.batch["response_mask"][1] = 0
    output.batch["prompts"][1] = output.batch["input_ids"][1, :3] = PAD
    output.batch["responses"][1] = output.batch["input_ids"][1, 3:] = PAD
    check_rollout(asked, output, step=1)


def test_turns_of_others_are_allowed_between_sampled_tokens_in_multi_turn():
    asked, output = rollout()
    output.batch["response_mask"][0, 1] = 0
    with pytest.raises(RuntimeError):
        check_rollout(asked, output, step=1)
    output.batch["prompts"][1, 0] = output.batch["input_ids"][1, 0] = 8  # as where a loop names its tools
    check_rollout(asked, output, step=1, single_turn=False)


def test_rows_that_are_missing_are_counted():
    asked, output = rollout()
    with pytest.raises(RuntimeError, match="2 responses were asked for, 1 came back"):
        check_rollout(asked, output[:1], step=1)


# ---- the table of phases


def batch_with(*keys: str) -> DataProto:
    arrays = {"uid": np.array(["a"], dtype=object)} if "uid" in keys else {}
    return DataProto.from_dict({key: torch.zeros(1, 2) for key in keys if key != "uid"}, arrays)


def run_phase(name, before, after):
    with checked_phase(name, before) as result:
        result.append(after)


def test_every_read_is_written_before():
    there: set[str] = set()
    for name, phase in PHASES.items():
        assert phase.reads <= there, name
        there |= phase.writes


def test_phases_are_held_to_the_table(monkeypatch):
    reads = sorted(PHASES["shape"].reads)
    done = [*reads, *PHASES["shape"].writes]
    run_phase("shape", batch_with("uid"), batch_with("uid"))  # unchecked unless asked for
    monkeypatch.setenv("VERL_CHECK_PHASES", "1")
    run_phase("shape", batch_with(*reads), batch_with(*done, "my_own_key"))
    with pytest.raises(ContractError, match=r"'shape' reads \['uid'\]"):
        run_phase("shape", batch_with(*(set(reads) - {"uid"})), batch_with(*done))
    with pytest.raises(ContractError, match=r"'shape' writes \['returns'\]"):
        run_phase("shape", batch_with(*reads), batch_with(*(set(done) - {"returns"})))
    with pytest.raises(ContractError, match=r"'score' added \['advantages'\]"):
        run_phase("score", batch_with(*reads), batch_with(*reads, "advantages"))


# ---- passes


def config_with(**changes):
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1}},
            "algorithm": {"use_kl_in_reward": False, "rollout_is_threshold": None},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def needs_old_log_probs_in(config):
    run = RunConfig.parse(config)
    return needs_old_log_probs(run.actor_rollout_ref.actor, run.algorithm, run.prompts_per_step)


@pytest.mark.parametrize(
    "changes, needed",
    [
        ({}, False),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 4}, True),
        ({"actor_rollout_ref__actor__ppo_epochs": 2}, True),
        ({"algorithm__use_kl_in_reward": True}, True),
        ({"algorithm__rollout_is_threshold": 2.0}, True),
        ({"actor_rollout_ref__actor__use_rollout_log_probs": True}, False),
        (
            {"actor_rollout_ref__actor__use_rollout_log_probs": True, "actor_rollout_ref__actor__ppo_epochs": 2},
            False,
        ),
        ({"actor_rollout_ref__actor__use_kl_loss": True}, False),
        ({"data__gen_batch_size": 16}, True),
    ],
)
def test_old_log_probs_are_computed_where_something_reads_them(changes, needed):
    assert needs_old_log_probs_in(config_with(**changes)) is needed


@pytest.mark.parametrize(
    "changes, drawn, trained",
    [
        ({}, 8, 8),
        ({"data__gen_batch_size": None}, 8, 8),
        ({"data__gen_batch_size": 16}, 16, 16),
        ({"data__gen_batch_size": 16, "algorithm__filter_groups": {"enable": False}}, 16, 16),
        ({"data__gen_batch_size": 16, "algorithm__filter_groups": {"enable": True}}, 16, 8),
    ],
)
def test_prompts_of_a_step(changes, drawn, trained):
    config = config_with(**changes)
    run = RunConfig.parse(config)
    assert (run.data.loader_batch_size, run.prompts_per_step) == (drawn, trained)
    assert needs_old_log_probs_in(config) is (trained != 8)
