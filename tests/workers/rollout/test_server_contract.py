"""What every rollout server does, held on a tiny model.

A hybrid vLLM server sleeps as on a GPU, at each of its levels, whenever it is paused.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout import subjects, tiny
from verl.errors import ServerError
from verl.protocol import DataProto
from verl.workers.rollout.server import TokenOutput

Server = Any  # of an optional package

WAIT_S = 600  # for what takes a fraction of a second on an idle machine


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_model()


@pytest.fixture(scope="session", params=["vllm", "sglang"])  # else pytest would start each engine once for each server
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(scope="module")
def rollout(
    request: pytest.FixtureRequest, engine: str, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The engine of a trainer, which also says what a batch gives."""
    left_engines = request.getfixturevalue("left_engines") if engine == "sglang" else {}
    rollout = left_engines.pop(engine, None)
    if rollout is None:
        rollout = tiny.start_rollout(engine, model, tmp_path_factory.mktemp("hybrid"), **tiny.SERVED)
    tiny.load_all(rollout, model)
    yield rollout
    rollout.shutdown()


LAYOUTS = {
    "standalone": {},
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
}
FULL_IDS = ("sglang-standalone",)
"""The hybrid one is the same actor, and special_e2e/test_sglang.py trains on this one; see tests/conftest.py."""


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "standalone"),
        "standalone",
        "hybrid 1",
        "hybrid 2",  # the last one, since a test ends its engine
    ],
)
def server(
    request: pytest.FixtureRequest, engine: str, rollout: Any, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param.startswith("hybrid"):
        level = int(request.param[-1])
        if engine == "sglang" and level == 1:
            pytest.skip("SGLang's sleep has no levels")
        subject: Server = (
            subjects.HybridVLLM(rollout, model, level) if engine == "vllm" else subjects.HybridSGLang(rollout)
        )
    else:
        request.getfixturevalue("ray_cluster")
        folder = tmp_path_factory.mktemp("standalone")
        subject = subjects.StandaloneServer(engine, model, folder, **LAYOUTS[request.param])
        subject.load(model, rollout.weights_version)
    asyncio.run(subject.resume())
    yield subject
    subject.close()


def params(prompts: DataProto, row: int, **changes: Any) -> dict[str, Any]:
    seed = int(prompts.batch["sampling_seed"][row])
    return {
        "temperature": tiny.TEMPERATURE,
        "seed": seed,
        "max_tokens": tiny.RESPONSE_LENGTH,
        "logprobs": True,
    } | changes


async def ask(server: Server, prompts: DataProto, row: int, delay_s: float = 0.0, **changes: Any) -> TokenOutput:
    await asyncio.sleep(delay_s)
    ids = prompts.non_tensor_batch["raw_prompt_ids"][row]
    return await server.generate(ids, params(prompts, row, **changes), f"request {row}")


async def seen_running(server: Server, request: asyncio.Task[TokenOutput]) -> None:
    """Return when the engine has begun with its only request, which may also end unseen on a busy machine."""
    while not request.done() and not (await server.health(WAIT_S))["running"]:
        await asyncio.sleep(0)


def test_requests_in_any_order_give_what_a_batch_gives(server: Server, rollout: Any) -> None:
    """Tokens and log-probabilities are equal bit for bit, also next to requests that end early.

    With tensor parallelism log-probabilities differ by rounding, and are the same each time. With SGLang they differ
    by rounding each time.
    """
    prompts = tiny.prompts_batch(8, repeat=3)
    batch = rollout.generate_sequences(prompts)
    rows = tiny.sampled_tokens(batch)
    delays = random.Random(0)

    async def all_of_them(seed: int) -> list[TokenOutput]:
        order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
        outputs = await asyncio.gather(*(ask(server, prompts, row, delays.random() / 20) for row in order))
        return [outputs[order.index(row)] for row in range(len(prompts))]

    outputs = asyncio.run(all_of_them(1))
    assert [output.token_ids for output in outputs] == rows
    again = asyncio.run(all_of_them(2))
    for row, output in enumerate(outputs):
        assert again[row].log_probs == pytest.approx(output.log_probs, abs=server.repeats_within, rel=0)
        expected = batch.batch["rollout_log_probs"][row, : len(output.token_ids)]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=server.tolerance, rtol=0)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == tiny.EOS else "length")
        assert output.weight_versions == [rollout.weights_version] * len(output.token_ids)


