"""Reward managers: where a score lands, what scorers may return, and what a bad scorer is answered with."""

import asyncio
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cloudpickle
import numpy as np
import psutil
import pytest
import ray
import torch

from examples.tiny_model import byte_tokenizer
from tests.waiting import wait_until
from verl.compat import prime_scoring
from verl.errors import RewardError
from verl.experimental.agent_loop import rewards
from verl.protocol import DataProto
from verl.trainer.ppo import reward
from verl.trainer.ppo.reward import compute_reward
from verl.utils.process.pool import IsolatedFunction
from verl.utils.process.time_limit import TimeLimitExceeded, time_limit
from verl.utils.reward_score import LOWEST_SCORES, PREFIXES, SCORERS
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.prime import parallel_compute_score_async, run_reward_scoring
from verl.workers.rewards import loading
from verl.workers.rewards.loading import load_reward_manager, resolve_reward
from verl.workers.rewards.managers import REWARD_MANAGER_REGISTRY
from verl.workers.rewards.scoring import ScoringLimits

PROMPT_WIDTH, RESPONSE_WIDTH = 6, 8
RESPONSES = ["#### 4", "#### 12", ""]
TRUTHS = ["4", "13", "0"]


@pytest.fixture(autouse=True)
def no_process_of_a_scorer():
    yield
    while loading._isolated:
        loading._isolated.popitem()[1].close()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def object_array(values):
    return np.fromiter(values, dtype=object, count=len(values))


@pytest.fixture
def batch(tokenizer):
    """Three responses of 6, 7 and 0 tokens; the first two end with the end-of-turn token."""
    prompts, responses, masks = [], [], []
    for text in RESPONSES:
        ids = tokenizer.encode(text) + ([tokenizer.eos_token_id] if text else [])
        pad = RESPONSE_WIDTH - len(ids)
        prompts.append([tokenizer.pad_token_id] * 3 + tokenizer.encode("1+1"))
        responses.append(ids + [tokenizer.pad_token_id] * pad)
        masks.append([0] * 3 + [1] * 3 + [1] * len(ids) + [0] * pad)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor(prompts),
            "responses": torch.tensor(responses),
            "attention_mask": torch.tensor(masks),
        },
        non_tensors={
            "data_source": object_array(["openai/gsm8k"] * 3),
            "reward_model": object_array([{"style": "rule", "ground_truth": t} for t in TRUTHS]),
            "extra_info": object_array([{"index": i} for i in range(3)]),
            "__num_turns__": np.array([2, 4, 6], dtype=np.int32),
        },
    )


def manager(name, tokenizer, scorer, **kwargs):
    return get_reward_manager_cls(name)(tokenizer, 1, scorer, **kwargs)


def expected(values):
    reward = torch.zeros(3, RESPONSE_WIDTH)
    reward[0, 6], reward[1, 7], reward[2, 0] = values
    return reward


def plural(scorer):
    def score(data_sources, solution_strs, ground_truths, extra_infos):
        columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [scorer(*row) for row in columns]

    return score


def record(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(solution_str),
        "seen": (data_source, solution_str, ground_truth, extra_info["index"], int(extra_info["num_turns"])),
    }


@pytest.mark.parametrize("name", ["naive", "batch", "dapo"])
def test_scorer_sees_each_row_and_the_score_is_at_the_last_token(name, tokenizer, batch):
    scorer = plural(record) if name == "batch" else record
    result = manager(name, tokenizer, scorer)(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected([6.0, 7.0, 0.0]))
    seen = [
        ("openai/gsm8k", text, truth, i, 2 * i + 2)
        for i, (text, truth) in enumerate(zip(RESPONSES, TRUTHS, strict=True))
    ]
    assert result["reward_extra_info"]["seen"] == seen
    assert torch.equal(manager(name, tokenizer, scorer)(batch), result["reward_tensor"])


