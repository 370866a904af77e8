"""Sixty wrong commands by the stage of the checks that must find each; ten commands that are wrong in all stages."""

import shutil
from collections.abc import Callable, Mapping
from typing import Any

from .wrong_input_cases import CASES
from .wrong_input_commands import ASYNC, LIBRARY, ROLLOUT, code
from .wrong_input_files import rows, written
from .wrong_inputs import Case, Place, Words

STAGES: dict[str, tuple[str, ...]] = {
    "keys and types": (
        "config: trainer.total_epochs=1.5",
        "config: a key that does not exist",
        "config: text instead of a switch",
        "config: a list instead of a name",
        "config: a key that was replaced",
        "config: twenty mistakes",
        "config: trainer.seed=one",
        "config: actor.entropy_coeff=nan",
        "config: actor.optim.lr=nan",
        "config: a word where a number goes",
    ),
    "values": (
        "config: a negative learning rate",
        "config: a misspelled loss aggregation",
        "config: training at temperature 0",
        "config: an unknown KL",
        "reward: a function that is not in the file",
        "reward: too few parameters",
        "reward: no time to score",
        "config: a folder of the rollouts that is a file",
        "config: algorithm.gamma=1.5",
        "config: rollout.top_p=0",
    ),
    "machine": (
        "config: a tracker that is not installed",
        "config: training on GPUs without one",
        "environment: VERL_PROGRESS=loud",
        "environment: VERL_AUTO_PADDING=maybe",
        "environment: VERL_DATAPROTO_SERIALIZATION_METHOD=xml",
        "environment: VERL_FILE_LOGGER_PATH=/dev/null/a.jsonl",
        "environment: VERL_FILE_LOGGER_ROOT=/dev/null",
        "environment: TMPDIR=/dev/null",
        "environment: VERL_CHECK_PHASES=maybe",
        "config: an unknown tracker",
    ),
    "data": (
        "data: no row",
        "data: fewer rows than a batch",
        "data: messages without a role",
        "data: a row without ground truth",
        "data: no data_source column",
        "data: a bad row among the validation rows",
        "data: text as extra_info",
        "data: a reward_fn_key that no file has",
        "data: an image_key that no file has",
        "data: text that is not UTF-8",
    ),
    "models": (
        "model: no weights",
        "model: truncated weights",
        "model: a tokenizer that does not exist",
        "model: a reward model that does not exist",
        "model: a chat template with an error",
        "model: an index that names missing files",
        "model: no chat template",
        "model: garbage in pytorch_model.bin",
        "model: a model.safetensors that is a pipe",
        "model: a truncated config.json",
    ),
    "checkpoint and your code": (
        "code: an estimator that its module registers by another name",
        "code: a tool of a misspelled class",
        "code: an interaction of a misspelled class",
        "code: a loss that its module registers by another name",
        "code: an agent loop of a misspelled class",
        "checkpoint: a path without a step number",
        "checkpoint: a tracker that holds no number",
        "checkpoint: a folder that does not exist",
        "checkpoint: a misspelled resume mode",
        "code: a module that its package does not have",
    ),
}
"""Stage -> ids of cases; the first of each stage make one command, the second the next."""

_BY_ID = {case.id: case for case in CASES}
COMBINED: list[dict[str, Case]] = [
    {stage: _BY_ID[ids[number]] for stage, ids in STAGES.items()} for number in range(10)
]


def combined(cases: Mapping[str, Case], flags: Mapping[str, str] = {}, command: str = "verl.trainer.main_ppo") -> Case:
    """Return one case that is wrong in all that the given ones are."""

    def make(place: Place) -> Words:
        merged: dict[str, Any] = dict(flags)
        for stage, case in cases.items():
            part = Place(place.folder if case.group == "code" else place.folder / stage.split()[0], place.workspace)
            part.folder.mkdir(exist_ok=True)
            chosen = case.make(part) if callable(case.make) else case.make
            assert isinstance(chosen, Mapping), f"{case.id} is a line of words"
            if case.group == "checkpoint":
                chosen = {"trainer.default_local_dir": part.folder / "run", **chosen}
            both = chosen.keys() & merged.keys()
            assert all(chosen[key] == merged[key] for key in both), f"{case.id} and another one set {both}"
            merged |= chosen
        return merged

    says = []
    for stage, case in cases.items():
        at = "{at}" if case.group == "code" else f"{{at}}/{stage.split()[0]}"
        says += [part.replace("{at}", at) for part in case.says if not part.endswith("problems:")]
    environment = {name: value for case in cases.values() for name, value in case.environment.items()}
    return Case(
        "combined", " + ".join(case.name for case in cases.values()), make, tuple(says), "", command, environment
    )


# ---- the same commands, corrected as the check says

