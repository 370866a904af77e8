"""The loop that asks once."""

import uuid
from typing import Any

from verl.experimental.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.registry import register
from verl.utils.profiler.ranges import simple_timer


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Asks for one response to the prompt of the row."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the response to ``raw_prompt_ids`` of the row, or to its ``raw_prompt``."""
        rollout = self.config.actor_rollout_ref.rollout
        prompt_ids: Any = kwargs.get("raw_prompt_ids")
        if prompt_ids is None:
            options: Any = self.config.data.get("apply_chat_template_kwargs") or {}
            prompt_ids = self.tokenizer.apply_chat_template(
                list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False, **options
            )
        multi_modal_data = kwargs.get("multi_modal_data")
        seconds: dict[str, float] = {}
        with simple_timer("generate_sequences", seconds):
            output = await self.server_manager.generate(
                request_id=uuid.uuid4().hex,
                prompt_ids=list(prompt_ids),
                sampling_params={"max_tokens": rollout.response_length, **sampling_params},
                multi_modal_data=multi_modal_data,
            )
        return AgentLoopOutput(
            prompt_ids=list(output.expanded_prompt_ids or prompt_ids),
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            multi_modal_data=multi_modal_data,
            num_turns=2,
            metrics=AgentLoopMetrics(**seconds),
        )