def test_real_scorer(tokenizer, batch):
    assert torch.equal(manager("naive", tokenizer, None)(batch), expected([1.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (2, 2.0),
        (True, 1.0),
        (0.25, 0.25),
        ((0.5, "why"), 0.5),
        ({"score": False, "pred": "x"}, 0.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(3), 3.0),
    ],
)
@pytest.mark.parametrize("name", ["naive", "batch"])
def test_what_a_scorer_may_return(name, tokenizer, batch, returned, value):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        return returned

    result = manager(name, tokenizer, plural(scorer) if name == "batch" else scorer)(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected([value] * 3))
    extras = {"pred": ["x"] * 3} if isinstance(returned, dict) else {}
    assert result["reward_extra_info"] == extras | {"reward_failure": [None] * 3}


def limited(manager, **limits):
    manager.limits = ScoringLimits(**limits)
    return manager


class Unreadable:
    def __repr__(self):
        raise SystemError


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1",
        math.nan,
        math.inf,
        10**400,
        pytest.param(10**5000, id="more digits than str allows"),
        -1e39,
        {},
        {"score": None},
        {"score": 1, "acc": 10**400},
        [],
        torch.ones(2),
        (),
        Unreadable(),
    ],
)
@pytest.mark.parametrize("name", ["naive", "batch", "dapo"])
def test_nonsense_costs_its_sample(name, tokenizer, batch, returned, caplog):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        return returned if extra_info["index"] == 1 else 1.0

    rewards = manager(name, tokenizer, plural(scorer) if name == "batch" else scorer)
    result = limited(rewards, failure_score=-0.5)(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected([1.0, -0.5, 1.0]))
    assert result["reward_extra_info"]["reward_failure"] == [None, "invalid", None]
    assert "1 of 3 responses could not be scored (1 invalid)" in caplog.text
    sample = "data_source 'openai/gsm8k', sample 1, ground truth '13': the scorer returned"
    assert sample in caplog.text and "[response] '#### 12'" in caplog.text
    strict = limited(rewards, max_failed_ratio=0.3)
    with pytest.raises(RewardError, match=r"sample 1, .*returned.*\(1 of 3 responses .*max_failed_ratio=0\.3\)"):
        strict(batch)
    assert limited(rewards, max_failed_ratio=0.34)(batch).sum() == 2.0


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("raised", [ValueError("bad"), SystemExit(2), RecursionError(), KeyboardInterrupt(), Mute()])
def test_a_scorer_that_raises_costs_its_sample(tokenizer, batch, raised, caplog):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        if ground_truth == "13":
            raise raised
        return {"score": 1, "acc": True, "pred": "a"}

    rewards = manager("naive", tokenizer, scorer)
    result = rewards(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected([1.0, 0.0, 1.0]))
    assert result["reward_extra_info"] == {
        "acc": [True, 0.0, True],
        "pred": ["a", None, "a"],
        "reward_failure": [None, "raised", None],
    }
    assert f"sample 1, ground truth '13': the scorer raised {type(raised).__name__}" in caplog.text
    assert "in scorer\n    raise raised" in caplog.text
    for row in batch.non_tensor_batch["reward_model"]:
        row["ground_truth"] = "13"
    assert rewards(batch, return_dict=True)["reward_extra_info"] == {
        "acc": [0.0] * 3,
        "pred": [None] * 3,
        "reward_failure": ["raised"] * 3,
    }
    caplog.clear()
    rewards(batch)  # the sample is shown once, the count every time
    assert "3 of 3" in caplog.text and "raise raised" not in caplog.text

    result = manager("batch", tokenizer, plural(scorer))(batch, return_dict=True)
    assert not result["reward_tensor"].any() and result["reward_extra_info"] == {"reward_failure": ["raised"] * 3}
    assert batch.batch["acc"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("returned", "got"), [([1.0], "1 scores"), (None, "NoneType"), (3.0, "float"), ({"score": 1}, "dict")]
)
def test_batch_scorer_with_the_wrong_length(tokenizer, batch, returned, got, caplog):
    assert not manager("batch", tokenizer, lambda **_: returned)(batch).any()
    assert f"must return 3 scores, it returned {got}" in caplog.text


def spin(data_source, solution_str, ground_truth, extra_info):
    while ground_truth == "13":
        try:
            time.sleep(3600) if solution_str else None
        except Exception:  # as scorers do: it must not swallow the interruption
            pass
    return 1.0


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def busy(data_source, solution_str, ground_truth, extra_info):
    while ground_truth == "13":
        pass
    return 1.0


@pytest.mark.parametrize(
    ("name", "scorer", "run"),
    [("naive", spin, None), ("dapo", spin, None), ("naive", busy, in_thread)],
    ids=["naive", "dapo", "thread"],
)
def test_a_scorer_that_hangs_costs_its_sample(name, scorer, run, tokenizer, batch):
    rewards = limited(manager(name, tokenizer, scorer), timeout_s=2.0)
    result = (run or (lambda call: call()))(lambda: rewards(batch, return_dict=True))
    assert torch.equal(result["reward_tensor"], expected([1.0, 0.0, 1.0]))
    assert result["reward_extra_info"]["reward_failure"] == [None, "timed out", None]


