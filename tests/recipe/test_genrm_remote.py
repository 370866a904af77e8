"""The judge behind a server: verdicts, failures of every kind, deadlines and the limit on requests."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.genrm_remote import reward_function
from recipe.genrm_remote.reward_function import JudgeError, compute_score, compute_score_batch, verdict
from tests.recipe.genrm_server import Judge
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import failure_metrics
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.net_utils import get_free_port

FAST = {"retry_delay_s": 0.01, "timeout_s": 5.0, "batch_timeout_s": 10.0}
SCORING = {"failure_score": -0.5, "timeout_s": 10.0, "batch_timeout_s": 20.0, "max_failed_ratio": 1.0}
TRUE, FALSE = r"It holds. \boxed{True}", r"First \boxed{True}, but no: \boxed{False}"


def row(solution, question="1 + 1 = ?", split="train"):
    return ("openai/gsm8k", solution, "2", {"question": question, "split": split})


def batch(solutions, url, **options):
    columns = list(zip(*(row(solution) for solution in solutions), strict=True))
    return compute_score_batch(*map(list, columns), base_url=url, **(FAST | options))


def right_is_two(handler, text, times):
    return TRUE if text.rsplit("[Solution]\n", 1)[1].endswith("2") else FALSE


def test_verdicts_come_back_in_the_order_of_the_rows(monkeypatch):
    monkeypatch.setenv("GENRM_API_KEY", "secret")
    solutions = [f"{number} so it is {2 if number % 3 else 3}" for number in range(24)]
    with Judge(right_is_two) as judge:
        assert batch(solutions, judge.url) == [float(number % 3 > 0) for number in range(24)]
        assert compute_score(*row("2"), base_url=f"{judge.url}/v1/", **FAST) == 1.0
    assert judge.paths == {"/v1/chat/completions"} and judge.keys == {"Bearer secret"}
    request = judge.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("genrm-demo", 0.7, 4096)
    (shown,) = [each["messages"][0]["content"] for each in judge.requests if "23 so it is" in str(each)]
    assert "[Problem]\n1 + 1 = ?" in shown and "[Reference answer]\n2" in shown and r"\boxed{}" in shown


def test_rows_of_the_test_split_are_scored_by_their_rule_and_no_server_is_asked():
    rows = [row("#### 2", split="test"), row("#### 3", split="test")]
    columns = map(list, zip(*rows, strict=True))
    assert compute_score_batch(*columns, base_url="http://127.0.0.1:1", **FAST) == [1.0, 0.0]


def test_a_server_that_recovers_is_asked_again():
    def answer(handler, text, times):
        if times > 2:
            return TRUE
        if "429" in text:
            return handler.send(429, {"error": "slow down"}, Retry_After="0.05")
        if "cut" in text:
            return handler.send(200, b'{"choices": [')
        if "gone" in text:
            return handler.connection.close()
        return handler.send(503, {"error": "starting"})

    with Judge(answer) as judge:
        assert batch(["429", "503", "cut", "gone"], judge.url) == [1.0] * 4
        assert all(times == 3 for times in judge.seen.values())
        scores = batch(["429 again", "503 again"], judge.url, max_attempts=2)
    assert all(isinstance(score, JudgeError) for score in scores)
    assert "no answer in 2 attempts" in str(scores[0]) and "HTTP 429" in str(scores[0]) and "HTTP 503" in str(scores[1])


def test_what_no_attempt_can_mend_is_not_tried_again():
    with Judge(lambda handler, text, times: handler.send(401, {"error": "no key"})) as judge:
        (score,) = batch(["2"], judge.url)
        assert "refuses the request with HTTP 401" in str(score) and "no key" in str(score)
        assert len(judge.requests) == 1
        with pytest.raises(JudgeError, match="HTTP 401"):
            compute_score(*row("2"), base_url=judge.url, **FAST)


def test_a_slow_server_costs_its_rows_and_no_more_than_the_deadline():
    """Whether it hangs, or sends a byte at a time for ever."""

    def answer(handler, text, times):
        if "hangs" in text:
            handler.judge.closing.wait()
            return None
        return handler.trickle() if "trickles" in text else TRUE

    with Judge(answer) as judge:
        *slow, fast = batch(["hangs", "trickles", "fast"], judge.url, timeout_s=1.5)
        assert fast == 1.0 and all(isinstance(score, JudgeError) and "1.5 s" in str(score) for score in slow)
        scores = batch(["hangs", "fast"] * 3, judge.url, batch_timeout_s=1.5, max_concurrency=2, timeout_s=3600)
        assert isinstance(scores[0], JudgeError) and scores[1] == 1.0


def test_no_more_requests_at_once_than_allowed():
    def answer(handler, text, times):
        time.sleep(0.03)
        return TRUE

    with Judge(answer) as judge:
        assert batch([f"{n}" for n in range(20)], judge.url, max_concurrency=4) == [1.0] * 20
    assert judge.most_active == 4


def test_a_server_that_is_not_there():
    scores = batch(["2"], f"http://127.0.0.1:{get_free_port()}")
    assert "ConnectionRefusedError" in str(scores[0])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (TRUE, 1.0), (FALSE, 0.0), (r"\boxed{ true }", 1.0), (r"\boxed{\text{False}}", 0.0),
        ("True", None), (r"\boxed{maybe}", None), ("", None), (EndpointError("gone"), None),
    ],
)  # fmt: skip
def test_verdicts(answer, score):
    found = verdict(answer)
    assert isinstance(found, JudgeError) if score is None else found == score


def test_rows_without_a_question_and_wrong_options():
    scores = compute_score_batch(["s"], ["2"], ["2"], [{"split": "train"}], base_url="http://127.0.0.1:1", **FAST)
    assert "no extra_info.question" in str(scores[0])
    with pytest.raises(ValueError, match="base_url='judge:80' must be a server address"):
        ChatEndpoint("judge:80", "m")
    with pytest.raises(ValueError, match="max_attempts=0 must be above 0"):
        ChatEndpoint("http://judge", "m", max_attempts=0)
    with pytest.raises(TypeError, match="temprature"):
        compute_score_batch([], [], [], [], temprature=1)


def test_a_row_without_a_verdict_gets_the_failure_score_and_is_counted(caplog):
    from examples.tiny_model import byte_tokenizer
    from verl.trainer.ppo.reward import load_reward_manager

    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer.encode(text) for text in ("so 2", "so 3", "hm 2")])
    columns = {
        "data_source": ["openai/gsm8k"] * 3,
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * 3,
        "extra_info": [{"question": "1 + 1 = ?", "split": "train"}] * 3,
    }
    tensors = {"prompts": ids, "responses": ids, "attention_mask": torch.ones(3, 8, dtype=torch.long)}
    data = DataProto.from_dict(tensors, {name: np.array(rows, dtype=object) for name, rows in columns.items()})
    with Judge(
        lambda handler, text, times: "Hm." if text.endswith("hm 2") else right_is_two(handler, text, times)
    ) as judge:
        function = {
            "path": reward_function.__file__,
            "name": "compute_score_batch",
            "reward_kwargs": {"base_url": judge.url, **FAST},
        }
        config = {
            "data": {"reward_fn_key": "data_source"},
            "reward_model": {"reward_manager": "batch", "scoring": SCORING},
            "custom_reward_function": function,
        }
        result = load_reward_manager(OmegaConf.create(config), tokenizer, 0)(data, return_dict=True)
    assert result["reward_tensor"][:, -1].tolist() == [1.0, 0.0, -0.5]
    reasons = result["reward_extra_info"]["reward_failure"]
    assert reasons[:2] == [None, None] and "no verdict" in caplog.text
    assert failure_metrics("reward", reasons) == {"reward/failed": 1, "reward/failed_ratio": pytest.approx(1 / 3)}


@pytest.mark.full
def test_vllm_serves_a_judge(tmp_path):
    """The server of vLLM answers, through the same client: a tiny model has no verdict to give."""
    from examples.tiny_model import make_tiny_model

    pytest.importorskip("vllm")
    model, port = make_tiny_model(str(tmp_path / "model")), get_free_port()
    words = ["--model", model, "--port", str(port), "--served-model-name", "genrm-demo", "--enforce-eager"]
    words += ["--max-model-len", "1024", "--dtype", "float32", "--host", "127.0.0.1"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(Path(reward_function.__file__).parents[2]),
    }
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_up(url):
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
        judge = reward_function.endpoint(base_url=url, max_tokens=16, timeout_s=600)
        (answer,) = judge.ask_all([[{"role": "user", "content": "1 + 1 ="}]])
        assert isinstance(answer, str) and answer
        (score,) = batch(["2"], url, max_tokens=16, timeout_s=600)
        assert "no verdict" in str(score)
        (refused,) = reward_function.endpoint(base_url=url, model="other").ask_all([[{"role": "user", "content": "x"}]])
        assert isinstance(refused, EndpointError) and "HTTP 404" in str(refused)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False
