"""The request that all engines take, and its established form."""

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest

from verl.errors import WrongInput
from verl.single_controller.base.worker_group import registered_methods
from verl.workers.roles.async_rollout import AsyncActorRolloutRefWorker
from verl.workers.rollout.engine_server import EngineServer
from verl.workers.rollout.server import GenerationRequest, RolloutServer, TokenOutput, room_for_response

ESTABLISHED = ["prompt_ids", "sampling_params", "request_id", "image_data", "multi_modal_data"]


class Asked(RolloutServer):
    """Keeps the requests that reach it."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def answer(self, request: GenerationRequest) -> TokenOutput:
        self.requests.append(request)
        return TokenOutput([7])

    async def abort(self, request_id: str) -> bool:
        return False

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        return {}


def test_the_established_form_makes_one_request() -> None:
    server = Asked()
    values: dict[str, Any] = {"prompt_ids": [1, 2], "sampling_params": {"top_k": 3}, "request_id": "r"}
    asyncio.run(server.generate([1, 2], {"top_k": 3}, "r", ["image"]))
    asyncio.run(server.generate(**values, multi_modal_data={"image": ["image"], "video": []}))
    first, second = server.requests
    assert first.arguments() == values | {"image_data": ["image"]}
    assert second.arguments() == values | {"multi_modal_data": {"image": ["image"], "video": []}}
    assert first.media == second.media == {"image": ["image"]}
    assert list(GenerationRequest.__dataclass_fields__) == ESTABLISHED


def test_empty_media_do_not_reach_servers_of_users() -> None:
    request = GenerationRequest(np.array([0, 1]), {}, "r", image_data=[], multi_modal_data={})
    assert sorted(request.arguments()) == ["prompt_ids", "request_id", "sampling_params"] and request.media == {}


@pytest.mark.parametrize("server", [AsyncActorRolloutRefWorker, EngineServer])
def test_servers_have_the_established_entry(server: type[RolloutServer]) -> None:
    assert list(inspect.signature(server.generate).parameters)[1:6] == ESTABLISHED


def test_the_worker_registers_the_established_entry() -> None:
    """Roles that share an actor forward only registered methods."""
    assert {"generate", "abort", "health"} <= registered_methods(AsyncActorRolloutRefWorker).keys()


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2])])
def test_prompts_are_lists_of_known_tokens(prompt: Any) -> None:
    assert GenerationRequest(prompt, {}, "r").token_ids(3) == [1, 2]
    with pytest.raises(WrongInput, match="request r: the prompt has token 2; the model's are 0 to 1"):
        GenerationRequest(prompt, {}, "r").token_ids(2)
    with pytest.raises(WrongInput, match="request r: the prompt is empty"):
        GenerationRequest(prompt[:0], {}, "r").token_ids(2)


def test_a_prompt_leaves_room_for_a_token() -> None:
    assert room_for_response(3, 4) == 1
    with pytest.raises(WrongInput, match=r"the prompt has 4 tokens and the engine's context 4: .*max_model_len"):
        room_for_response(4, 4)