@pytest.mark.parametrize("name", ["naive", "batch"])
def test_a_custom_scorer_cannot_end_or_stop_this_process(name, tokenizer, batch, scorer_file, caplog):
    text = (
        "import os, time\n"
        "def one(truth):\n"
        "    while truth == '13':\n"
        "        try:\n            time.sleep(3600)\n        except BaseException:\n            pass\n"
        "    return os._exit(3) if truth == 'die' else 1.0\n"
        "def compute_score(ground_truth=None, ground_truths=(), **_):\n"
        "    return [one(each) for each in ground_truths] if ground_truths else one(ground_truth)\n"
    )
    limits = {"timeout_s": 8, "batch_timeout_s": 8 if name == "batch" else 120}  # the others answer on a busy machine
    node = {"reward_manager": name, "scoring": limits}
    path = scorer_file(text)
    named = config(custom_reward_function={"path": path}, reward_model=node)
    rewards = load_reward_manager(named, tokenizer, 0)
    assert load_reward_manager(named, tokenizer, 1).compute_score is rewards.compute_score  # one process for both
    batch.non_tensor_batch["reward_model"][0] = {"ground_truth": "die"}
    failures = rewards(batch, return_dict=True)["reward_extra_info"]["reward_failure"]
    assert failures == (["raised"] * 3 if name == "batch" else ["raised", "timed out", None])
    assert (
        "the scorer died: its process ended with code 3" in caplog.text
        and f"[scorer] compute_score of {path}" in caplog.text
    )
    if name == "batch":
        batch.non_tensor_batch["reward_model"][0] = {"ground_truth": "4"}
        assert rewards(batch, return_dict=True)["reward_extra_info"]["reward_failure"] == ["timed out"] * 3
    rewards.compute_score.close()
    sent = cloudpickle.loads(cloudpickle.dumps(rewards)).compute_score  # as to a Ray task
    assert sent(ground_truth="4") == 1.0 and not isinstance(sent, IsolatedFunction)
    named["reward_model"] = {"reward_manager": name, "scoring": {"isolate": False}}
    assert not isinstance(load_reward_manager(named, tokenizer, 0).compute_score, IsolatedFunction)


KINDS_OF_FUNCTIONS = """
import functools
class Counter:
    def __init__(self): self.calls = 0
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        self.calls += 1
        return self.calls
lambda_ = lambda data_source, solution_str, ground_truth, extra_info=None: 0.5
def plus(data_source, solution_str, ground_truth, extra_info, bonus): return bonus
partial = functools.partial(plus, bonus=0.5)
counter = Counter()
"""
KINDS_OF_RESULTS = """
import math, numpy as np, torch
class Share(float):
    "A class of this file, which the trainer has imported too."
def of_rows(values):
    def f(data_source, solution_str, ground_truth, extra_info):
        return values[extra_info["index"]]
    return f
numbers = of_rows([np.float32(0.5), torch.tensor([0.5]), Share(0.5)])
extras = of_rows([{"score": 0.5, "pred": "x", "seen": np.arange(2), "share": Share(1)}] * 3)
def nonsense(data_source, solution_str, ground_truth, extra_info):
    return {"huge": 10**400, "nan": math.nan, "nothing": None}[ground_truth]
"""


@pytest.mark.parametrize(
    ("text", "name", "managers"),
    [
        (KINDS_OF_FUNCTIONS, "lambda_", ["naive"]),
        (KINDS_OF_FUNCTIONS, "partial", ["naive"]),
        (KINDS_OF_RESULTS, "numbers", ["naive"]),  # by a closure
        (KINDS_OF_RESULTS, "extras", ["naive", "dapo"]),
    ],
    ids=["lambda", "partial", "numbers", "extras"],
)
def test_kinds_of_scorers_and_results_in_a_process(text, name, managers, tokenizer, batch, scorer_file):
    path = scorer_file(text)
    for kind in managers:
        results = []
        for isolate in (None, False):
            node = {"reward_manager": kind, "scoring": {"isolate": isolate}}
            named = config(custom_reward_function={"path": path, "name": name}, reward_model=node)
            rewards = load_reward_manager(named, tokenizer, 0)
            assert isinstance(rewards.compute_score, IsolatedFunction) == (isolate is None)
            results.append(rewards(batch, return_dict=True))
        apart, here = results
        assert torch.equal(apart["reward_tensor"], expected([0.5] * 3))
        assert repr(apart) == repr(here)
    by_value = ray.cloudpickle.list_registry_pickle_by_value()
    assert by_value and all(module.startswith("verl_external_") for module in by_value)


def test_nonsense_from_a_process_costs_its_sample(tokenizer, batch, scorer_file, caplog):
    named = config(custom_reward_function={"path": scorer_file(KINDS_OF_RESULTS), "name": "nonsense"})
    for kind, text in (("huge", "too large"), ("nan", "not finite"), ("nothing", "returned None")):
        batch.non_tensor_batch["reward_model"] = object_array([{"ground_truth": kind}] * 3)
        caplog.clear()
        result = load_reward_manager(named, tokenizer, 0)(batch, return_dict=True)
        assert result["reward_extra_info"]["reward_failure"] == ["invalid"] * 3 and not result["reward_tensor"].any()
        assert text in caplog.text


