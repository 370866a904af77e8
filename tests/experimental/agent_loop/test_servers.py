"""Which server gets a request, and what happens when servers are slow, silent or dead."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import BatchEncoding

from verl.errors import RequestAbortedError, RequestTimeoutError, ServerError, WrongInput
from verl.experimental.agent_loop import servers
from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.workers.rollout.server import TokenOutput


class Remote:
    """A method as Ray offers it, without a process in between."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeServer:
    """Answers after ``delay_s`` with the prompt backwards; ``state`` says how it fails."""

    def __init__(self, delay_s: float = 0.0, state: str = "well") -> None:
        self.delay_s, self.state = delay_s, state
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.generate, self.abort, self.health = Remote(self._generate), Remote(self._abort), Remote(self._health)

    async def _generate(self, **request: Any) -> TokenOutput:
        self.asked.append(request)
        if self.state == "dead":
            raise ServerError("the engine has ended")
        await asyncio.sleep(3600 if self.state in ("silent", "slow") else self.delay_s)
        return TokenOutput(request["prompt_ids"][::-1], finish_reason="abort" if self.state == "cuts" else "stop")

    async def _abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    async def _health(self, timeout_s: float) -> dict[str, float]:
        if self.state == "silent":
            await asyncio.sleep(3600)
        if self.state == "dead":
            raise ServerError("the engine has ended")
        return {}


def manager_of(*handles: FakeServer, hybrid: bool = True, **agent: Any) -> AsyncLLMServerManager:
    node = {"hybrid_engine": hybrid, "rollout": {"agent": {"turn_timeout_s": None, "server_timeout_s": 5.0, **agent}}}
    return AsyncLLMServerManager(OmegaConf.create({"actor_rollout_ref": node}), handles)


async def ask(manager: AsyncLLMServerManager, name: str, size: int = 10, **params: Any) -> TokenOutput:
    return await manager.generate(name, prompt_ids=list(range(size)), sampling_params={"max_tokens": 10, **params})


def test_the_least_loaded_server_by_tokens() -> None:
    async def run() -> None:
        few, many = FakeServer(0.05), FakeServer(0.05)
        manager = manager_of(few, many)
        await asyncio.gather(ask(manager, "long", 1000), *(ask(manager, f"short {i}") for i in range(20)))
        loads = sorted(sum(len(request["prompt_ids"]) for request in server.asked) for server in (few, many))
        assert loads == [200, 1000]

    asyncio.run(run())


def test_a_conversation_stays_with_its_prefix_unless_its_server_is_overloaded() -> None:
    async def run() -> None:
        one, two = FakeServer(0.02), FakeServer(0.02)
        manager = manager_of(one, two)
        for _ in range(5):
            await ask(manager, "chat", 50)
        home, other = (one, two) if one.asked else (two, one)
        assert (len(home.asked), len(other.asked)) == (5, 0)
        busy = [asyncio.create_task(ask(manager, "chat", 50))]
        await asyncio.sleep(0)  # 60 tokens at home now: no more than twice the other's, plus the prompt's 100
        await ask(manager, "chat", 100)
        assert not other.asked
        busy += [asyncio.create_task(ask(manager, "chat", 500))]
        await asyncio.sleep(0)
        await ask(manager, "chat", 100)
        assert len(other.asked) == 1
        await asyncio.gather(*busy)

    asyncio.run(run())


