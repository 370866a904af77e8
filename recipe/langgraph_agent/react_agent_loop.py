"""An agent loop that runs a LangGraph graph, in which the model and its tools take turns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.graph import END, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from omegaconf import DictConfig, OmegaConf

from verl.errors import WrongInput
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from .chat_model import ChatModel, TrajectoryFullError, segments_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Update = dict[str, Sequence[AnyMessage]]


class ReactAgentLoop(AgentLoopBase):
    """Alternates model turns and tool answers until the model calls no tool.

    A subclass sets ``tools``. It may also build another graph, whose state must have ``messages``, and whose nodes get
    the ``ChatModel`` with its tools from ``config["configurable"]["model"]``.
    """

    tools: ClassVar[Sequence[BaseTool]] = ()
    graph: ClassVar[CompiledStateGraph[Any, Any, Any, Any]]

    @classmethod
    def init_class(
        cls,
        config: DictConfig,
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Any,
    ) -> None:
        """Build the graph of the class, once per process."""
        super().init_class(config, tokenizer, processor, **kwargs)
        if "graph" not in cls.__dict__:
            cls.graph = cls.build_graph()

    @classmethod
    def build_graph(cls) -> CompiledStateGraph[Any, Any, Any, Any]:
        """Return the graph: the model, followed by its tools as long as it calls any."""
        graph = StateGraph(MessagesState)
        graph.add_node("agent", call_model)
        if cls.tools:
            graph.add_node("tools", ToolNode(list(cls.tools), handle_tool_errors=True))
            graph.add_node("broken", answer_broken_calls)
            graph.add_conditional_edges("agent", next_node, {"tools": "tools", "broken": "broken", END: END})
            graph.add_edge("tools", "agent")
            graph.add_edge("broken", "agent")
        else:
            graph.add_edge("agent", END)
        graph.set_entry_point("agent")
        return graph.compile()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the graph on ``raw_prompt``; return several segments if the graph rewrites earlier messages.

        Raises: WrongInput for a row with images or videos, which the graph's messages cannot hold.
        """
        if kwargs.get("multi_modal_data"):
            raise WrongInput(
                "the row holds images or videos, but langgraph_agent reads text only: drop them, or write "
                "agent_name=tool_agent into the row"
            )
        rollout = self.config.actor_rollout_ref.rollout
        turns = rollout.multi_turn
        options = self.config.data.get("apply_chat_template_kwargs") or {}
        model = ChatModel(
            model=str(self.config.actor_rollout_ref.model.path),
            client=self.server_manager,
            tokenizer=self.tokenizer,
            max_tokens=rollout.response_length,
            max_prompt_tokens=rollout.prompt_length,
            tool_parser=turns.format,
            max_parallel_calls=turns.max_parallel_calls,
            sampling_params=sampling_params,
            template_options=dict(OmegaConf.to_container(options) if OmegaConf.is_config(options) else options),
        )
        configurable = {
            "model": model.bind_tools(list(self.tools)) if self.tools else model,
            "max_assistant_turns": turns.max_assistant_turns,
        }
        messages = convert_to_messages([dict(message) for message in kwargs["raw_prompt"]])
        steps = 2 * (turns.max_assistant_turns or rollout.response_length) + 2
        state = await self.graph.ainvoke(
            {"messages": messages}, {"configurable": configurable, "recursion_limit": steps}
        )
        outputs = segments_of(model, state["messages"], rollout.response_length)
        return outputs if len(outputs) > 1 else outputs[0]


async def call_model(state: MessagesState, config: RunnableConfig) -> Update:
    """Sample a turn of the model; add no message if the trajectory is full or has reached the limit of turns."""
    configurable = config["configurable"]
    most = configurable.get("max_assistant_turns")
    taken = sum(isinstance(message, AIMessage) for message in state["messages"])
    if most and taken >= most:
        return {"messages": []}
    try:
        answer = await configurable["model"].ainvoke(state["messages"])
    except TrajectoryFullError:
        if not taken:
            raise
        return {"messages": []}
    return {"messages": [answer]}


def next_node(state: MessagesState) -> str:
    """Return the node after a model turn: the tools, the errors of calls that are all malformed, or the end."""
    last = state["messages"][-1]
    if not isinstance(last, AIMessage):
        return END
    return "tools" if last.tool_calls else "broken" if last.invalid_tool_calls else END


def answer_broken_calls(state: MessagesState) -> Update:
    """Answer each malformed tool call with its parse error."""
    last = state["messages"][-1]
    broken = last.invalid_tool_calls if isinstance(last, AIMessage) else []
    return {
        "messages": [
            ToolMessage(f"Error: {call['error']}", tool_call_id=str(call["id"]), name=call["name"], status="error")
            for call in broken
        ]
    }
