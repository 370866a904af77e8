"""Requests that begin with the tokens of another one: their prompt is computed once, and nothing else changes.

The reference is the same engine with ``skip_reading_prefix_cache``, which computes every prompt of every sample.
"""

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from examples.tiny_model import byte_tokenizer
from tests.workers.rollout import tiny
from verl.protocol import DataProto

pytest.importorskip("vllm")
CONTEXT = 120
LENGTHS = (1, 2, 5, 31, 32, 33, 45, 63, 64, 65, 70)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build_model(max_positions=CONTEXT)


@pytest.fixture(scope="module")
def rollout(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("vllm")
    byte_tokenizer().save_pretrained(folder)
    changes = {"mode": "async", "prompt_length": 80, "max_model_len": CONTEXT, "skip_tokenizer_init": False}
    rollout = tiny.start_rollout("vllm", model, folder, **changes)
    tiny.load_all(rollout, model)
    asyncio.run(rollout.resume(["kv_cache"]))
    yield rollout
    rollout.shutdown()


@contextmanager
def every_prompt_computed() -> Iterator[None]:
    """Let no request read the prefix cache."""
    from vllm.v1.request import Request

    original = Request.get_skip_reading_prefix_cache
    Request.get_skip_reading_prefix_cache = lambda self: True
    try:
        yield
    finally:
        Request.get_skip_reading_prefix_cache = original


@contextmanager
def counted_tokens(rollout: Any) -> Iterator[list[int]]:
    """Give the number of tokens that each step computes."""
    counts: list[int] = []
    scheduler = rollout._llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def count(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = count
    try:
        yield counts
    finally:
        scheduler.schedule = schedule


def forget(rollout: Any) -> None:
    """Empty the prefix cache."""
    assert rollout._llm.reset_prefix_cache()


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, tiny.VOCABULARY, length).tolist() for length in lengths]


def batch_of(prompts: list[list[int]], samples: int) -> DataProto:
    rows = [prompt for prompt in prompts for _ in range(samples)]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[tiny.PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    raw = np.empty(len(rows), dtype=object)
    raw[:] = rows
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clip(0),
            "sampling_seed": torch.arange(len(rows)),
        },
        non_tensors={"raw_prompt_ids": raw},
        meta_info={"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD, "global_steps": 1},
    )


def responses(output: DataProto) -> tuple[list[list[int]], list[list[float]]]:
    rows = tiny.sampled_tokens(output)
    values = output.batch["rollout_log_probs"].tolist()
    return rows, [row[: len(tokens)] for row, tokens in zip(values, rows, strict=True)]


def test_a_batch_computes_each_prompt_once(rollout: Any) -> None:
    samples = 5
    batch = batch_of(prompts_of(*LENGTHS), samples)
    with every_prompt_computed(), counted_tokens(rollout) as all_tokens:
        expected = responses(rollout.generate_sequences(batch))
    forget(rollout)
    with counted_tokens(rollout) as tokens:
        assert responses(rollout.generate_sequences(batch)) == expected
    repeats = sum(length - 1 for length in LENGTHS) * (samples - 1)
    assert sum(all_tokens) - sum(tokens) == repeats
    with counted_tokens(rollout) as tokens_again:  # one at a time, in another order, most from an earlier batch
        for row in reversed(range(0, len(batch), 3)):
            found = responses(rollout.generate_sequences(batch[row : row + 1]))
            assert (found[0][0], found[1][0]) == (expected[0][row], expected[1][row])
    rows = range(0, len(batch), 3)
    assert sum(tokens_again) == sum(len(expected[0][row]) for row in rows)


def ask_all(rollout: Any, requests: list[tuple[list[int], dict[str, Any]]], delay_s: float = 0.0) -> list[Any]:
    """Return the outputs of requests that come one after another."""

    async def ask(number: int, prompt: list[int], params: dict[str, Any]) -> Any:
        await asyncio.sleep(number * delay_s)
        return await rollout.generate(prompt, {"temperature": tiny.TEMPERATURE, "seed": number} | params, f"{number}")

    async def run() -> list[Any]:
        return await asyncio.gather(*(ask(number, *request) for number, request in enumerate(requests)))

    return asyncio.run(run())