def test_a_scorer_keeps_its_state_from_batch_to_batch(tokenizer, batch, scorer_file):
    named = config(custom_reward_function={"path": scorer_file(KINDS_OF_FUNCTIONS), "name": "counter"})
    rewards = load_reward_manager(named, tokenizer, 0)
    assert torch.equal(rewards(batch), expected([1, 2, 3]))
    assert torch.equal(load_reward_manager(named, tokenizer, 1)(batch), expected([4, 5, 6]))  # as validation does


@pytest.mark.parametrize(
    ("line", "isolate", "is_isolated"),
    [
        ("import ray", None, False),
        ("import math\ndef g():\n    from ray.util import ActorPool", None, False),
        ("import ray", True, True),
        ("import array", None, True),
        ("ray = 1", None, True),
    ],
)
def test_a_scorer_that_imports_ray_runs_in_the_trainer(line, isolate, is_isolated, tokenizer, scorer_file, caplog):
    path = scorer_file(f"{line}\ndef compute_score(**_): return 1\n")
    node = {"reward_manager": "naive", "scoring": {"isolate": isolate}}
    rewards = load_reward_manager(config(custom_reward_function={"path": path}, reward_model=node), tokenizer, 0)
    assert isinstance(rewards.compute_score, IsolatedFunction) == is_isolated
    assert ("imports ray, so its scorer runs in the trainer" in caplog.text) == (not is_isolated)


def test_a_process_that_uses_ray_joins_the_cluster_of_the_run(tokenizer, batch, scorer_file, monkeypatch):
    """Without the address, Ray would start a second cluster in the process, where no actor of the run is."""
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "cloudpickle", cloudpickle, raising=False)
    path = scorer_file("import os\ndef compute_score(**_): return os.environ['RAY_ADDRESS'] == '10.0.0.1:6379'\n")
    rewards = load_reward_manager(config(custom_reward_function={"path": path}), tokenizer, 0)
    assert torch.equal(rewards(batch), expected([1.0] * 3))


def test_an_import_that_succeeds_only_once(tokenizer, scorer_file, tmp_path):
    text = (
        f"import pathlib\nmark = pathlib.Path({str(tmp_path)!r}, 'mark')\n"
        "if mark.exists(): raise OSError('address in use')\nmark.touch()\ndef compute_score(**_): return 1\n"
    )
    named = config(custom_reward_function={"path": scorer_file(text)})
    with pytest.raises(ValueError, match=r"address in use.*second import, in the trainer.*scoring\.isolate=false"):
        load_reward_manager(named, tokenizer, 0)
    (tmp_path / "mark").unlink()
    named["reward_model"] = {"reward_manager": "naive", "scoring": {"isolate": False}}
    assert load_reward_manager(named, tokenizer, 0).compute_score() == 1


def test_a_process_that_cannot_start_again_is_named(tokenizer, batch, scorer_file, tmp_path):
    text = (
        f"import os, pathlib\nmark = pathlib.Path({str(tmp_path)!r}, 'mark')\n"
        "if mark.exists(): raise OSError('disk is full')\ndef compute_score(**_):\n    mark.touch()\n    os._exit(3)\n"
    )
    path = scorer_file(text)
    rewards = load_reward_manager(config(custom_reward_function={"path": path}), tokenizer, 0)
    with pytest.raises(RewardError, match=rf"the scorer compute_score of {path} cannot start: .*disk is full"):
        rewards(batch)


def test_an_endless_import_of_a_scorer_is_named(tokenizer, scorer_file):
    path = scorer_file("while True: pass\ndef compute_score(**_): return 0\n")
    named = config(custom_reward_function={"path": path}, trainer={"ray_wait_register_center_timeout": 0.5})
    message = (
        rf"path='{path}': the import .* did not end within 0\.5 s \(trainer\.ray_wait_register_center_timeout=0\.5\)"
    )
    with pytest.raises(ValueError, match=message):
        load_reward_manager(named, tokenizer, 0)


def test_the_whole_batch_has_a_deadline(tokenizer, batch, caplog):
    rewards = limited(manager("naive", tokenizer, spin), batch_timeout_s=0.5)
    failures = rewards(batch, return_dict=True)["reward_extra_info"]["reward_failure"]
    assert failures == [None, "timed out", "timed out"]
    assert "batch_timeout_s=0.5" in caplog.text
    slow = limited(manager("batch", tokenizer, lambda **_: time.sleep(3600)), batch_timeout_s=0.5)
    assert slow(batch, return_dict=True)["reward_extra_info"]["reward_failure"] == ["timed out"] * 3


def test_time_limit_leaves_alarms_and_fast_bodies_alone():
    rang = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    with time_limit(30):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.05)
    signal.signal(signal.SIGALRM, previous)
    assert rang == [1]
    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        time.sleep(3600)


