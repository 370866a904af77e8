"""The recipe collabllm: its loop, user, judge, metrics and data, with real servers of the test."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from examples.tiny_model import byte_tokenizer
from recipe.collabllm import process_dataset
from recipe.collabllm.collabllm_agent_loop import CollabLLMAgentLoop
from recipe.collabllm.collabllm_interaction import CollabLLMInteraction
from recipe.collabllm.metrics import bleu_score, pass_rate
from recipe.collabllm.tiny import people
from tests.experimental.agent_loop.token_server import TokenServer
from tests.http_service import Service, service
from verl.errors import DataError, WrongInput
from verl.experimental.agent_loop import AsyncLLMServerManager
from verl.experimental.agent_loop.base import WholeConfig
from verl.protocol import DataProto
from verl.trainer.config.cli import CONFIG_DIR
from verl.workers.rewards.loading import load_reward_manager

TOKENIZER = byte_tokenizer()
FILES = Path(people.__file__).parents[1]
ASK = {"role": "user", "content": "write my name"}
ROW = {"name": "collabllm", "single_turn_prompt": "write rado", "task_desc": "a name"}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def replies(request: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"message": assistant(people.answer(request["messages"]))}]}


# ---- the loop


def config_of(**changes: Any) -> DictConfig:
    turns = {"max_assistant_turns": 4, "num_repeat_rollouts": 3, "tokenization_sanity_check_mode": "disable"}
    turns["interaction_config_path"] = str(FILES / "config/collabllm_interaction_config.yaml")
    values = {f"multi_turn.{key}": value for key, value in turns.items()} | {"prompt_length": 24, "response_length": 60}
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        overrides = [f"++actor_rollout_ref.rollout.{key}={value}" for key, value in (values | changes).items()]
        return compose("ppo_trainer", ["actor_rollout_ref.model.path=tiny", *overrides])


def run(config: DictConfig, says: Any, seed: int = 7) -> tuple[Any, TokenServer]:
    server = TokenServer(TOKENIZER, says)

    async def whole() -> Any:
        loop = CollabLLMAgentLoop(WholeConfig(config), AsyncLLMServerManager(config, [server]), TOKENIZER)
        params = {"temperature": 1.0, "seed": seed, "logprobs": True}
        return await loop.run(params, raw_prompt=[ASK], extra_info={"interaction_kwargs": ROW})

    return asyncio.run(whole()), server


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Any:
    with service(replies) as served:
        monkeypatch.setenv("USER_BASE_URL", served.url)
        yield served


def test_conversations_go_on_from_the_first_turn(user: Service) -> None:
    """The first turn is trained; the others have other seeds, which are the same in another run."""
    begin = "<|user|>write my name<|end|><|assistant|>"

    def says(prompt: str) -> str:
        return "who?" if prompt == begin else "rado"

    config = config_of()
    output, server = run(config, says)
    assert output.prompt_ids == TOKENIZER.encode(begin)
    assert output.response_ids == TOKENIZER.encode("who?<|end|>") and output.response_mask == [1] * 5
    assert len(output.response_logprobs) == 5 and output.num_turns == 4
    whole = [ASK, assistant("who?"), {"role": "user", "content": "rado"}, assistant("rado")]
    assert output.extra_fields["conversations"] == [whole] * 3 and output.extra_fields["num_prompt_messages"] == 1
    assert len(user.requests) == 6 and user.requests[0]["model"] == "gpt-4o-mini"
    assert "write rado" in user.requests[0]["messages"][0]["content"]
    prompts = [TOKENIZER.decode(prompt) for _, prompt, _ in server.asked]
    assert prompts == [begin, *[f"{begin}who?<|end|><|user|>rado<|end|><|assistant|>"] * 3]
    seeds = [params["seed"] for _, _, params in server.asked]
    assert seeds[0] == 7 and len(set(seeds)) == 4
    again = [params["seed"] for _, _, params in run(config, says)[1].asked]
    assert sorted(again) == sorted(seeds)


def test_turns_that_lead_to_nothing(user: Service) -> None:
    """One that has no room to end leads to no conversation; one that is the last allowed is the whole of it."""
    output, _ = run(config_of(response_length=3), lambda prompt: "who?")
    assert output.extra_fields["conversations"] == [] and output.response_mask == [1] * 3
    output, _ = run(config_of(**{"multi_turn.max_assistant_turns": 1}), lambda prompt: "who?")
    assert output.extra_fields["conversations"] == [[ASK, assistant("who?")]] * 3 and not user.requests


def test_a_loop_without_a_user_or_with_tools_is_refused() -> None:
    for key, value in {"interaction_config_path": "null", "tool_config_path": "tools.yaml"}.items():
        with pytest.raises(WrongInput, match=f"multi_turn.{key}={value}: collabllm_agent"):
            run(config_of(**{f"multi_turn.{key}": value}), lambda prompt: "who?")


# ---- the user


def test_the_keys_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([(503, {}), (200, {"choices": [{"message": assistant("rado")}]}), replies])

    def answer(request: dict[str, Any]) -> Any:
        found = next(answers)
        return found(request) if callable(found) else found

    async def talk(url: str) -> list[Any]:
        given = {"user_model": "m", "base_url": url, "num_retries": 2, "retry_delay_s": 0.01, "max_tokens": 9}
        person = CollabLLMInteraction(given | {"temperature": 0.5, "enable_log": True})
        name = await person.start_interaction(**ROW)
        first = await person.generate_response(name, [ASK, assistant("who?")])
        second = await person.generate_response(name, [ASK, assistant("rado")])
        await person.finalize_interaction(name)
        with pytest.raises(WrongInput, match=r"interaction_kwargs\.single_turn_prompt"):
            await person.start_interaction(name="collabllm")
        return [first[:2], second[:2]]

    with service(answer) as served:
        assert asyncio.run(talk(served.url)) == [(False, "rado"), (True, "")]
    request = served.requests[1]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 9, 0.5)
    assert "[[TERMINATE CHAT]]" in request["messages"][0]["content"]
    assert '{"role": "assistant", "content": "rado"}' in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"config\.num_retries"):
        CollabLLMInteraction({"num_retries": 0})


# ---- the reward

SCORING = {"failure_score": -5.0, "timeout_s": 10.0, "batch_timeout_s": 20.0, "max_failed_ratio": 1.0}


def manager_of(url: str, weights: dict[str, float], **judge: Any) -> Any:
    kwargs = {"metric_weights": weights, "llm_judge_kwargs": {"base_url": url, "retry_delay_s": 0.01, **judge}}
    function = {"path": str(FILES / "reward_function.py"), "name": "conversation_level_reward_func"}
    config = {
        "data": {"reward_fn_key": "data_source"},
        "reward_model": {"reward_manager": "collabllm", "scoring": SCORING},
        "custom_reward_function": function,
    }
    return load_reward_manager(DictConfig(config), TOKENIZER, 0, **kwargs)


def batch(conversations: list[list[Any]]) -> DataProto:
    size = len(conversations)
    ids = torch.full((size, 4), 97)
    columns = {
        "data_source": ["names"] * size,
        "reward_model": [{"style": "rule", "ground_truth": "rado"}] * size,
        "extra_info": [{"interaction_kwargs": ROW}] * size,
        "conversations": conversations,
        "num_prompt_messages": [1] * size,
    }
    made = {name: np.empty(size, dtype=object) for name in columns}
    for name, rows in columns.items():
        made[name][:] = rows
    tensors = {"prompts": ids, "responses": ids, "attention_mask": torch.ones(size, 8, dtype=torch.long)}
    return DataProto.from_dict(tensors, made)


ASKED = [ASK, assistant("who?"), {"role": "user", "content": "rado"}, assistant("rado")]
GUESSED = [ASK, assistant("bibi")]


def test_a_response_is_worth_the_mean_of_its_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with service(replies) as served:
        weights = {"accuracy": 1.0, "interactivity": 0.5, "token_amount": -0.01}
        manager = manager_of(served.url, weights, model="m", max_tokens=7, temperature=0.2)
        result = manager(batch([[ASKED, GUESSED], [GUESSED], []]), return_dict=True)
    # 12 tokens follow the request in the first conversation, 4 in the other; half of them ask and are right
    expected = [0.5 + 0.5 * 0.5 - 0.01 * 8, -0.01 * 4, -1.0]
    assert result["reward_tensor"][:, -1].tolist() == pytest.approx(expected)
    extras = result["reward_extra_info"]
    assert extras["accuracy"] == [0.5, 0.0, 0.0] and extras["token_amount"] == [8.0, 4.0, 0.0]
    assert extras["interactivity"] == [0.5, 0.0, 0.0] and extras["unfinished"] == [0.0, 0.0, 1.0]
    request = served.requests[0]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 7, 0.2)
    assert served.headers[0]["Authorization"] == "Bearer secret" and len(served.requests) == 6


def test_a_judge_without_a_verdict_costs_its_response() -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        text = request["messages"][-1]["content"]
        said = "Fine." if "bibi" in text else '{"accuracy": 2}' if "baba" in text else 'So: {"accuracy": 1} {1}'
        return 200, {"choices": [{"message": assistant(said)}]}

    with service(answer) as served:
        rows = [[GUESSED, ASKED], [[ASK, assistant("baba")]], [ASKED]]
        result = manager_of(served.url, {"accuracy": 1.0})(batch(rows), return_dict=True)
    assert result["reward_tensor"][:, -1].tolist() == [-5.0, -5.0, 1.0]
    assert result["reward_extra_info"]["reward_failure"] == ["raised", "raised", None]


def test_wrong_keys_and_rows_are_refused_by_name() -> None:
    with pytest.raises(WrongInput, match="metric_weights is empty: .* accuracy, bleu_score, interactivity, pass_rate"):
        manager_of("http://judge", {})
    with pytest.raises(WrongInput, match=r"metric_weights.acuracy: is no metric: .* \(the nearest: accuracy\)"):
        manager_of("http://judge", {"acuracy": 1.0})
    with pytest.raises(ValueError, match=r"llm_judge_kwargs\.max_token"):
        manager_of("http://judge", {"accuracy": 1.0}, max_token=1)
    data = batch([[ASKED]])
    data.non_tensor_batch.pop("conversations")
    with pytest.raises(WrongInput, match="agent_name=collabllm_agent"):
        manager_of("http://judge", {"accuracy": 1.0})(data)


def test_bleu() -> None:
    """By hand: 3 of 4 words, (1+1)/(3+1) pairs, (0+1)/(2+1) triples, (0+1)/(1+1), and 4 words against 5."""
    found = bleu_score.bleu("the cat sat here", "The cat has sat.")
    assert found == pytest.approx((3 / 4 * 2 / 4 * 1 / 3 * 1 / 2) ** 0.25 * np.exp(1 - 5 / 4))
    assert bleu_score.bleu("a b c d e", "A b c d e") == pytest.approx(1.0)
    assert bleu_score.bleu("", "a") == bleu_score.bleu("b", "a") == 0.0


UNITTEST = """
import unittest