@pytest.mark.parametrize("state", ["dead", "silent"])
def test_a_server_that_is_gone_loses_its_requests_to_others(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that says nothing: its health is asked for while requests wait. Gone servers may come back."""
    monkeypatch.setattr(servers, "HEARTBEAT_S", 0.05)

    async def run() -> None:
        bad, good = FakeServer(0.01, state), FakeServer(0.01)
        manager = manager_of(bad, good, server_timeout_s=0.5)
        attempts = [Attempt(f"{i}", "u", i, "loop") for i in range(8)]
        outputs = await asyncio.gather(*(ask(manager.of(attempt), "chat", 4) for attempt in attempts))
        assert [output.token_ids for output in outputs] == [[3, 2, 1, 0]] * 8
        assert len(good.asked) == 8 and bad.asked
        given_up = [request["request_id"] for request in bad.asked]
        assert sorted(bad.aborted) == (given_up if state == "silent" else [])  # it would compute them when it goes on
        used = Counter(len(attempt.servers) for attempt in attempts)
        assert used[2] == len(bad.asked) and used[1] == 8 - len(bad.asked)
        await manager.revive()
        assert manager._servers[0].gone
        bad.state = "well"
        await manager.revive()
        before = len(bad.asked)
        await asyncio.gather(*(ask(manager, f"{i}", 4) for i in range(8)))
        assert len(bad.asked) > before

    asyncio.run(run())


def test_no_server_is_left() -> None:
    async def run() -> None:
        manager = manager_of(FakeServer(state="dead"), FakeServer(state="dead"))
        with pytest.raises(ServerError, match="no rollout server is left: rollout server 0 of 2: ServerError: the eng"):
            await ask(manager, "chat")
        alone = FakeServer(state="dead")
        manager = manager_of(alone, hybrid=False)
        waits = asyncio.create_task(ask(manager, "chat", 2))
        await asyncio.sleep(0.1)
        alone.state = "well"  # servers on devices of their own may be started again
        assert (await waits).token_ids == [1, 0]
        alone = FakeServer(state="dead")
        manager = manager_of(alone, hybrid=False, server_timeout_s=0.1)  # its start may take longer
        OmegaConf.update(manager.config, "actor_rollout_ref.rollout.server.max_start_wait_time", 120.0, force_add=True)
        manager = AsyncLLMServerManager(manager.config, [alone])
        waits = asyncio.create_task(ask(manager, "chat", 2))
        await asyncio.sleep(1.5)
        alone.state = "well"
        assert (await waits).token_ids == [1, 0]

    asyncio.run(run())


def test_a_request_has_a_deadline_and_a_cancelled_one_is_aborted() -> None:
    async def run() -> None:
        slow = FakeServer(state="slow")
        manager = manager_of(slow, turn_timeout_s=0.05)
        with pytest.raises(RequestTimeoutError, match=r"chat/0: rollout server 0 of 1 has not answered within"):
            await ask(manager.of(Attempt("1", "u", 0, "loop")), "chat")
        await asyncio.sleep(0)
        assert slow.aborted == ["1/chat/0"]
        manager = manager_of(slow)
        waits = asyncio.create_task(ask(manager, "chat"))
        while len(slow.asked) < 2:
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await asyncio.sleep(0)
        assert slow.aborted[1:] == ["chat/0"]
        assert manager._servers[0].tokens == 0 and manager._servers[0].watch is None

    asyncio.run(run())


def test_a_prompt_that_is_no_list_is_refused() -> None:
    """``apply_chat_template`` of transformers 5 returns a mapping unless it is told otherwise."""
    prompt: Any = BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]})
    with pytest.raises(WrongInput, match="return_dict=False"):
        asyncio.run(manager_of(FakeServer()).generate("a", prompt_ids=prompt, sampling_params={}))


@pytest.mark.parametrize(
    ("params", "message"), [({"max_tokens": 0}, "max_tokens=0"), ({"n": 4}, "n=4: a request gets")]
)
def test_what_an_engine_would_read_otherwise_is_refused(params: dict[str, Any], message: str) -> None:
    server = FakeServer()
    with pytest.raises(WrongInput, match=message):
        asyncio.run(manager_of(server).generate("a", prompt_ids=[1], sampling_params=params))
    assert server.asked == []
    asyncio.run(manager_of(server).generate("a", prompt_ids=[1], sampling_params={"max_tokens": 1, "n": 1}))
    assert server.asked[0]["sampling_params"] == {"max_tokens": 1}


def test_only_media_that_are_there_are_sent() -> None:
    """A server of the established interface takes ``image_data`` and nothing else."""
    server = FakeServer()

    async def go() -> None:
        manager, prompt = manager_of(server), {"prompt_ids": [1], "sampling_params": {}}
        await manager.generate("a", **prompt, image_data=None, multi_modal_data={})
        await manager.generate("a", **prompt, image_data=["picture"])
        await manager.generate("a", **prompt, multi_modal_data={"image": ["picture"]})

    asyncio.run(go())
    sent = [request.keys() - {"prompt_ids", "sampling_params", "request_id"} for request in server.asked]
    assert sent == [set(), {"image_data"}, {"multi_modal_data"}]


def test_a_response_that_a_server_has_cut_is_a_failure() -> None:
    async def run() -> None:
        server = FakeServer(state="cuts")
        manager = manager_of(server)
        with pytest.raises(RequestAbortedError, match=r"chat/0: rollout server 0 of 1 aborted it after 10 tokens"):
            await ask(manager, "chat")
        assert manager._servers[0].gone is None

    asyncio.run(run())


def test_turns_have_seeds_of_their_own() -> None:
    async def run() -> None:
        server = FakeServer()
        manager = manager_of(server)
        for again in range(2):
            attempt = Attempt(f"1-{again}", "u", 0, "loop", seed=77)
            for _ in range(3):
                await ask(manager.of(attempt), "chat", seed=77)
            await ask(manager.of(attempt), "chat", seed=5)  # the loop's own
            await ask(manager.of(attempt), "chat")
        seeds = [request["sampling_params"].get("seed") for request in server.asked]
        assert seeds[:5] == seeds[5:] and seeds[0] == 77 and len(set(seeds[:3])) == 3 and seeds[3:5] == [5, None]
        ids = [request["request_id"] for request in server.asked]
        assert len(set(ids)) == len(ids)

    asyncio.run(run())


def test_servers_that_stay_keep_their_load() -> None:
    """A replaced server begins anew; a Ray actor is the same by whatever handle it comes."""

    class Handle(FakeServer):
        def __init__(self, name: str) -> None:
            super().__init__(0.05)
            self._actor_id = SimpleNamespace(hex=lambda: name)

    async def run() -> None:
        manager = manager_of(Handle("aa"), Handle("bb"))
        both = [asyncio.create_task(ask(manager, name, 10)) for name in ("one", "two")]
        await asyncio.sleep(0.01)
        manager.set_servers([Handle("aa"), Handle("cc")])
        assert [server.tokens for server in manager._servers] == [20, 0]
        assert [server.name for server in manager._servers] == [
            "rollout server 0 of 2 (actor aa)",
            "rollout server 1 of 2 (actor cc)",
        ]
        await asyncio.gather(*both)

    asyncio.run(run())


def test_a_request_that_ends_every_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of their own come back, so it would end them for ever; a server that cannot tell its health is gone."""
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(seconds / 100))

    class Revived(FakeServer):
        async def _health(self, timeout_s: float) -> dict[str, float]:
            return {}

    class Odd(FakeServer):
        async def _health(self, timeout_s: float) -> dict[str, float]:
            raise KeyError("load")

    async def run() -> None:
        poisoned = [Revived(state="dead"), Revived(state="dead"), Odd(state="dead")]
        with pytest.raises(ServerError, match=r"request bad/0 of 10 tokens: 5 rollout servers were lost"):
            await ask(manager_of(*poisoned, hybrid=False), "bad")
        assert sum(len(server.asked) for server in poisoned) == 5 and len(poisoned[2].asked) == 1

    asyncio.run(run())