def test_batch_passes_its_kwargs_and_records_acc(tokenizer, batch):
    seen = {}

    def scorer(data_sources, solution_strs, ground_truths, extra_infos, bonus):
        seen["bonus"] = bonus
        return np.array([0.0, bonus, 1.0])

    reward = manager("batch", tokenizer, scorer, bonus=0.5)
    assert torch.equal(reward(batch), expected([0.0, 0.5, 1.0]))
    assert seen == {"bonus": 0.5} and batch.batch["acc"].tolist() == [0.0, 0.5, 1.0]
    assert reward.verify(batch) == [0.0, 0.5, 1.0]


def test_extras_of_mixed_sources_stay_aligned(tokenizer, batch):
    def scorer(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1, "pred": "a"} if extra_info["index"] == 1 else 0.0

    result = manager("naive", tokenizer, scorer)(batch, return_dict=True)
    assert result["reward_extra_info"] == {"pred": [None, "a", None], "reward_failure": [None] * 3}


@pytest.mark.parametrize("name", ["naive", "batch", "dapo", "prime"])
def test_given_scores_are_passed_on(name, tokenizer, batch):
    batch.batch["rm_scores"] = torch.rand(3, RESPONSE_WIDTH)
    batch.non_tensor_batch["turns"] = np.array([1, 2, 3])
    batch.meta_info["reward_extra_keys"] = ["turns"]
    rewards = manager(name, tokenizer, lambda *_, **__: pytest.fail("the scorer is not to be called"))
    assert torch.equal(rewards(batch), batch.batch["rm_scores"])
    assert rewards(batch, return_dict=True)["reward_extra_info"] == {"turns": [1, 2, 3]}


def test_dapo_punishes_long_responses(tokenizer, batch):
    # limit 8, buffer 4: free up to 4 tokens; lengths 7, 8, 0 exceed by 3, 4, -4; penalty factor 0.5 over 4 tokens
    config = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    result = manager("dapo", tokenizer, lambda **_: 1.0, max_resp_len=8, overlong_buffer_cfg=config)(
        batch, return_dict=True
    )
    assert torch.allclose(result["reward_tensor"], expected([1 - 0.375, 1 - 0.5, 1.0]))
    assert result["reward_extra_info"] == {
        "acc": [1.0] * 3,
        "score": [1.0] * 3,  # without the penalty
        "overlong_reward": [-0.375, -0.5, 0.0],
        "overlong": [True, True, False],
        "reward_failure": [None] * 3,
    }
    off = {**config, "enable": False, "len": 0}  # as the DAPO recipe has it by default
    free = manager("dapo", tokenizer, lambda **_: 1.0, max_resp_len=8, overlong_buffer_cfg=off)
    assert torch.equal(free(batch), expected([1.0] * 3))
    with pytest.raises(AssertionError, match="max_resp_len must be given"):
        manager("dapo", tokenizer, None, overlong_buffer_cfg=config)
    with pytest.raises(ValueError, match=r"overlong_buffer_cfg\.len must be in \[1, max_resp_len=3\], got 4"):
        manager("dapo", tokenizer, None, max_resp_len=3, overlong_buffer_cfg=config)


CHILD = f"unruly-child-of-{os.getpid()}"
"""No other run of these tests starts one of this name."""
UNRULY = f"""
import os, subprocess, sys, time
def f(data_source, completion, ground_truth, extra_info):
    if ground_truth == "4":
        raise KeyError("k")
    if ground_truth == "13":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "{CHILD}", str(os.getppid())])
        time.sleep(3600)
    if ground_truth == "die":
        os._exit(3)
    return {{"score": 1.0, "pred": "x"}}
"""


def children(text):
    return [p for p in psutil.process_iter(["cmdline"]) if text in (p.info["cmdline"] or [])]


def test_prime(tokenizer, batch, scorer_file, caplog):
    node = {"path": scorer_file(UNRULY), "name": "f"}
    named = config(custom_reward_function=node, reward_model={"reward_manager": "prime"})
    rewards = limited(load_reward_manager(named, tokenizer, 0, num_processes=2), timeout_s=8.0)
    result = rewards(batch, return_dict=True)
    assert torch.equal(result["reward_tensor"], expected([0.0, 0.0, 1.0]))
    assert result["reward_extra_info"] == {"reward_failure": ["raised", "timed out", None]}
    assert batch.batch["acc"].tolist() == [0.0, 0.0, 1.0]
    assert "the scorer raised KeyError: 'k'" in caplog.text and 'raise KeyError("k")' in caplog.text
    wait_until(lambda: not children(CHILD))  # what a scorer has started is killed with it

    batch.non_tensor_batch["reward_model"][0] = {"ground_truth": "die"}
    assert rewards.verify(batch) == [0.0, 0.0, 1.0]
    assert "ended with code 3" in caplog.text or "2 of 3" in caplog.text
    processes = [worker.process for worker in rewards.pool._workers]
    rewards.pool.close()
    assert processes and not any(process.poll() is None for process in processes)


