"""An agent for the same task that does not depend on verl: LangGraph's prebuilt agent with an OpenAI client."""

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
    """Runs the agent; the reward function of the run scores its trajectory."""

    async def act(self, base_url: str, api_key: str, row: dict[str, Any]) -> None:
        """Ask the agent the question of the row."""
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, **_connections())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LangGraph announces that create_react_agent will move
            agent: Any = create_react_agent(model, ToolNode([calculate], handle_tool_errors=True))
        steps = 2 * (self.config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns or 10)
        try:
            await agent.ainvoke({"messages": [dict(each) for each in row["raw_prompt"]]}, {"recursion_limit": steps})
        except GraphRecursionError:  # the agent never stopped calling the tool; its turns so far are the trajectory
            return


@cache
def _connections() -> dict[str, Any]:
    """Return the HTTP clients of this process, shared because creating them takes a quarter of a second."""
    limits = httpx.Limits(max_connections=None)
    return {"http_client": httpx.Client(limits=limits), "http_async_client": httpx.AsyncClient(limits=limits)}
