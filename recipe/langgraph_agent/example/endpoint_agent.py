"""The same task by an agent that knows nothing of verl: langgraph's ready-made one, with a client of the OpenAI API."""

import warnings
from functools import cache
from typing import Any

import httpx
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import ToolNode, create_react_agent

from verl.experimental.agent_loop.endpoint import EndpointAgentLoop

from .math_expression import calculate


class MathExpressionEndpointAgentLoop(EndpointAgentLoop):
    """Lets the agent work, and leaves the score to the reward function of the run."""

    async def act(self, base_url: str, api_key: str, row: dict[str, Any]) -> None:
        """Ask the agent the question of the row."""
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, **_connections())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # langgraph is about to move it
            agent: Any = create_react_agent(model, ToolNode([calculate], handle_tool_errors=True))
        steps = 2 * (self.config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns or 10)
        try:
            await agent.ainvoke({"messages": [dict(each) for each in row["raw_prompt"]]}, {"recursion_limit": steps})
        except GraphRecursionError:  # it calls and calls; what it has said so far is its trajectory
            return


@cache
def _connections() -> dict[str, Any]:
    """Return the HTTP clients of this process; new ones would cost each trajectory a quarter of a second."""
    limits = httpx.Limits(max_connections=None)
    return {"http_client": httpx.Client(limits=limits), "http_async_client": httpx.AsyncClient(limits=limits)}
