"""The examples of conversations: their curriculum, and the tasks of their CPU scripts."""

from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from examples.data_preprocess.gsm8k import synthetic_tables
from examples.sglang_multiturn.curriculum import EasiestFirst
from examples.sglang_multiturn.sums.make_task import tables
from verl.interactions.gsm8k_interaction import WRONG
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.trainer.config.overrides import fitted_overrides
from verl.trainer.config.unread_keys import Command
from verl.trainer.config.written import CONFIG_DIR
from verl.utils.import_utils import load_extern_type
from verl.utils.reward_score import gsm8k


class Rows:
    """What the sampler reads of a data set."""

    def __init__(self, *answers: str) -> None:
        self.dataframe = {"extra_info": [{"answer": answer} for answer in answers]}


def test_easy_problems_come_first():
    answers = ["<<1+1=2>> <<2+2=4>>", "#### 1", "<<1+2=3>>", "<<3+4=7>>", "<<1+1=2>><<2+1=3>><<3+1=4>>"]
    order = list(EasiestFirst(Rows(*answers), {"seed": 3}))
    assert [answers[i].count("<<") for i in order] == [0, 1, 1, 2, 3]
    assert order == list(EasiestFirst(Rows(*answers), {"seed": 3}))
    many = Rows(*["<<1+1=2>>"] * 50)
    first, second = (list(EasiestFirst(many, {"seed": seed})) for seed in (1, 2))
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert load_extern_type("examples/sglang_multiturn/curriculum.py", "EasiestFirst").__name__ == "EasiestFirst"


@pytest.mark.parametrize("name", ["gsm8k_multiturn_sf_grpo", "retool_multiturn_grpo"])
def test_configurations_with_a_code_interpreter(name):
    folder = str(Path("examples/sglang_multiturn/config").absolute())
    command = Command("ppo_trainer", CONFIG_DIR)
    assert fitted_overrides(["data.train_batch_size=8"], name, folder, command=command) == ["data.train_batch_size=8"]
    with initialize_config_dir(folder, version_base=None):
        rollout = compose(name).actor_rollout_ref.rollout
    assert rollout.mode == "async" and rollout.multi_turn.enable
    (tool,) = initialize_tools_from_config(rollout.multi_turn.tool_config_path)
    assert isinstance(tool, SandboxFusionTool) and tool.name == "code_interpreter"


def test_second_attempts():
    """A wrong first answer is followed by the words of the interaction, and by one that is right one time in five."""
    made, before = tables(0), synthetic_tables(0)
    again = [row["messages"] for row in made["sft_train"] if len(row["messages"]) == 4]
    assert {talk[2]["content"] for talk in again} == {WRONG}
    truth = [str(sum(map(int, talk[0]["content"].removesuffix("=?").split("+")))) for talk in again]
    answers = [[gsm8k.extract_solution(talk[i]["content"]) for i in (1, 3)] for talk in again]
    assert all(first != right for (first, _), right in zip(answers, truth, strict=True))
    share = sum(second == right for (_, second), right in zip(answers, truth, strict=True)) / len(again)
    assert share == pytest.approx(0.2, abs=0.04)
    row = made["train"][0]
    assert row["extra_info"]["interaction_kwargs"] == {
        "name": "gsm8k",
        "query": before["train"][0]["prompt"][0]["content"],
        "ground_truth": row["reward_model"]["ground_truth"],
    }
    assert pd.DataFrame(made["test"])["prompt"].map(len).eq(1).all()