def test_what_a_request_asks_for(server: Server) -> None:
    prompts = tiny.prompts_batch(2)

    async def run() -> None:
        greedy = await ask(server, prompts, 0, temperature=0.0, seed=None)
        same = await ask(server, prompts, 0, temperature=0.0, seed=5, top_k=-1)
        assert same == replace(greedy, num_cached_tokens=same.num_cached_tokens)  # an engine may have the prompt
        plain = await ask(server, prompts, 0, logprobs=False)
        assert plain.log_probs is None
        ended = await ask(server, prompts, 0, stop_token_ids=[plain.token_ids[3]])
        assert ended.token_ids == plain.token_ids[: plain.token_ids.index(plain.token_ids[3]) + 1]
        assert ended.finish_reason == "stop"
        unlimited = await ask(server, prompts, 0, max_tokens=None, stop_token_ids=[])
        length = len(prompts.non_tensor_batch["raw_prompt_ids"][0])
        assert len(unlimited.token_ids) == 64 - length or unlimited.finish_reason == "stop"
        assert unlimited.token_ids[: len(plain.token_ids)] == plain.token_ids
        flat = {"seed": None, "temperature": 2.0, "max_tokens": 40}  # varied, whatever the weights are by now
        unseeded = [(await ask(server, prompts, 1, **flat)).token_ids for _ in range(4)]
        assert len({tuple(tokens) for tokens in unseeded}) > 1

    asyncio.run(run())


def test_a_bad_request_costs_only_its_caller(server: Server) -> None:
    prompts = tiny.prompts_batch(2)

    async def run() -> None:
        good = asyncio.create_task(ask(server, prompts, 0))
        for ids, changes, message in (
            ([5] * 64, {}, "the prompt has 64 tokens and the engine's context 64"),
            ([5], {"top_p": 2.0}, "sampling parameters .*top_p"),
            ([5], {"no_such_option": 1}, "sampling parameters .*no_such_option"),
            ([5], {"stop": ["."]}, "skip_tokenizer_init=false"),
            ([5, tiny.VOCABULARY], {}, "the prompt has token 131; the model's are 0 to 130"),
            ([], {}, "the prompt is empty"),
        ):
            with pytest.raises(ValueError, match=message):
                await server.generate(ids, params(prompts, 0, **changes), "bad")
        assert len((await good).token_ids) > 0

    asyncio.run(run())


def test_abort_and_cancel_free_the_engine(server: Server) -> None:
    prompts = tiny.prompts_batch(1, seed=3)

    def start() -> asyncio.Task[TokenOutput]:
        return asyncio.create_task(ask(server, prompts, 0, max_tokens=40, stop_token_ids=[]))

    async def aborted() -> TokenOutput:
        request = start()
        await seen_running(server, request)
        found = await server.abort("request 0")
        output = await request
        assert found or output.finish_reason == "length"
        return output

    async def cancelled() -> bool:
        request = start()
        await seen_running(server, request)
        if not request.cancel():
            return False
        with pytest.raises(asyncio.CancelledError):
            await request
        return True

    async def run() -> None:
        whole = await start()
        while (output := await aborted()).finish_reason != "abort":  # it had ended before
            assert output.token_ids == whole.token_ids
        assert len(output.token_ids) < len(whole.token_ids)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.log_probs or []) == len(output.token_ids)
        assert not await server.abort("request 0")

        while not await cancelled():
            pass
        while (await server.health(WAIT_S))["running"]:  # a server hears of it a little later
            await asyncio.sleep(0.001)
        assert (await start()).token_ids == whole.token_ids

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_requests_wait_while_the_weights_change(server: Server, rollout: Any, model: Any) -> None:
    """A request that runs goes on with the new weights, and knows which token came from which."""
    prompts = tiny.prompts_batch(4, seed=4)

    async def run() -> tuple[int, TokenOutput, TokenOutput, TokenOutput, TokenOutput]:
        version = await server.version()
        before = await ask(server, prompts, 0, max_tokens=40, temperature=0.0)
        running = asyncio.create_task(ask(server, prompts, 0, max_tokens=40, temperature=0.0))
        await seen_running(server, running)
        await server.pause()
        waiting = asyncio.create_task(ask(server, prompts, 1))
        given_up = asyncio.create_task(ask(server, prompts, 2))
        while (await server.health(WAIT_S))["waiting"] < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert await server.abort("request 2")
        tiny.disturb(model, 0.3, seed=9)
        server.load(model, version + 1)
        assert not waiting.done()
        await server.resume()
        assert await server.version() == version + 1
        return version, before, await running, await waiting, await given_up

    version, before, running, waiting, given_up = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    # The pause may also come before its first token, or after its last.
    assert [number for number, _ in running.versions] in ([version, version + 1], [version], [version + 1])
    assert sum(count for _, count in running.versions) == len(running.token_ids)
    old = running.weight_versions.count(version)
    assert running.token_ids[:old] == before.token_ids[:old]
    assert waiting.weight_versions == [version + 1] * len(waiting.token_ids)
    assert given_up == TokenOutput([], [], "abort")
    assert waiting.queue_s > 0.1 and waiting.sample_s > 0
    if old < len(running.token_ids):  # its keys and values are those of the new weights, like those of a new request
        ids = [*prompts.non_tensor_batch["raw_prompt_ids"][0], *running.token_ids[:old]]
        greedy = params(prompts, 0, max_tokens=40 - old, temperature=0.0)
        anew = asyncio.run(server.generate(ids, greedy, "anew"))
        assert anew.token_ids == running.token_ids[old:]
        # fp32 rounding of two layers, whose keys and values were computed in other numbers at a time
        torch.testing.assert_close(
            torch.tensor(running.log_probs)[old:], torch.tensor(anew.log_probs), atol=1e-4, rtol=0
        )
    tiny.load_all(rollout, model, version + 1)
    asyncio.run(rollout.resume(["weights", "kv_cache"]))
    expected = rollout.generate_sequences(prompts[1:2])
    assert tiny.sampled_tokens(expected) == [waiting.token_ids]
    reference = tiny.reference_log_probs(model, expected, tiny.TEMPERATURE)[0, : len(waiting.token_ids)]
    # fp32 rounding of two layers
    torch.testing.assert_close(torch.tensor(waiting.log_probs), reference, atol=1e-4, rtol=0)