MODEL = "actor_rollout_ref.model"
_SCORER = (
    b"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
)
_ESTIMATOR = """
from verl.algos.advantage import register_adv_est
@register_adv_est("mine")
def estimate(token_level_rewards, response_mask, **others):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages
"""
_LOSS = """
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
@register_policy_loss("mine")
def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    zero = loss.detach() * 0
    return loss, zero, zero, zero
"""
_TOOLS = b"tools:\n- class_name: verl.tools.calculator_tool.CalculatorTool\n  config: {type: native}\n"
_USERS = b"interaction:\n- class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n"
_LOOPS = b"- name: mine\n  _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop\n"


def _scored(place: Place) -> Words:
    return written("reward.py", _SCORER, "custom_reward_function.path")(place)


def _folder(place: Place) -> Words:
    return {"trainer.rollout_data_dir": place.folder / "rollouts"}


def _model(place: Place) -> Words:
    return {f"{MODEL}.path": shutil.copytree(place.workspace.model, place.folder / "whole")}


def _afresh(place: Place) -> Words:
    return {"trainer.default_local_dir": place.folder / "another", "trainer.resume_mode": "disable"}


REMEDIES: dict[str, Words | Callable[[Place], Words]] = {
    "config: trainer.total_epochs=1.5": {"trainer.total_epochs": 1},
    "config: a key that does not exist": {"trainer.n_gpus_per_node": 1},
    "config: text instead of a switch": {"data.shuffle": True},
    "config: a list instead of a name": {"trainer.project_name": "a"},
    "config: a key that was replaced": {
        "algorithm.rollout_is_threshold": 2,
        "algorithm.rollout_is": True,
        "algorithm.rollout_is_mode": "truncate",
    },
    "config: trainer.seed=one": {"trainer.seed": 1},
    "config: actor.entropy_coeff=nan": {"actor_rollout_ref.actor.entropy_coeff": 0.01},
    "config: actor.optim.lr=nan": {"actor_rollout_ref.actor.optim.lr": 1e-3},
    "config: a word where a number goes": {"actor_rollout_ref.rollout.n": 2},
    "config: a negative learning rate": {"actor_rollout_ref.actor.optim.lr": 1e-3},
    "config: a misspelled loss aggregation": {"actor_rollout_ref.actor.loss_agg_mode": "token-mean"},
    "config: training at temperature 0": {"actor_rollout_ref.rollout.temperature": 1},
    "config: an unknown KL": {
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    },
    "reward: a function that is not in the file": _scored,
    "reward: too few parameters": _scored,
    "reward: no time to score": {"reward_model.scoring.timeout_s": 60},
    "config: a folder of the rollouts that is a file": _folder,
    "config: algorithm.gamma=1.5": {"algorithm.gamma": 1},
    "config: rollout.top_p=0": {"actor_rollout_ref.rollout.top_p": 1},
    "config: a tracker that is not installed": {"trainer.logger": "[console]"},
    "config: an unknown tracker": {"trainer.logger": "[console,file]"},
    "data: a reward_fn_key that no file has": {"data.reward_fn_key": "data_source"},
    "data: an image_key that no file has": {},
    "model: a tokenizer that does not exist": lambda at: {f"{MODEL}.tokenizer_path": at.workspace.model},
    "code: an estimator that its module registers by another name": code(
        _ESTIMATOR, {"algorithm.adv_estimator": "mine"}
    ),
    "code: a loss that its module registers by another name": code(
        _LOSS, {"actor_rollout_ref.actor.policy_loss.loss_mode": "mine"}
    ),
    "code: a tool of a misspelled class": written(
        "tools.yaml", _TOOLS, f"{ROLLOUT}.multi_turn.tool_config_path", ASYNC
    ),
    "code: an interaction of a misspelled class": written(
        "users.yaml", _USERS, f"{ROLLOUT}.multi_turn.interaction_config_path", ASYNC
    ),
    "code: an agent loop of a misspelled class": written(
        "loops.yaml", _LOOPS, f"{ROLLOUT}.agent.agent_loop_config_path", ASYNC
    ),
    "code: a module that its package does not have": {LIBRARY: "verl.utils.model"},
    "checkpoint: a tracker that holds no number": _afresh,
}
"""Id of a case -> the overrides with what its message says to write. Others are corrected by a right file, a key that
is left out, or a variable that is unset."""


def corrected(cases: Mapping[str, Case], flags: Mapping[str, str] = {}) -> Case:
    """Return the command of these cases with each of them corrected."""

    def make(place: Place) -> Words:
        merged: dict[str, Any] = dict(flags)
        for stage, case in cases.items():
            part = Place(place.folder if case.group == "code" else place.folder / stage.split()[0], place.workspace)
            part.folder.mkdir(exist_ok=True)
            remedy = REMEDIES.get(case.id, _RIGHT_FILES.get(case.group, {}))
            chosen = remedy(part) if callable(remedy) else remedy
            assert isinstance(chosen, Mapping)
            merged |= chosen
        return merged

    return Case("corrected", " + ".join(case.name for case in cases.values()), make, ())


_RIGHT_FILES: dict[str, Callable[[Place], Words]] = {"data": rows(), "model": _model}
