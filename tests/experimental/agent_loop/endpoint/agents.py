"""Agents of the tests, and the configuration in which their loops run."""

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from examples.tiny_model import byte_tokenizer
from tests.experimental.agent_loop.token_server import TokenServer
from verl.experimental.agent_loop import AsyncLLMServerManager
from verl.experimental.agent_loop.base import WholeConfig
from verl.experimental.agent_loop.endpoint import EndpointAgentLoop

TOKENIZER = byte_tokenizer()
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "seed": 11, "logprobs": True}
CONFIG = {
    "data": {"apply_chat_template_kwargs": {}},
    "actor_rollout_ref": {
        "model": {"path": "tiny"},
        "rollout": {
            "prompt_length": 64,
            "response_length": 96,
            "skip_tokenizer_init": True,
            "multi_turn": {"format": "hermes", "use_inference_chat_template": False},
        },
    },
}


def ids(text: str) -> list[int]:
    """Return the tokens of a text, special ones by their names."""
    return TOKENIZER.encode(text, add_special_tokens=False)


class Agent(EndpointAgentLoop):
    """Does what the row's ``agent`` does."""

    async def act(self, base_url: str, api_key: str, row: dict[str, Any]) -> float | None:
        return await row["agent"](base_url, api_key)


class ThreadAgent(EndpointAgentLoop):
    """Does what the row's ``agent`` does, in a thread."""

    def act(self, base_url: str, api_key: str, row: dict[str, Any]) -> float | None:
        return row["agent"](base_url, api_key)


def build(
    says: Callable[[str], str | Exception], loop: type[EndpointAgentLoop] = Agent, **changes: Any
) -> tuple[EndpointAgentLoop, TokenServer]:
    """Return a loop, and the server that it asks; for a running event loop."""
    server = TokenServer(TOKENIZER, says)
    rollout = {name: changes.pop(name) for name in ("prompt_length", "response_length") if name in changes}
    config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": rollout}})
    manager = AsyncLLMServerManager(config, [server])
    return loop(WholeConfig(config), manager, TOKENIZER, None, **changes), server