def test_prime_scores_in_processes_for_forks(monkeypatch):
    """One response raises, one takes too long, and one is scored by a tuple."""
    monkeypatch.setattr(prime_scoring, "TIMEOUT_S", 5.0)

    def scorer(task, completion, reference, extra_info):  # in no module, so a process need not import one
        if completion == "bad":
            raise ValueError("no answer")
        if completion == "slow":
            time.sleep(3600)
        right = completion == reference
        return (right, "reason") if task == "pair" else right * (extra_info or {"weight": 1})["weight"]

    tasks, completions = ["pair", "own", "own", "own"], ["4", "bad", "slow", "4"]
    infos = [None, None, None, {"weight": 0.5}]
    scoring = parallel_compute_score_async(scorer, completions, ["4"] * 4, tasks, infos, num_processes=1)
    assert asyncio.run(scoring) == [1.0, 0.0, 0.0, 0.5]
    assert run_reward_scoring(scorer, ["4"], ["5"], ["own"]) == [0.0]
    with pytest.raises(ValueError, match="argument"):
        run_reward_scoring(scorer, ["4"], [], ["own"])


def test_limits_come_from_the_configuration(tokenizer):
    scoring = {"failure_score": -1, "timeout_s": 2, "batch_timeout_s": 3, "max_failed_ratio": 0.5}
    node = config(reward_model={"reward_manager": "naive", "scoring": scoring})
    assert load_reward_manager(node, tokenizer, 0).limits == ScoringLimits(
        failure_score=-1.0, timeout_s=2.0, batch_timeout_s=3.0, max_failed_ratio=0.5
    )


def test_registry():
    with pytest.raises(ValueError, match="'nope' is not one of .*naive"):
        get_reward_manager_cls("nope")
    with pytest.raises(ValueError, match="'naive' is already"):

        @register("naive")
        class Other(AbstractRewardManager):
            pass


def test_a_manager_without_a_way_to_score(tokenizer, batch):
    class Idle(AbstractRewardManager):
        """Neither ``score`` nor ``__call__``."""

    class Whole(AbstractRewardManager):
        """All of ``__call__``, as the established managers of users have it."""

        def __call__(self, data, return_dict=False):
            return expected([1, 2, 3])

    with pytest.raises(TypeError, match=r"Idle must define score.* or __call__"):
        Idle(tokenizer, 0)
    assert torch.equal(Whole(tokenizer, 0)(batch), expected([1, 2, 3]))


def config(**nodes):
    return {"data": {"reward_fn_key": "data_source"}, "reward_model": {"reward_manager": "naive"}, **nodes}


@pytest.fixture
def scorer_file(tmp_path):
    def write(text):
        path = tmp_path / f"scorer_{abs(hash(text))}.py"
        path.write_text(text)
        return str(path)

    return write


def test_custom_function_with_kwargs(tokenizer, batch, scorer_file):
    path = scorer_file("def f(data_source, solution_str, ground_truth, extra_info, bonus=0):\n    return bonus\n")
    node = {"path": path, "name": "f", "reward_kwargs": {"bonus": 2}}
    rewards = load_reward_manager(config(custom_reward_function=node), tokenizer, num_examine=0)
    assert torch.equal(rewards(batch), expected([2.0] * 3))


def test_custom_manager_registered_by_the_file(tokenizer, batch, scorer_file):
    path = scorer_file(
        "from verl.workers.reward_manager import NaiveRewardManager, register\n"
        "@register('doubled')\nclass Doubled(NaiveRewardManager):\n"
        "    def _score(self, sample):\n        return 2 * super()._score(sample)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"
    )
    node = {"custom_reward_function": {"path": path}, "reward_model": {"reward_manager": "doubled"}}
    rewards = load_reward_manager(config(**node), tokenizer, num_examine=0)
    assert REWARD_MANAGER_REGISTRY.pop("doubled") is type(rewards)
    assert torch.equal(rewards(batch), expected([2.0] * 3))


