"""The recipe langgraph_agent, with the real ``langgraph`` and a server that says what a test wants."""

import asyncio
import json
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from tests.experimental.agent_loop.endpoint.agents import CONFIG, SAMPLING, TOKENIZER, ids
from tests.experimental.agent_loop.token_server import TokenServer
from verl.base_config import WrongInput
from verl.experimental.agent_loop import AsyncLLMServerManager
from verl.experimental.agent_loop.base import WholeConfig
from verl.experimental.agent_loop.registry import read_agent_loops
from verl.experimental.agent_loop.tool_parser import get_tool_parser

pytest.importorskip("langgraph")
QUESTION = [{"role": "user", "content": "3 @ 4="}]
PROMPT = "<|user|>3 @ 4=<|end|><|assistant|>"


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "calculate", "arguments": {arguments}}}\n</tool_call>'


RIGHT = call('{"a": 3,  "b": 4, "operand": "@"}')


def run(
    *says: str, response_length: int = 600, loop_class: Any = None, row: Any = None, **turns: Any
) -> tuple[Any, TokenServer]:
    """Return the output of the example's loop, or another, on the answers of a model, and its server."""
    from recipe.langgraph_agent.example.math_expression import MathExpressionReactAgentLoop

    answers = iter(says)
    multi_turn = {"max_parallel_calls": 1, "max_assistant_turns": None} | turns
    rollout = {"response_length": response_length, "multi_turn": multi_turn}
    config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": rollout}})

    async def whole() -> tuple[Any, TokenServer]:
        server = TokenServer(TOKENIZER, lambda prompt: next(answers))
        made = loop_class or MathExpressionReactAgentLoop
        loop = made(WholeConfig(config), AsyncLLMServerManager(config, [server]), TOKENIZER)
        return await loop.run(dict(SAMPLING), raw_prompt=QUESTION, **(row or {})), server

    return asyncio.run(whole())


def test_a_row_with_images_is_refused() -> None:
    with pytest.raises(WrongInput, match="the row holds images or videos, but langgraph_agent reads text only"):
        run(row={"multi_modal_data": {"image": [object()]}})


def test_a_call_and_its_answer_are_one_trajectory() -> None:
    output, server = run(RIGHT, "\\boxed{1}")
    parts = [(f"{RIGHT}<|end|>", 1), ("<|tool|>1<|end|><|assistant|>", 0), ("\\boxed{1}<|end|>", 1)]
    assert output.prompt_ids == ids(PROMPT)
    assert output.response_ids == [token for text, _ in parts for token in ids(text)]
    assert output.response_mask == [mask for text, mask in parts for _ in ids(text)]
    assert len(output.response_logprobs) == len(output.response_ids) and output.num_turns == 4
    assert output.extra_fields["segments"] == 1 and len(server.asked) == 2
    assert [params["temperature"] for _, _, params in server.asked] == [1.0, 1.0]


def test_what_goes_wrong_is_told_to_the_model() -> None:
    """A broken call, one that the tool refuses, and one too many: the history stays as it was sampled."""
    unknown = call('{"a": 3, "b": 4, "operand": "?"}')
    output, server = run(call('{"a": 3,'), unknown, f"{RIGHT}{RIGHT}", "\\boxed{1}")
    assert output.extra_fields["segments"] == 1 and len(server.asked) == 4
    told = [turn["calls"][0]["text"] for turn in output.extra_fields["__turns__"] if turn["role"] == "tool"]
    assert "the call is no complete JSON object" in told[0] and "unknown operand" in told[1] and told[2:] == ["1"]
    both, _ = run(f"{RIGHT}{RIGHT}", "\\boxed{1}", max_parallel_calls=2)
    assert both.response_ids == ids(
        f"{RIGHT}{RIGHT}<|end|><|tool|>1<|end|><|tool|>1<|end|><|assistant|>\\boxed{{1}}<|end|>"
    )


def test_trajectories_end() -> None:
    """By the number of turns, and by their room; what came after the last turn of the model is left out."""
    output, server = run(RIGHT, RIGHT, RIGHT, max_assistant_turns=2)
    assert len(server.asked) == 2 and output.response_mask[-1] == 1
    output, server = run(RIGHT, RIGHT, RIGHT, response_length=len(ids(RIGHT)) + 5)
    assert len(server.asked) == 1 and output.response_ids == ids(f"{RIGHT}<|end|>")


