"""An agent loop that fails and hangs for some samples, by their seeds."""

import asyncio
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

FAILING, HANGING = 11, 97
"""One of so many samples fails, and one of so many hangs, at each attempt."""


class FlakyLoop(SingleTurnAgentLoop):
    """Asks once, unless the sample has bad luck."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the response; fail or hang by the seed, which validation does not have."""
        seed = sampling_params.get("seed")
        if seed is not None and seed % FAILING == 0:
            raise OSError("the sandbox is full")
        if seed is not None and seed % HANGING == 0:
            await asyncio.sleep(600)
        return await super().run(sampling_params, **kwargs)