class TestCases(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)

    def test_three(self):
        self.assertEqual(double(3), 6)
"""


@pytest.mark.parametrize(
    ("said", "test", "share"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", UNITTEST, 1.0),
        ("```python\ndef double(x):\n    return x + 2\n```", UNITTEST, 0.5),
        ("```python\ndef double(x):\n    return x + 2\n```", ["assert double(2) == 4", "assert double(1) == 2"], 0.5),
        ("I cannot.", UNITTEST, 0.0),
    ],
)
def test_pass_rate(said: str, test: Any, share: float) -> None:
    messages = [ASK, assistant(said), {"role": "user", "content": "ok"}, assistant("You are welcome.")]
    extra = {"single_turn_metadata": {"test": test}}
    found = asyncio.run(pass_rate.compute_score("code", messages, None, extra, num_prompt_messages=1))
    assert found == share


def test_pass_rate_without_tests() -> None:
    with pytest.raises(ValueError, match=r"single_turn_metadata\.test"):
        asyncio.run(pass_rate.compute_score("code", [ASK], None, {}, num_prompt_messages=1))


# ---- data


def test_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    def write(kind: str) -> dict[str, Any]:
        words = ["process", "--source", "synthetic", "--dataset_type", kind, "--local_dir", str(tmp_path / kind)]
        monkeypatch.setattr("sys.argv", words)
        assert process_dataset.main() == 0
        files = {split: str(tmp_path / kind / f"{split}.parquet") for split in ("train", "validation")}
        return {split: datasets.Dataset.from_parquet(file) for split, file in files.items()}

    rows = write("rl")
    assert len(rows["validation"]) == 6 and len(rows["train"]) <= 58
    row = rows["train"][0]
    assert row["agent_name"] == "collabllm_agent" and row["prompt"][-1]["role"] == "user"
    kwargs = row["extra_info"]["interaction_kwargs"]
    assert kwargs["name"] == "collabllm" and kwargs["task_desc"] == "a mathematical problem"
    assert kwargs["single_turn_prompt"].startswith("Add") and row["reward_model"]["ground_truth"].isdigit()
    assert write("sft")["train"][0]["messages"][-1]["role"] == "assistant"


def test_which_turns_are_kept() -> None:
    first = {"prompt": [ASK], "completion": "who?", "conv_id": 1, "score": 0.9, "single_turn_prompt": "t"}
    good = {**first, "prompt": ASKED[:3], "completion": "a", "score": 0.5}
    bad = {**good, "completion": "b", "score": 0.1}
    other = {**first, "conv_id": 2}
    rows = [first, bad, good, other]
    assert process_dataset.longest_of_each_conversation(rows) == [good, other]
    assert process_dataset.each_prompt_once(rows) == [first, bad]
    parts = process_dataset.split_by_conversation(rows, 0.1, seed=0)
    assert sorted(len(each) for each in parts.values()) == [1, 3]
    with pytest.raises(DataError, match="1 conversations"):
        process_dataset.split_by_conversation([first], 0.1, seed=0)
    with pytest.raises(ValueError, match="must end with a message of the user"):
        process_dataset.prompt_of({"prompt": [assistant("hi")]})


def test_the_rows_of_the_tiny_task() -> None:
    from recipe.collabllm.tiny import make_task

    rows = make_task.tables(0)
    names = {split: {row["reward_model"]["ground_truth"] for row in rows[split]} for split in ("train", "test")}
    assert not names["train"] & names["test"]
    asks = [json.dumps(row).count(make_task.ASKS) for row in rows["sft"]]
    assert sum(asks[1::2]) == sum(asks[::2]) == len(asks) // 8