def test_a_manager_may_declare_its_call_and_score_by_functions(tokenizer, batch, scorer_file):
    path = scorer_file(
        "from verl.workers.reward_manager import AbstractRewardManager, register\n"
        "from verl.workers.rewards.scoring import Score\n"
        "@register('lengths')\nclass Lengths(AbstractRewardManager):\n"
        "    def __call__(self, data, return_dict=False):\n"
        "        score = lambda samples: [Score(self.compute_score(answer=s.response)) for s in samples]\n"
        "        to_rewards = lambda samples, scores: [2 * each.value for each in scores]\n"
        "        return self.score_batch(data, return_dict, score, to_rewards, writes_acc=True)\n"
        "    @classmethod\n"
        "    def call_scorer_example(cls, scorer):\n        return (), {'answer': ''}\n"
        "def compute_score(answer):\n    return len(answer)\n"
    )
    here = {"reward_manager": "lengths", "scoring": {"isolate": False}}
    node = {"custom_reward_function": {"path": path}, "reward_model": here}
    rewards = load_reward_manager(config(**node), tokenizer, num_examine=0)
    assert REWARD_MANAGER_REGISTRY.pop("lengths") is type(rewards)
    assert torch.equal(rewards(batch), expected([2.0 * len(text) for text in RESPONSES]))
    assert batch.batch["acc"].tolist() == [len(text) for text in RESPONSES]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (None, FileNotFoundError, r"custom_reward_function\.path=.*nowhere\.py"),
        ("import sys\nsys.exit(3)\n", RuntimeError, r"custom_reward_function\.path=.*SystemExit: 3"),
        ("raise KeyboardInterrupt\n", RuntimeError, r"custom_reward_function\.path=.*KeyboardInterrupt"),
        ("def f(:\n", RuntimeError, r"custom_reward_function\.path=.*SyntaxError"),
        ("import no_such_module\n", RuntimeError, r"custom_reward_function\.path=.*no_such_module"),
        ("x = 1\n", AttributeError, r"custom_reward_function\.name='f'.*has no 'f'"),
        ("f = 1\n", TypeError, r"custom_reward_function\.name='f'.*must be a function, it is a int"),
        ("async def f(**_):\n    return 1\n", TypeError, "is asynchronous"),
        ("class C:\n    async def __call__(self, **_): return 1\nf = C()\n", TypeError, "is asynchronous"),
        ("class f:\n    def __init__(self, **_): ...\n", TypeError, r"is a class.*`scorer = f\(\)`"),
        ("def f(**_):\n    yield 1\n", TypeError, "yields instead of returning"),
        ("class C:\n    def __call__(self, **_): return 1\nf = C()\n", None, ""),
        (
            "def f(answer):\n    return 1\n",
            TypeError,
            r"f\(answer\) cannot be called by NaiveRewardManager with \(data_source, sol",
        ),
        (
            "def f(data_source, solution_str, ground_truth):\n    return 1\n",
            TypeError,
            "unexpected keyword argument 'extra_info'",
        ),
        ("def f(**k):\n    return 1\n", None, ""),
    ],
)
def test_custom_function_is_checked_at_load(scorer_file, text, kind, message):
    path = "/nowhere.py" if text is None else scorer_file(text)
    node = config(custom_reward_function={"path": path, "name": "f"})
    if kind is None:
        assert resolve_reward(node)[1]() == 1
        return
    with pytest.raises(kind, match=message) as caught:
        resolve_reward(node)
    assert isinstance(caught.value, ValueError)


def test_settings_that_have_no_meaning_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"reward_model\.reward_kwargs holds \['bonus'\]"):
        load_reward_manager(config(), tokenizer, 0, bonus=1)
    with pytest.raises(ValueError, match=r"reward_manager=batch.*custom_reward_function\.path"):
        load_reward_manager(config(reward_model={"reward_manager": "batch"}), tokenizer, 0)


def test_compute_reward_takes_functions_with_and_without_extras():
    data, scores = DataProto.from_dict({"responses": torch.zeros(2, 3)}), torch.ones(2, 3)
    assert compute_reward(data, lambda data: scores) == (scores, {})
    both = {"reward_tensor": scores, "reward_extra_info": {"a": [1, 2]}}
    assert compute_reward(data, lambda data, return_dict=False: both) == (scores, {"a": [1, 2]})