def test_a_graph_that_rewrites_its_history_returns_all_segments() -> None:
    from langchain_core.runnables import RunnableConfig
    from langgraph.graph import END, START, MessagesState, StateGraph

    from recipe.langgraph_agent.react_agent_loop import ReactAgentLoop

    class Forgets(ReactAgentLoop):
        """Asks, and asks again without what was said first."""

        @classmethod
        def build_graph(cls) -> Any:
            async def ask(state: MessagesState, config: RunnableConfig) -> Any:
                answer = await config["configurable"]["model"].ainvoke(state["messages"][-1:])
                return {"messages": [answer, ("user", "shorter")] if len(state["messages"]) == 1 else [answer]}

            graph = StateGraph(MessagesState)
            graph.add_node("first", ask)
            graph.add_node("second", ask)
            for start, end in ((START, "first"), ("first", "second"), ("second", END)):
                graph.add_edge(start, end)
            return graph.compile()

    (first, last), _ = run("\\boxed{1}", "1", loop_class=Forgets)
    assert first.response_ids == ids("\\boxed{1}<|end|>") and last.response_ids == ids("1<|end|>")
    assert (first.prompt_ids, last.prompt_ids) == (ids(PROMPT), ids("<|user|>shorter<|end|><|assistant|>"))
    assert first.num_turns == last.num_turns == 3 and last.extra_fields["segments"] == 2
    assert sum(first.response_mask) == len(first.response_ids) == len(first.response_logprobs)


def test_the_model_and_its_output() -> None:
    from langchain_core.messages import AIMessage, HumanMessage

    from recipe.langgraph_agent.chat_model import ChatModel, convert_to_agent_output

    async def whole() -> Any:
        server = TokenServer(TOKENIZER, lambda prompt: "hello")
        manager = AsyncLLMServerManager(OmegaConf.create(CONFIG), [server])
        model = ChatModel(client=manager, tokenizer=TOKENIZER, max_tokens=50, temperature=0.5, top_p=0.9)
        with pytest.raises(RuntimeError, match="call ainvoke, not invoke"):
            model.invoke("hi")
        with pytest.raises(ValueError, match="tool_choice='any': must be auto"):
            model.bind_tools([], tool_choice="any")
        said = await model.ainvoke("hi")
        params = server.asked[0][2]
        assert (params["temperature"], params["top_p"], params["max_tokens"]) == (0.5, 0.9, 50)
        return said

    said = asyncio.run(whole())
    assert said.content == "hello"
    output = convert_to_agent_output([HumanMessage("hi"), said], response_length=4)
    assert output.response_ids == ids("hell") and output.response_mask == [1] * 4 and output.num_turns == 2
    with pytest.raises(ValueError, match="no message comes from a ChatModel"):
        convert_to_agent_output([HumanMessage("hi"), AIMessage("hello")], response_length=4)


def test_rows_of_the_example(tmp_path, monkeypatch):
    """The supervised conversations call the tool with the numbers of the question, or answer at once."""
    from recipe.langgraph_agent.example import create_dataset

    options = ["--local_save_dir", str(tmp_path), "--largest", "9", "--short", "--direct", "0.5"]
    monkeypatch.setattr("sys.argv", ["create_dataset.py", *options, "--train_size", "4", "--test_size", "4"])
    create_dataset.main()
    loops = read_agent_loops("recipe/langgraph_agent/example/agent.yaml")
    talks = list(pd.read_parquet(tmp_path / "sft.parquet")["messages"])
    calling = [talk for talk in talks if len(talk) == 4]
    assert len(talks) == 1000 and 400 < len(calling) < 600 and {len(talk) for talk in talks} == {2, 4}
    parser = get_tool_parser("hermes", TOKENIZER)
    for talk in calling[:50]:
        a, operand, b = talk[0]["content"].removesuffix("=").split()
        (found,) = parser.parse(talk[1]["content"])[1]
        assert json.loads(found.arguments) == {"a": int(a), "b": int(b), "operand": operand}
        assert talk[3]["content"] == f"\\boxed{{{talk[2]['content']}}}"
    row = pd.read_parquet(tmp_path / "train.parquet").iloc[0]
    assert set(loops) >= {row["agent_name"], "math_expression_endpoint"} and row["reward_model"]["style"] == "rule"
