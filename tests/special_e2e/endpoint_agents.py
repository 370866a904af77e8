"""Agents with a client of the ``openai`` package, for runs of ``main_ppo``."""

from typing import Any

import openai

from tests.special_e2e.rewards import compute_score
from verl.experimental.agent_loop.endpoint import EndpointAgentLoop


class AskTwice(EndpointAgentLoop):
    """Asks, tells the model to go on, and gives the score of the last answer if ``scores`` says so.

    With ``forgets`` the model does not see its first answer again, which starts a segment.
    """

    def __init__(self, *args: Any, scores: bool = True, forgets: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scores = scores
        self.forgets = forgets

    async def act(self, base_url: str, api_key: str, row: dict[str, Any]) -> float | None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = list(row["raw_prompt"])
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
                text = answer.choices[0].message.content or ""
                said = "..." if self.forgets else text
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        return compute_score("letters", text, "") if self.scores else None
