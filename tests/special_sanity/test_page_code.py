"""The Python on the pages does what the pages say; that of the single controller runs in its own test."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from examples.tiny_model import byte_tokenizer
from tests.special_sanity.test_examples import composed
from verl import DataProto

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str, containing: str) -> str:
    """Return the Python block of a page that holds a text."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return found


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run code with some names defined and return all names afterwards."""
    namespace = {"__name__": "page", **names}
    exec(code, namespace)
    return namespace


def test_a_layout_of_your_own() -> None:
    from verl.trainer.ppo.utils import Role

    runner = run(code_of("advance/placement.md", "class SplitTaskRunner"))["SplitTaskRunner"]()
    runner.mapping = dict.fromkeys((Role.ActorRollout, Role.RefPolicy, Role.Critic), "global_pool")
    config = composed("verl.trainer.main_ppo", ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "trainer.device=cpu"])
    pools = runner.init_resource_pool_mgr(config)
    assert pools.resource_pool_spec == {"first": [4, 4], "second": [4, 4]} and pools.get_n_gpus() == 16
    assert pools.mapping == {Role.ActorRollout: "first", Role.RefPolicy: "first", Role.Critic: "second"}


def test_a_request_of_your_own() -> None:
    drive = run(code_of("advance/conversation_code.md", "AsyncRolloutRequest"))["with_a_tool"]
    tokenizer = byte_tokenizer()
    turns = [tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False) for text in ("2*3", "It is 6")]
    asked: list[list[int]] = []

    def generate(prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        asked.append(prompt_ids)
        token_ids = turns[len(asked) - 1]
        return token_ids, [-0.5] * len(token_ids)

    request = drive(tokenizer, [{"role": "user", "content": "2*3?"}], generate, lambda text: str(eval(text)))
    talk = [("user", "2*3?"), ("assistant", "2*3"), ("tool", "6"), ("assistant", "It is 6")]
    assert [(message.role, message.content) for message in request.messages] == talk
    whole = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in talk], tokenize=False)
    assert tokenizer.decode(request.input_ids[0].tolist()) == whole
    assert request.response_ids[request.response_loss_mask == 1].tolist() == [*turns[0], *turns[1]]
    assert request.rollout_log_probs.sum() == -0.5 * len(turns[0] + turns[1])


def test_a_worker_of_your_own() -> None:
    from verl.single_controller.base.worker_group import registered_methods
    from verl.trainer.ppo.utils import Role

    names = run(code_of("advance/extending.md", "class CountingWorker"))
    worker = names["CountingWorker"]
    assert {"count_tokens", "generate_sequences", "update_actor"} <= registered_methods(worker).keys()
    batch = DataProto.from_dict({"response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})
    counted = worker.count_tokens(worker.__new__(worker), batch)
    assert counted.batch["lengths"].tolist() == [2, 1]
    runner = names["MyTaskRunner"]()
    assert runner.add_actor_rollout_worker(None)[0] is worker
    assert runner.mapping == {Role.ActorRollout: "global_pool"}


def test_data_that_grow(tmp_path: Path) -> None:
    from verl.experimental.dynamic_dataset.dynamicgen_dataset import DynamicGenDataset
    from verl.utils.dataset.factory import create_rl_dataset

    (tmp_path / "sums.py").write_text(code_of("data.md", "class Sums"))
    row = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
    }
    row["reward_model"]["style"] = "rule"
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    config = {"max_prompt_length": 32, "datagen": {"path": str(tmp_path / "sums.py"), "name": "Sums"}}
    rows = create_rl_dataset(str(tmp_path / "rows.parquet"), config, byte_tokenizer(), None)
    assert isinstance(rows, DynamicGenDataset)
    rows.on_batch_end()
    assert [each["ground_truth"] for each in rows.dataframe["reward_model"]] == ["2", "2", "6", "9"]


def test_pairs_for_a_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "chosen": "b", "rejected": "cd"}]), "train.parquet")
    pairs = run(code_of("data.md", "RMDataset("), tokenizer=byte_tokenizer())["pairs"]
    assert pairs[0]["input_ids"].shape == (2, 1024) and pairs[0]["attention_mask"].sum(-1).tolist() == [3, 4]


@pytest.mark.parametrize("page", ["advance/megatron_extension.md", "workers/megatron_workers.md"])
def test_a_family_on_megatron(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    from verl.models.mcore import families, supported_architectures

    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    run(code_of(page, "register_family("))
    assert "MyForCausalLM" in supported_architectures()
    family = families.find_family(LlamaConfig(architectures=["MyForCausalLM"], num_hidden_layers=2))
    assert "self_attention.linear_qkv.weight" in family.layer(LlamaConfig())


def test_a_tiny_model_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    run(code_of("advance/fsdp_extension.md", "for_model"))
    assert AutoModelForCausalLM.from_pretrained("outputs/tiny_qwen3").config.model_type == "qwen3"


def test_a_loss_and_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.algos.aggregate import agg_loss, agg_sum
    from verl.workers.engine import BaseEngine, EngineRegistry

    loss_fn = run(code_of("workers/model_engine.md", "def loss_fn"), agg_sum=agg_sum)["loss_fn"]
    mask = torch.tensor([[1, 1], [1, 0]])
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    (term,), metrics = loss_fn({"log_probs": log_probs}, DataProto.from_dict({"response_mask": mask}))
    assert float(term.total) / 3 == float(agg_loss(-log_probs, mask, "token-mean")) == 2.0
    assert metrics["nll"].unit == term.unit == "token"

    monkeypatch.setattr(EngineRegistry, "_engines", {})
    engine = run(
        code_of("workers/model_engine.md", "class MyEngine"), BaseEngine=BaseEngine, EngineRegistry=EngineRegistry
    )["MyEngine"]
    assert EngineRegistry._engines["language_model", "mine", "cpu"] is engine


@pytest.mark.parametrize("logprobs", [True, False])
def test_an_agent_loop(logprobs: bool) -> None:
    from tests.experimental.agent_loop.endpoint.agents import build

    loop_class = run(code_of("advance/agent_loop.md", "class AskTwice"))["AskTwice"]

    async def whole() -> Any:
        loop, server = build(lambda prompt: "yes" if "sure" in prompt else "42", loop=loop_class)
        chat = [{"role": "user", "content": "6*7"}]
        return await loop.run({"temperature": 1.0, "logprobs": logprobs}, raw_prompt=chat), server

    output, server = asyncio.run(whole())
    tokenizer = server.tokenizer
    assert tokenizer.decode(output.prompt_ids) == "<|user|>6*7<|end|><|assistant|>"
    assert tokenizer.decode(output.response_ids) == "42<|end|>\nAre you sure?\nyes<|end|>"
    assert output.response_mask == [1] * 3 + [0] * 15 + [1] * 4 and output.num_turns == 4
    assert (output.response_logprobs is not None) == logprobs
    assert [asked[2]["max_tokens"] for asked in server.asked] == [96, 96 - 3 - 15]


def test_an_estimator_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from verl.algos import advantage

    monkeypatch.setattr(advantage, "ADV_ESTIMATOR_REGISTRY", dict(advantage.ADV_ESTIMATOR_REGISTRY))
    estimate = run(code_of("algorithms.md", "def half_grpo"))["half_grpo"]
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0]])
    advantages, returns = estimate(
        rewards, torch.tensor([[1, 1], [1, 0], [1, 1]]), np.array(["a", "a", "b"], dtype=object)
    )
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.0], [2.0, 0.0], [2.5, 2.5]]


def test_a_parser_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser, get_tool_parser

    monkeypatch.setattr(ToolParser, "_registry", dict(ToolParser._registry))
    run(code_of("advance/conversation_code.md", "class ArrowParser"))
    tokenizer = byte_tokenizer()
    parser = get_tool_parser("arrow", tokenizer)
    tokens = tokenizer.encode('Wait. -> add {"a": 1}<|end|>', add_special_tokens=False)
    assert asyncio.run(parser.extract_tool_calls(tokens)) == ("Wait. ", [FunctionCall("add", '{"a": 1}')])
    assert asyncio.run(parser.extract_tool_calls(tokens[:4])) == ("Wait", [])


def test_a_turn_of_a_loop() -> None:
    from tests.experimental.agent_loop.endpoint.agents import build
    from verl.experimental.agent_loop.trajectory import Trajectory
    from verl.utils.chat import ChatFormat

    names = run(code_of("advance/tokens.md", "async def one_turn"), Trajectory=Trajectory)
    made: list[Trajectory] = []
    names["Trajectory"] = lambda *args, **kwargs: made.append(Trajectory(*args, **kwargs)) or made[0]

    async def whole() -> None:
        loop, server = build(lambda prompt: "3?")
        chat = ChatFormat(server.tokenizer)
        await names["one_turn"](loop, chat, [{"role": "user", "content": "1+2"}], {}, "id", 40)

    asyncio.run(whole())
    text = byte_tokenizer().decode(made[0].prompt_ids + made[0].response_ids)
    assert text == "<|user|>1+2<|end|><|assistant|>3?<|end|><|tool|>3<|end|><|assistant|>"
    assert made[0].response_mask == [1] * 3 + [0] * 4
