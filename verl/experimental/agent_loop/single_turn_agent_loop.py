"""The agent loop with a single turn of the model."""

import time
import uuid
from typing import Any

from verl.experimental.agent_loop.attempts import Sampling
from verl.experimental.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.registry import register
from verl.experimental.agent_loop.trajectory import Trajectory
from verl.utils.chat_template import check_awaits_turn


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Asks for one response to the prompt of the row."""

    async def run(self, sampling_params: Sampling, **kwargs: Any) -> AgentLoopOutput:
        """Return the response to ``raw_prompt_ids`` of the row, or to its ``raw_prompt``."""
        prompt_ids: Any = kwargs.get("raw_prompt_ids")
        if prompt_ids is None:
            check_awaits_turn(kwargs["raw_prompt"])
            options: Any = self.config.data.get("apply_chat_template_kwargs") or {}
            prompt_ids = self.tokenizer.apply_chat_template(
                list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False, **options
            )
        multi_modal_data = kwargs.get("multi_modal_data")
        limit = self.config.actor_rollout_ref.rollout.response_length
        trajectory = Trajectory(prompt_ids, limit)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=uuid.uuid4().hex,
            prompt_ids=trajectory.token_ids,
            sampling_params={"max_tokens": limit, **sampling_params},
            multi_modal_data=multi_modal_data,
        )
        trajectory.sampled(output, time.perf_counter() - started)
        return trajectory.output(multi_modal_data=multi_modal_data)
