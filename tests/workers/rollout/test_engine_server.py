"""A server around an engine that is made for the test."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.workers.rollout import tiny
from tests.workers.rollout.subjects import NEVER_S
from verl.workers.config import ServerConfig
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.engine_server import EngineServer, OpenRequest
from verl.workers.rollout.server import GenerationRequest, TokenOutput


class Engine:
    """Answers with the version of its weights, which is no number until somebody tells it."""

    def __init__(self) -> None:
        self.versions = ["default"]

    def death(self) -> str | None:
        return None

    async def ping(self) -> None:
        pass

    async def set_version(self, version: int) -> None:
        await asyncio.sleep(0)
        self.versions.append(str(version))


class Form:
    """Passes everything on."""

    def prompt(self, request: GenerationRequest) -> Any:
        return request.prompt_ids

    def params(self, request: GenerationRequest) -> Any:
        return request.sampling_params


class Server(EngineServer):
    def _start_engine(self, model_config: Any) -> tuple[Any, Any]:
        return Engine(), Form()

    async def _ask_engine(self, entry: OpenRequest, prompt: Any, params: Any) -> TokenOutput:
        return TokenOutput([1], None, "stop", versions=[(int(self._engine.versions[-1]), 1)])


def test_a_server_that_has_started_again_knows_its_version_before_the_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody asks whether it is ready; requests come at once."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=True))

    async def ask() -> tuple[list[TokenOutput], list[str]]:
        config = tiny.rollout_config("vllm", server=ServerConfig(heartbeat_timeout=NEVER_S))
        server = Server("server", 0, config, None)
        outputs = await asyncio.gather(*(server.generate([1], {}, str(number)) for number in range(3)))
        return outputs, server._engine.versions

    outputs, versions = asyncio.run(ask())
    assert [output.versions for output in outputs] == [[(NO_WEIGHTS, 1)]] * 3
    assert versions == ["default", str(NO_WEIGHTS)]


@pytest.mark.parametrize(
    ("written", "waits", "family", "used"),
    [
        ("dummy", True, "qwen2", "dummy"),
        ("dummy", True, "kimi_vl", "dummy"),  # its files hold tensors that the router of training does not have
        ("dummy", True, "a_new_one", "auto"),
        ("dummy", False, "qwen2", "auto"),
        ("safetensors", True, "qwen2", "safetensors"),
    ],
)
def test_weights_stay_on_disk_where_a_trainer_is_shown_to_send_all(
    written: str, waits: bool, family: str, used: str
) -> None:
    config = tiny.rollout_config("vllm", load_format=written)
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=family))
    assert Server("server", 0, config, model, waits).config.load_format == used
