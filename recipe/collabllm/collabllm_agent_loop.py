"""An agent loop that samples one turn, then judges it by continuing the conversation several times.

Source: CollabLLM (arXiv:2502.00640), section 3: the reward of a turn is the reward of the conversations after it.
"""

import asyncio
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from omegaconf import DictConfig

from verl.errors import WrongInput
from verl.experimental.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.registry import register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, Conversation, ToolAgentLoop
from verl.experimental.agent_loop.trajectory import MODEL, TURNS_COLUMN, turn_columns
from verl.utils.numerics.seeding import derive_seed
from verl.workers.rollout.server import ABORTED, FULL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

CONVERSATIONS = "conversations"
NUM_PROMPT_MESSAGES = "num_prompt_messages"
"""The two columns of a row: the conversations that continue its turn, each a list of messages, and the number of
messages in its prompt."""
_TURNS = "actor_rollout_ref.rollout.multi_turn"


@register("collabllm_agent")
class CollabLLMAgentLoop(ToolAgentLoop):
    """Trains the first turn of the model, and continues it only to score it.

    The response of a row is the first turn. ``multi_turn.num_repeat_rollouts`` copies of the conversation then continue
    until the simulated user ends them, each with another sampling seed. The reward manager ``collabllm`` scores these
    copies; their tokens are not trained. A first turn that is cut off is not continued.
    """

    @classmethod
    def init_class(
        cls,
        config: DictConfig,
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Any,
    ) -> None:
        """Check the configuration, and create the interactions once per process.

        Raises: WrongInput naming the key.
        """
        turns = config.actor_rollout_ref.rollout.multi_turn
        if not turns.interaction_config_path:
            raise WrongInput(f"{_TURNS}.interaction_config_path=null: collabllm_agent needs a user: name the YAML file")
        if turns.tool_config_path:
            raise WrongInput(
                f"{_TURNS}.tool_config_path={turns.tool_config_path}: collabllm_agent has no tools: write null"
            )
        super().init_class(config, tokenizer, processor, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the first turn of a row, with the conversations that continue it.

        Args: ``kwargs`` holds ``raw_prompt``, and ``interaction_kwargs`` itself or within ``extra_info``.
        """
        talk = self._begin(sampling_params, kwargs)
        num_prompt_messages = len(talk.messages)
        await self._generate(talk)
        is_cut = talk.trajectory.turns[-1].finish_reason in (ABORTED, FULL)
        ends = [] if is_cut else await self._continue_all(talk)
        self._compare(talk)
        longest = max([len(talk.messages), *(len(end.messages) for end in ends)])
        return talk.trajectory.output(
            num_turns=longest,
            metrics=AgentLoopMetrics(generate_sequences=max(map(_model_seconds, ends), default=_model_seconds(talk))),
            extra_fields={
                CONVERSATIONS: [end.messages for end in ends],
                NUM_PROMPT_MESSAGES: num_prompt_messages,
                TURNS_COLUMN: turn_columns(talk.trajectory.turns),
            },
        )

    async def _continue_all(self, talk: Conversation) -> list[Conversation]:
        """Continue all copies of the conversation concurrently."""
        count = self.settings.num_repeat_rollouts or 1
        running = [asyncio.create_task(self._continue(talk, number)) for number in range(count)]
        try:
            return await asyncio.gather(*running)
        finally:  # when one copy fails, cancel the others: nobody reads them, and they hold slots of the server
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _continue(self, talk: Conversation, number: int) -> Conversation:
        """Continue one copy of the conversation until its user ends it."""
        seed = talk.sampling_params.get("seed")
        own_seed = {} if seed is None else {"seed": derive_seed(seed, "repeat", number)}
        copy = replace(
            talk,
            id=uuid4().hex,
            messages=list(talk.messages),
            trajectory=deepcopy(talk.trajectory),
            sampling_params=talk.sampling_params | own_seed,
            instances={},
            earlier=[],
            turn_scores=[],
            tool_rewards=[],
        )
        handlers = {AgentState.INTERACTING: self._interact, AgentState.GENERATING: self._generate}
        try:
            await self._start(copy)
            state = AgentState.TERMINATED if self._has_enough(copy) else AgentState.INTERACTING
            while state is not AgentState.TERMINATED:
                state = await handlers[state](copy)
            return copy
        finally:
            await self._release(copy)


def _model_seconds(talk: Conversation) -> float:
    """Return the seconds of generation in a conversation."""
    return sum(turn.seconds for each in (*talk.earlier, talk.trajectory) for turn in each.turns if turn.role == MODEL)