def test_a_score_that_is_no_number_costs_its_sample(caplog):
    """As a reward model or a manager of the user's may give one: of the managers here no such score comes."""
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, torch.nan, 0.0], [-torch.inf, 0.0, torch.inf], [0.0, 0.0, 2.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    tensors = {"responses": torch.zeros(4, 3), "attention_mask": mask}
    data = DataProto.from_dict(tensors, {"data_source": np.array(list("abcd"), dtype=object)})

    class Manager:
        limits = ScoringLimits(failure_score=-1.0, max_failed_ratio=0.5)

        def __call__(self, data, return_dict=False):
            return {"reward_tensor": scores, "reward_extra_info": {"reward_failure": [None, None, None, "raised"]}}

    got, extras = compute_reward(data, Manager())
    assert got.tolist() == [[0, 1, 0], [0, -1, 0], [-1, 0, 0], [0, 0, 2]]
    assert extras == {"reward_failure": [None, "invalid", "invalid", "raised"]}
    assert "2 of 4 responses have a score that is not a finite number, the first in row 1" in caplog.text
    assert compute_reward(data, lambda data: scores)[1] == {"reward_failure": [None, "invalid", "invalid", None]}
    Manager.limits = ScoringLimits(max_failed_ratio=0.4)
    with pytest.raises(RewardError, match=r"data_source 'b': more than reward_model.scoring.max_failed_ratio=0.4"):
        compute_reward(data, Manager())


def test_a_manager_of_the_user_has_a_deadline(monkeypatch):
    class Slow:
        limits = ScoringLimits(batch_timeout_s=0.1)

        def __call__(self, data, return_dict=False):
            time.sleep(3600)

    monkeypatch.setattr(reward, "START_TIMEOUT_S", 0.1)
    message = r"manager Slow, which calls .*Slow.* of .*test_reward_managers\.py, did not end within .*timeout_s=0\.1"
    with pytest.raises(RewardError, match=message):
        compute_reward(SimpleNamespace(non_tensor_batch={}), Slow())


def test_a_scorer_does_not_write_over_what_the_trainer_reads(caplog):
    rewards._warn_once.cache_clear()
    both = {"reward_tensor": torch.ones(2, 3), "reward_extra_info": {"uid": ["x", "x"], "acc": [1, 0]}}
    for _ in range(2):
        data = DataProto.from_dict({"responses": torch.zeros(2, 3)})
        _, extras = compute_reward(data, lambda data, return_dict=False: both)
        assert extras == {"acc": [1, 0], "extra/uid": ["x", "x"]}
    assert caplog.text.count("returns 'uid', a column of the trainer") == 1


class ConnectTimeout(Exception):
    """A class of the name that httpx gives it."""


class HTTPStatusError(Exception):
    """An error that holds the answer of a server."""

    def __init__(self, status):
        super().__init__(f"HTTP status {status}")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError("no judge"), "unavailable"),
        (ConnectTimeout("no judge"), "unavailable"),
        (HTTPStatusError(503), "unavailable"),
        (OSError(28, "No space left on device"), "unavailable"),
        (HTTPStatusError(400), "raised"),
        (TimeoutError("the program did not end"), "raised"),
        (ValueError("no number"), "raised"),
        (FileNotFoundError(2, "no such file"), "raised"),
    ],
)
@pytest.mark.parametrize("name", ["naive", "batch", "dapo"])
def test_what_no_response_can_cause_is_told_apart(tokenizer, batch, name, error, kind):
    def score(data_source, solution_str, ground_truth, extra_info):
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("the scorer gives up") from cause

    scorer = plural(score) if name == "batch" else score
    result = manager(name, tokenizer, scorer)(batch, return_dict=True)
    assert result["reward_extra_info"]["reward_failure"] == [kind] * 3


def test_a_failure_gets_the_lowest_score_that_the_scorer_states(tokenizer, batch):
    """The built-in scorer of math_dapo states -1, a function its attribute; a written score wins."""

    def raises(**sample):
        raise ValueError("no number")

    batch.non_tensor_batch["data_source"] = object_array(["openai/gsm8k", "math_dapo", "math_dapo"])
    batch.non_tensor_batch["reward_model"] = object_array([{"ground_truth": None}] * 3)
    built_in = manager("naive", tokenizer, None)
    built_in._score = raises
    assert built_in(batch).sum(-1).tolist() == [0, -1, -1]
    own = manager("naive", tokenizer, raises)
    assert own(batch).sum(-1).tolist() == [0, 0, 0]
    batch.non_tensor_batch["data_source"] = object_array(["a", "a", "b"])
    some = manager(
        "naive", tokenizer, lambda data_source, solution_str, **more: -3.0 if "12" in solution_str else raises()
    )
    assert some(batch).sum(-1).tolist() == [-3, -3, 0]
    raises.lowest_score = -0.5
    assert own(batch).sum(-1).tolist() == [-0.5] * 3
    own.limits = ScoringLimits(failure_score=0.25)
    assert own(batch).sum(-1).tolist() == [0.25] * 3
    assert set(LOWEST_SCORES) == set(SCORERS.values()) | set(PREFIXES.values())


MANAGER = """
from verl.workers.reward_manager import AbstractRewardManager
from verl.workers.rewards.scoring import Score
class Halves(AbstractRewardManager):
    def score(self, samples):
        return [Score(0.5)] * len(samples)
"""


def test_a_manager_in_a_file(tokenizer, batch, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MANAGER)
    manager = load_reward_manager(config(reward_model={"reward_manager": f"{path}:Halves"}), tokenizer, 0)
    assert type(manager).__name__ == "Halves"
    assert torch.equal(manager(batch), expected([0.5] * 3))
    with pytest.raises(ValueError, match="has no 'Thirds'"):
        load_reward_manager(config(reward_model={"reward_manager": f"{path}:Thirds"}), tokenizer, 0)
