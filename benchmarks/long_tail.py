"""A task whose responses grow with its difficulty, and a reward that takes its time, for ``asynchrony.py``.

A prompt has a difficulty d with probability 2^-(d+1), up to a limit, and its responses 8 to 16 times 2^d tokens: most
are short, and few take most of the time. A model with random weights does not end a response, so the agent loop does.
"""

import random
import time
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

HARDEST = 5
LIMIT = 16 * 2**HARDEST
"""Tokens of the longest response."""
REWARD_S = 0.05
"""Seconds that a score takes."""


def write_inputs(folder: Path, prompts: int) -> None:
    """Write a model with random weights and prompts to a folder."""
    import pandas

    from examples.tiny_model import make_tiny_model

    make_tiny_model(str(folder / "model"), hidden_size=256, num_layers=4, seed=0)
    draw = random.Random(1)
    rows = []
    for index in range(prompts):
        difficulty = 0
        while difficulty < HARDEST and draw.random() < 0.5:
            difficulty += 1
        truth = {"style": "rule", "ground_truth": str(difficulty)}
        prompt = [{"role": "user", "content": f"{index} of {difficulty}"}]
        rows.append({"data_source": "long_tail", "prompt": prompt, "reward_model": truth})
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")


@register("long_tail")
class LongTail(SingleTurnAgentLoop):
    """Ends a response by the difficulty of its prompt and the seed of its sample."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return the response of a row."""
        longest = 16 * 2 ** int(kwargs["reward_model"]["ground_truth"])
        tokens = random.Random(sampling_params["seed"]).randint(longest // 2, longest)
        return await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, **kwargs)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return whether an even character stands at the end, at times and for easy prompts more often."""
    time.sleep(REWARD_S)
    return float(solution_str[-1:].islower()) / (1 + int(ground_truth))
