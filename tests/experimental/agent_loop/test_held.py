"""Requests of training that are interrupted and go on, over a server that answers token by token."""

import asyncio
from typing import Any

import pytest

from tests.experimental.agent_loop.test_servers import Remote, manager_of
from verl.errors import RequestAbortedError
from verl.experimental.agent_loop import held
from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.batch import BatchOfAttempts, Place, Policy, Task
from verl.experimental.agent_loop.held import Parts
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.utils.numerics.seeding import derive_seed
from verl.workers.rollout.server import GenerationRequest, TokenOutput

EOS = 0


class TokenByToken:
    """Keeps the contract of ``RolloutServer``: a token per step, which version, prompt, seed and place decide.

    ``knows_after`` is how many aborts arrive before the request; ``end`` is the place of a token that ends a response.
    """

    def __init__(self, end: int = 10**9, knows_after: int = 0) -> None:
        self.end, self.knows_after, self.version = end, knows_after, 0
        self.asked: list[dict[str, Any]] = []
        self.given_up: set[str] = set()
        self.running: set[str] = set()
        self.generate, self.abort = Remote(self._generate), Remote(self._abort)

    async def _generate(self, **request: Any) -> TokenOutput:
        self.asked.append(request)
        prompt, params, name = request["prompt_ids"], request["sampling_params"], request["request_id"]
        while self.knows_after:
            await asyncio.sleep(0)
        self.running.add(name)
        tokens: list[int] = []
        reason = "length"
        try:
            while len(tokens) < params.get("max_tokens", 64 - len(prompt)):
                await asyncio.sleep(0.001)
                if name in self.given_up:
                    reason = "abort"
                    break
                place = len(prompt) + len(tokens)
                tokens.append(EOS if place == self.end else 1 + derive_seed(params["seed"], len(tokens)) % 9973)
                if tokens[-1] == EOS:
                    reason = "stop"
                    break
        finally:
            self.running.discard(name)
        values = [-0.5 * (len(prompt) + i) for i in range(len(tokens))] if params.get("logprobs") else None
        versions = [(self.version, len(tokens))] if tokens else []
        expanded = [*prompt[:1], *prompt] if "multi_modal_data" in request else None
        return TokenOutput(tokens, values, reason, versions, 3, expanded)

    async def _abort(self, request_id: str) -> bool:
        if self.knows_after:
            self.knows_after -= 1
            return False
        is_known = request_id in self.running
        if is_known:
            self.given_up.add(request_id)
        return is_known


def attempt_of(number: int = 0, trains: bool = True) -> Attempt:
    return Attempt(f"1-train-u-{number}-0", "u", number, "loop", seed=5, trains=trains)


def asking(
    manager: AsyncLLMServerManager, attempt: Attempt, max_tokens: int | None = 30, **more: Any
) -> "asyncio.Task[TokenOutput]":
    media = {"multi_modal_data": more.pop("media")} if "media" in more else {}
    params = {"seed": 5, "logprobs": True, "temperature": 1.0, **more}
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    made = manager.of(attempt).generate("turn", prompt_ids=[7, 8], sampling_params=params, **media)
    return asyncio.create_task(made)