def values(outputs: list[Any]) -> list[tuple[list[int], list[float], str]]:
    return [(output.token_ids, output.log_probs, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_single_requests_begin_where_others_do(rollout: Any, delay_s: float) -> None:
    """Samples of a prompt, also after the first has filled its block; beginnings in common; several turns."""
    first, second = prompts_of(20, 50)
    requests = [(first, {"max_tokens": 30})] * 5 + [(second, {"max_tokens": 12})] * 3
    requests += [(second[:40], {"max_tokens": 4}), (second + first, {"max_tokens": 9}), (first[:19], {"max_tokens": 9})]
    with every_prompt_computed():
        expected = values(ask_all(rollout, requests, delay_s))
    forget(rollout)
    found = ask_all(rollout, requests, delay_s)
    assert values(found) == expected
    assert [output.num_cached_tokens for output in found[1:5]] == [19] * 4
    assert found[9].num_cached_tokens >= 32
    forget(rollout)
    (turn,) = ask_all(rollout, [(first, {"max_tokens": 30})])
    so_far = first + turn.token_ids
    requests = [(so_far + second[:number], {"max_tokens": 7}) for number in (1, 3, 30)]
    turns = ask_all(rollout, requests)
    assert {output.num_cached_tokens for output in turns} == {len(so_far) - 1}
    with every_prompt_computed():
        assert values(ask_all(rollout, requests)) == values(turns)


def test_stop_strings_greedy_and_no_log_probs(rollout: Any) -> None:
    (prompt,) = prompts_of(27, seed=3)
    (plain,) = ask_all(rollout, [(prompt, {"max_tokens": 12})])
    ends = {"max_tokens": 12, "seed": 0, "stop_token_ids": [plain.token_ids[4]]}
    text = {"max_tokens": 12, "seed": 0, "stop": [byte_tokenizer().decode(plain.token_ids[5:6])]}
    greedy = {"temperature": 0.0, "max_tokens": 6}
    requests = [(prompt, params) for params in (ends, text, greedy) for _ in range(2)]
    with every_prompt_computed():
        expected = values(ask_all(rollout, requests))
    assert [finish for *_, finish in expected] == ["stop"] * 4 + ["length"] * 2
    forget(rollout)
    assert values(ask_all(rollout, requests)) == expected
    silent = ask_all(rollout, [(prompt, {"max_tokens": 12, "seed": 0, "logprobs": False})] * 2)
    assert [output.log_probs for output in silent] == [None, None]
    assert [output.token_ids for output in silent] == [plain.token_ids] * 2


def test_new_weights_and_aborts_within_a_group(rollout: Any, model: Any) -> None:
    (prompt,) = prompts_of(25, seed=4)
    group = [(prompt, {"max_tokens": 40}) for _ in range(6)]
    other = copy.deepcopy(model)
    tiny.disturb(other, 0.05, seed=9)

    async def run(update: Callable[[], None], ended: tuple[int, ...]) -> list[Any]:
        """Abort some requests, and change the weights while the others are under way."""
        params = {"temperature": tiny.TEMPERATURE, "max_tokens": 40, "stop_token_ids": []}
        tasks = [
            asyncio.create_task(rollout.generate(prompt, params | {"seed": number}, f"sample {number}"))
            for number in range(6)
        ]
        steps = rollout._loop.steps
        while rollout._loop.steps < steps + 5:
            await asyncio.sleep(0.001)
        for number in ended:
            await rollout.abort(f"sample {number}")
        late = asyncio.create_task(rollout.generate(prompt, params | {"seed": 6}, "late"))
        await asyncio.to_thread(update)
        return [*await asyncio.gather(*tasks), await late]

    def load() -> None:
        asyncio.run(rollout.release(["kv_cache"]))
        tiny.load_all(rollout, other, version=2)
        asyncio.run(rollout.resume(["weights", "kv_cache"]))

    outputs = asyncio.run(run(load, ended=(0, 3)))
    assert [output.finish_reason == "aborted" for output in outputs].count(True) <= 2
    with every_prompt_computed():
        expected = values(ask_all(rollout, group))
    forget(rollout)
    assert values(ask_all(rollout, group)) == expected
    tiny.load_all(rollout, model, version=3)
    asyncio.run(rollout.resume(["weights", "kv_cache"]))
    with every_prompt_computed():
        old = values(ask_all(rollout, group))
    assert old != expected
    forget(rollout)
    assert values(ask_all(rollout, group)) == old
    # Samples outlive the one whose block they began with, and find it while it lasts.
    outputs = asyncio.run(run(lambda: None, ended=(0, 1)))
    kept = [outputs[number] for number in (2, 3, 4, 5)]
    assert values(kept) == [old[number] for number in (2, 3, 4, 5)]


def test_a_small_cache_gives_the_same(rollout: Any) -> None:
    """Requests that wait for blocks, and that are preempted, change nothing."""
    pool = rollout._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    prompts = prompts_of(20, 33, 64, 31, seed=5)
    requests = [(prompt, {"max_tokens": 36, "stop_token_ids": []}) for prompt in prompts for _ in range(4)]
    with every_prompt_computed():
        expected = values(ask_all(rollout, requests))
    forget(rollout)
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 12)
    try:
        assert values(ask_all(rollout, requests)) == expected
    finally:
        pool.free_blocks(held)
    assert values(ask_all(rollout, requests)) == expected
