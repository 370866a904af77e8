"""Which reward functions are refused by their source alone."""

import ast
import inspect

import pytest
from omegaconf import OmegaConf

from verl.trainer.config.rules.files import scorer_rules
from verl.trainer.config.rules.reward import manager_rules
from verl.trainer.config.run_config import RunConfig
from verl.workers.rewards.managers import get_reward_manager_cls
from verl.workers.rewards.signature import MANAGER_KWARGS, SCORER_CALLS

ONE = "data_source, solution_str, ground_truth, extra_info"
MANY = "data_sources, solution_strs, ground_truths, extra_infos"


def problems(source, manager="naive", **reward_kwargs):
    node = {"name": "score", "reward_kwargs": reward_kwargs}
    tree = {"custom_reward_function": node, "reward_model": {"reward_manager": manager}}
    return [
        violation.expected for violation in scorer_rules(RunConfig.parse(OmegaConf.create(tree)), ast.parse(source))
    ]


@pytest.mark.parametrize("manager", SCORER_CALLS)
def test_the_calls_are_those_of_the_managers(manager):
    assert get_reward_manager_cls(manager).scorer_call == SCORER_CALLS[manager]


@pytest.mark.parametrize(
    ("source", "manager", "reward_kwargs"),
    [
        (f"def score({ONE}): ...", "naive", {}),
        (f"def score({ONE}=None, *, bonus=0): ...", "dapo", {"bonus": 1}),
        ("def score(**anything): ...", "naive", {"bonus": 1}),
        ("def score(solution_str, *rest, **others): ...", "naive", {}),
        (f"def score({MANY}): ...", "batch", {}),
        ("def score(a, b, c, d=None, /): ...", "prime", {}),
        # only running the file tells
        ("def score(a): ...", "one_of_the_users", {}),
        ("@wrapped\ndef score(a): ...", "naive", {}),
        ("from x import score", "naive", {}),
        ("def score(a): ...\nfrom x import other as score", "naive", {}),
        ("def score(a): ...\nscore, other = make()", "naive", {}),
        ("def score(a): ...\nif fast:\n    def score(b): ...", "naive", {}),
        ("def score(a): ...\nscore = wrap(score)", "naive", {}),
        ("class score: ...", "naive", {}),
        ("def score(a): ...\nfor score in range(3): ...", "naive", {}),
    ],
)
def test_accepted(source, manager, reward_kwargs):
    assert problems(source, manager, **reward_kwargs) == []


@pytest.mark.parametrize(
    ("source", "manager", "reward_kwargs", "text"),
    [
        ("def score(a): ...", "naive", {}, "score(a) cannot be called by the manager 'naive'"),
        (f"def score({ONE}): ...", "batch", {}, MANY),
        (f"def score({ONE}): ...", "naive", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        (f"def score({ONE}, *, must): ...", "naive", {}, "missing a required argument: 'must'"),
        (f"def score({ONE}, /): ...", "naive", {}, "cannot be called"),
        ("def score(a, b, c): ...", "prime", {}, "too many positional arguments"),
        (f"def score({ONE}): ...\nscore = 3", "naive", {}, "must be a function"),
        (f"async def score({ONE}): ...", "naive", {}, "asynchronous"),
    ],
)
def test_refused(source, manager, reward_kwargs, text):
    (expected,) = problems(source, manager, **reward_kwargs)
    assert text in expected


BUFFER = {"enable": True, "len": 4, "penalty_factor": 1.0}
NO_FACTOR = {"enable": False, "len": 1}


@pytest.mark.parametrize(
    ("manager", "given", "refused"),
    [
        ("naive", {}, {}),
        ("batch", {"anything": 1}, {}),
        ("one_of_the_users", {"anything": 1}, {}),
        ("naive", {"bonus": 1}, {"bonus": "is not taken by the reward manager 'naive'"}),
        ("prime", {"num_processes": 8}, {}),
        ("prime", {"num_processes": 0}, {"num_processes": "must be an integer of 1 or more"}),
        ("dapo", {"max_resp_len": 8, "overlong_buffer_cfg": BUFFER}, {}),
        ("dapo", {"max_resp_len": 8, "overlong_buffer_cfg": BUFFER | {"enable": False, "len": 0}}, {}),
        ("dapo", {"overlong_buffer_cfg": BUFFER}, {"max_resp_len": "overlong_buffer_cfg needs it"}),
        ("dapo", {"max_resp_len": 3, "overlong_buffer_cfg": BUFFER}, {"overlong_buffer_cfg.len": "max_resp_len=3]"}),
        ("dapo", {"max_resp_len": 8, "overlong_buffer_cfg": NO_FACTOR}, {"overlong_buffer_cfg.penalty_factor": "is"}),
    ],
)  # fmt: skip
def test_arguments_of_the_managers(manager, given, refused):
    tree = {"reward_model": {"reward_manager": manager, "reward_kwargs": given}}
    found = {violation.key: violation.expected for violation in manager_rules(RunConfig.parse(OmegaConf.create(tree)))}
    assert found.keys() == {f"reward_model.reward_kwargs.{key}" for key in refused}
    assert all(text in found[f"reward_model.reward_kwargs.{key}"] for key, text in refused.items())


def test_the_arguments_are_those_of_the_managers():
    common = {"self", "tokenizer", "num_examine", "compute_score", "reward_fn_key", "kwargs"}
    for manager, known in MANAGER_KWARGS.items():
        parameters = inspect.signature(get_reward_manager_cls(manager).__init__).parameters
        assert set(parameters) - common == set(known)