def test_a_request_goes_on_after_a_pause(server: Server) -> None:
    """What it had computed may be gone by then; it gives what it gives without a pause."""
    prompts = tiny.prompts_batch(2, seed=6)

    def start() -> asyncio.Task[TokenOutput]:
        return asyncio.create_task(ask(server, prompts, 0, max_tokens=40, stop_token_ids=[]))

    async def run() -> None:
        whole = await start()
        while True:
            running = start()
            await seen_running(server, running)
            await server.pause()
            was_under_way = not running.done()
            waiting = asyncio.create_task(ask(server, prompts, 1))
            await server.resume()
            output = await running
            assert output.token_ids == whole.token_ids and output.finish_reason == "length"
            assert output.versions == whole.versions
            # fp32 rounding of two layers, whose keys and values were computed in other numbers at a time
            assert output.log_probs == pytest.approx(whole.log_probs, abs=1e-4, rel=0)
            assert (await waiting).token_ids
            if was_under_way:
                return

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_an_update_pauses_the_server(server: Server, model: Any) -> None:
    """Nobody has paused it before; the request waits, also while the update is aborted and another one comes."""
    prompts = tiny.prompts_batch(1)

    async def run() -> tuple[int, TokenOutput]:
        version = await server.version()
        await server.begin_update()
        waiting = asyncio.create_task(ask(server, prompts, 0))
        while not waiting.done() and not (await server.health(WAIT_S))["waiting"]:
            await asyncio.sleep(0.001)
        await server.abort_update()
        server.load(model, version + 1)
        assert not waiting.done()
        await server.resume()
        return version, await waiting

    version, waiting = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert waiting.weight_versions == [version + 1] * len(waiting.token_ids)


def test_a_step_that_hangs_is_found_by_its_deadline(server: Server) -> None:
    prompts = tiny.prompts_batch(1)

    async def run() -> None:
        with server.hanging():
            hanging = asyncio.create_task(ask(server, prompts, 0))
            await asyncio.sleep(0.05)
            with pytest.raises(ServerError, match=r"has not answered for 0\.1 s"):
                await server.health(timeout_s=0.1)
            assert not hanging.done()
        assert (await hanging).token_ids

    asyncio.run(run())


def test_nobody_waits_for_an_engine_that_has_failed(server: Server) -> None:
    prompts = tiny.prompts_batch(2)

    async def run() -> None:
        with server.failing():
            for _ in range(2):  # one that waits, and one that comes too late
                with pytest.raises(ServerError, match=server.gone):
                    await ask(server, prompts, 0)
            with pytest.raises(ServerError, match=server.gone):
                await server.health()
            with pytest.raises(ServerError, match=server.gone):
                await server.pause()

    asyncio.run(run())