async def until_running(server: TokenByToken, seconds: float = 0.012) -> None:
    while not server.running:
        await asyncio.sleep(0)
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("knows_after", [0, 2])
@pytest.mark.parametrize("max_tokens", [30, None])
def test_an_interrupted_response_goes_on_after_its_tokens(
    max_tokens: int | None, knows_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, under a new version each; an abort that comes before its request is repeated."""

    monkeypatch.setattr(held, "_AGAIN_S", 0.004)

    async def run() -> None:
        server = TokenByToken(knows_after=knows_after)
        manager = manager_of(server)
        attempt = attempt_of()
        waits = asking(manager, attempt, max_tokens)
        for version in (1, 2):
            while len(server.asked) < version:
                await asyncio.sleep(0)
            await asyncio.sleep(0.003)
            await manager.held.begin()
            assert not server.running and not waits.done()
            await asyncio.sleep(0.01)
            assert len(server.asked) == version  # nothing is sent while it is held
            server.version = version
            manager.held.end()
        output = await waits
        size = max_tokens or 62
        assert output.finish_reason == "length" and len(output.token_ids) == size
        assert output.log_probs == [-0.5 * (2 + i) for i in range(size)]
        assert [version for version, _ in output.versions] == [0, 1, 2] and len(output.weight_versions) == size
        counts = [count for _, count in output.versions]
        assert all(counts[1:]) and (counts[0] or knows_after)
        first, second, third = server.asked
        assert first["prompt_ids"] == [7, 8] and first["sampling_params"]["seed"] == 5
        assert second["prompt_ids"] == [7, 8, *output.token_ids[: counts[0]]]
        assert third["prompt_ids"] == [7, 8, *output.token_ids[: counts[0] + counts[1]]]
        if max_tokens is not None:
            left = [request["sampling_params"]["max_tokens"] for request in server.asked]
            assert left == [30, 30 - counts[0], 30 - counts[0] - counts[1]]
        seeds = [request["sampling_params"]["seed"] for request in server.asked]
        assert seeds == [5, derive_seed(5, "token", counts[0]), derive_seed(5, "token", counts[0] + counts[1])]
        assert output.token_ids[0] != output.token_ids[counts[0]]  # no random number comes again
        assert len({request["request_id"] for request in server.asked}) == 3
        assert attempt.turns == 1 and attempt.oldest_version == 0

    asyncio.run(run())


def test_a_request_waits_before_its_first_token_and_keeps_its_seed() -> None:
    async def run() -> None:
        server = TokenByToken(end=6)
        manager = manager_of(server)
        await manager.held.begin()
        waits = asking(manager, attempt_of())
        await asyncio.sleep(0.01)
        assert not server.asked
        manager.held.end()
        output = await waits
        assert output.finish_reason == "stop" and output.token_ids[-1] == EOS and len(output.token_ids) == 5
        parts = Parts(GenerationRequest([1], {"seed": 3, "max_tokens": 4}, "a"), [TokenOutput([], [], "abort")])
        assert parts.rest().sampling_params == {"seed": 3, "max_tokens": 4}

    asyncio.run(run())


def test_validation_and_responses_that_only_one_request_can_give_are_not_interrupted() -> None:
    async def run() -> None:
        server = TokenByToken()
        manager = manager_of(server)
        validation = asking(manager, attempt_of(trains=False), 60)
        plain = asking(manager, attempt_of(1), 60)
        await until_running(server, 0.005)
        await manager.held.begin()
        assert not validation.done() and not plain.done()
        assert (await validation).versions == [(0, 60)]
        assert (await asking(manager, attempt_of(2, trains=False), 4)).finish_reason == "length"
        manager.held.end()
        await plain
        for more in ({"stop": ["x"]}, {"repetition_penalty": 1.1}, {"min_tokens": 4}):
            whole = asking(manager, attempt_of(3), 30, **more)
            await until_running(server, 0.005)
            await manager.held.begin()
            assert (await whole).versions == [(0, 30)]
            manager.held.end()
            whole = asking(manager, attempt_of(3), 30, **more)
            other = asking(manager, attempt_of(5), 30)
            await until_running(server, 0.005)
            (kept,) = await manager.held.begin(waits_for_others=False)
            assert kept.sample == 5 and not whole.done() and len(server.running) == 1
            manager.held.end()
            await asyncio.gather(whole, other)
        free = asking(manager, attempt_of(4), 30, stop=None, repetition_penalty=1.0)
        await until_running(server, 0.005)
        await manager.held.begin()
        assert not free.done()
        manager.held.end()
        await free

    asyncio.run(run())


def test_a_first_turn_begins_with_kept_tokens() -> None:
    """The tokens that a hold returns give the same request in another process."""

    async def run() -> None:
        server = TokenByToken()
        manager = manager_of(server)
        waits = asking(manager, attempt_of())
        await until_running(server, 0.005)
        (kept,) = await manager.held.begin()
        assert (kept.uid, kept.sample, kept.prompt_ids, kept.versions) == ("u", 0, [7, 8], [(0, len(kept.token_ids))])
        assert not await manager.held.begin()  # nothing has come since
        manager.held.end()
        whole = await waits
        assert whole.token_ids[: len(kept.token_ids)] == kept.token_ids
        later = TokenByToken()
        later.version = 4
        attempt = attempt_of()
        attempt.kept = kept.moved(1)
        output = await asking(manager_of(later), attempt)
        size = len(kept.token_ids)
        assert output.token_ids == whole.token_ids and output.log_probs == whole.log_probs
        assert output.versions == [(1, size), (4, 30 - size)] and attempt.oldest_version == 1
        assert later.asked[0]["sampling_params"] == server.asked[1]["sampling_params"]
        assert (await asking(manager_of(later), attempt, 5)).versions == [(4, 5)]  # the second turn has nothing kept
        for other, limit in (([7, 9], 30), ([7, 8], size)):
            assert kept.part(GenerationRequest(other, {"max_tokens": limit}, "a")) == []

    asyncio.run(run())


def test_an_abort_of_somebody_else_is_an_error_also_after_a_hold() -> None:
    async def run() -> None:
        server = TokenByToken()
        manager = manager_of(server)
        waits = asking(manager, attempt_of())
        await until_running(server, 0.003)
        await manager.held.begin()
        manager.held.end()
        await until_running(server, 0.003)
        server.given_up |= server.running
        with pytest.raises(RequestAbortedError, match=r"turn/0\.1: rollout server 0 of 1 aborted it"):
            await waits

    asyncio.run(run())


def test_a_response_ends_at_its_limit_and_images_stay_in_the_prompt() -> None:
    full = Parts(GenerationRequest([1], {"max_tokens": 2}, "a"), [TokenOutput([4, 5], [-1.0, -2.0], "abort", [(1, 2)])])
    assert full.is_full
    full.outputs.append(TokenOutput([], None, "abort"))
    assert (full.joined().finish_reason, full.joined().versions) == ("length", [(1, 2)])

    async def run() -> None:
        server = TokenByToken()
        manager = manager_of(server)
        waits = asking(manager, attempt_of(), media={"image": ["picture"]})
        await until_running(server, 0.003)
        await manager.held.begin()
        manager.held.end()
        output = await waits
        assert output.expanded_prompt_ids == [7, 7, 8] and output.versions == [(0, 30)]
        assert len(server.asked) == 2 and server.asked[1]["multi_modal_data"] == {"image": ["picture"]}

    asyncio.run(run())


@pytest.mark.parametrize("key", ["trajectory_timeout_s", "step_timeout_s"])
def test_deadlines_do_not_count_the_time_of_a_hold(key: str) -> None:
    async def run() -> None:
        manager = manager_of(TokenByToken())

        async def loop(attempt: Attempt) -> AgentLoopOutput:
            output = await manager.of(attempt).generate(
                "turn", prompt_ids=[7], sampling_params={"seed": 1, "max_tokens": 5}
            )
            return AgentLoopOutput(prompt_ids=[7], response_ids=output.token_ids, response_mask=[1] * 5)

        policy = Policy(**{key: 0.2})
        tasks = [Task(Place(0, "p", 0), "loop", 1, loop)]
        batch = BatchOfAttempts(tasks, policy, clock=manager.held.clock)
        await manager.held.begin()
        work = asyncio.create_task(batch.results())
        await asyncio.sleep(0.5)
        manager.held.end()
        (output,) = await work
        assert output is not None and len(output.response_ids) == 5
        await manager.held.begin()
        manager.held.end()
        slow = BatchOfAttempts([Task(Place(0, "p", 0), "loop", 1, hangs)], policy, clock=manager.held.clock)
        with pytest.raises(Exception, match=rf"rollout\.agent\.{key}=0\.2 is over"):
            await slow.results()

    asyncio.run(run())


async def hangs(attempt: Attempt) -> AgentLoopOutput:
    await asyncio.sleep(3600)
    raise AssertionError("nobody has ended this attempt")
