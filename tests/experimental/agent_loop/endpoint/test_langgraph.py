"""An agent of ``langgraph`` with LangChain's own client of the OpenAI API: it knows nothing of verl."""

import asyncio
import warnings
from typing import Any

import pytest

from .agents import SAMPLING, build, ids

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6,  "b": 7}}\n</tool_call>'


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def act(base_url: str, api_key: str) -> float:
    """Return whether a ready-made agent finds the answer."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # langgraph is about to move it
        agent: Any = create_react_agent(model, [multiply])
    state = await agent.ainvoke({"messages": [("user", "6*7")]})
    return float("42" in state["messages"][-1].content)


def test_a_ready_made_agent_is_one_trajectory() -> None:
    says = iter([CALL, "42!"])

    async def whole() -> Any:
        loop, _ = build(lambda prompt: next(says), response_length=300)
        return await loop.run(dict(SAMPLING), agent=act)

    output = asyncio.run(whole())
    assert output.reward_score == 1.0 and output.extra_fields["segments"] == 1
    assert output.prompt_ids == ids("<|user|>6*7<|end|><|assistant|>")
    assert output.response_ids == ids(f"{CALL}<|end|><|tool|>42<|end|><|assistant|>42!<|end|>")
    assert sum(output.response_mask) == len(ids(f"{CALL}<|end|>42!<|end|>"))
