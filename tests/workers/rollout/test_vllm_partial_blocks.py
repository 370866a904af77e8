"""Which blocks vLLM's cache manager gives to requests that begin alike, on a cache that holds tokens in place of keys.

Each block remembers which token was computed for each of its slots. Whatever requests come, end and are preempted, a
request must find its own tokens in its blocks.
"""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

BLOCK = 8


class Cache:
    """vLLM's manager of the blocks of one engine, and what the blocks hold."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from verl.workers.rollout.vllm_rollout.patch import _find_partial_blocks, _has_one_plain_group

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        assert _has_one_plain_group(config)
        self.manager = KVCacheManager(config, 1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        _find_partial_blocks(self.manager)
        self.slots = [[-1] * BLOCK for _ in range(num_blocks)]
        self.computed = 0
        self.count = 0

    def request(self, tokens: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.count += 1
        params = SamplingParams(max_tokens=100)
        return Request(f"{self.count}", list(tokens), params, None, block_hasher=self.hasher)

    def step(self, running: list[Any], waiting: list[Any], budget: int = 1000) -> list[Any]:
        """Compute as the scheduler and a worker do; return the waiting requests that had room."""
        manager = self.manager
        manager.new_step_starts()
        work, started = [], []
        for request in running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count and manager.allocate_slots(request, count, num_lookahead_tokens=0) is not None:
                work.append((request, request.num_computed_tokens, count))
                budget -= count
        for request in waiting:
            blocks, found, _ = manager.get_computed_blocks(request)
            assert found < request.num_tokens
            count = min(request.num_tokens - found, budget)
            if not count:
                break
            new = manager.allocate_slots(
                request, count, num_new_computed_tokens=found, new_computed_blocks=blocks, num_lookahead_tokens=0
            )
            if new is None:
                break
            work.append((request, found, count))
            started.append(request)
            budget -= count
        copies, retained = manager.take_kv_cache_block_copies()
        manager.block_pool.free_blocks(retained)
        self.write(work)
        contents = [list(self.slots[source]) for source, _ in copies]
        for (_, copy), content in zip(copies, contents, strict=True):
            self.slots[copy] = content
        self.write(work)
        for request, first, count in work:
            request.num_computed_tokens = first + count
            self.computed += count
            self.check(request)
        return started

    def write(self, work: list[tuple[Any, int, int]]) -> None:
        for request, first, count in work:
            (blocks,) = self.manager.get_block_ids(request.request_id)
            for place in range(first, first + count):
                self.slots[blocks[place // BLOCK]][place % BLOCK] = request.all_token_ids[place]

    def check(self, request: Any) -> None:
        (blocks,) = self.manager.get_block_ids(request.request_id)
        held = [token for block in blocks for token in self.slots[block]]
        assert held[: request.num_computed_tokens] == list(request.all_token_ids)[: request.num_computed_tokens]

    def end(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_STOPPED
        self.manager.free(request)


def test_samples_of_a_prompt_compute_its_last_token() -> None:
    for length in range(1, 3 * BLOCK + 2):
        cache = Cache(64)
        tokens = list(range(length))
        first = [cache.request(tokens) for _ in range(4)]
        assert cache.step([], first) == first
        assert cache.computed == length + 3
        cut = [cache.request([-5, *tokens]) for _ in range(3)]
        cache.computed = 0
        cache.step([], cut[:1], budget=length)
        cache.step(cut[:1], cut[1:])  # the rest of a prompt that was cut, and its other samples
        assert cache.computed == length + 1 + 2
        late = [cache.request(tokens) for _ in range(2)]
        for number in range(2 * BLOCK):  # the first ones fill their blocks
            for request in first:
                request.append_output_token_ids([100 + number])
            cache.step(first, [])
        cache.computed = 0
        cache.step([], late)
        assert cache.computed == 2


def test_a_turn_begins_where_the_last_one_ended() -> None:
    cache = Cache(64)
    request = cache.request(list(range(5)))
    cache.step([], [request])
    for number in range(20):
        request.append_output_token_ids([50 + number])
        cache.step([request], [])
    request.append_output_token_ids([99])  # sampled, and not computed
    tokens = list(request.all_token_ids)
    cache.end(request)
    cache.computed = 0
    cache.step([], [cache.request(tokens + [7, 7, 7])])
    assert cache.computed == 4
    assert cache.manager.get_computed_blocks(cache.request(tokens[:10] + [7] * 20))[1] == BLOCK
    other = cache.request(tokens)
    other.cache_salt = "another adapter or image has another key as well"
    other.block_hashes.clear()
    assert cache.manager.get_computed_blocks(other)[1] == 0


def test_nothing_is_found_after_a_reset() -> None:
    cache = Cache(64)
    request = cache.request(list(range(5)))
    cache.step([], [request])
    assert cache.manager.get_computed_blocks(cache.request(list(range(5))))[1] == 4
    cache.end(request)
    assert cache.manager.get_computed_blocks(cache.request(list(range(5))))[1] == 4
    assert cache.manager.reset_prefix_cache()
    assert cache.manager.get_computed_blocks(cache.request(list(range(5))))[1] == 0


@pytest.mark.parametrize(
    "seed", [7, 10, 12, 13, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20, 60))]
)
def test_requests_find_their_own_tokens(seed: int) -> None:
    """Random trees of prompts, chunks, ends, preemptions, and a cache that is too small."""
    draw = random.Random(seed)
    cache = Cache(draw.choice([12, 30, 100]))
    texts = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(4)]
    running: list[Any] = []
    waiting: list[Any] = []
    for _ in range(150):
        for _ in range(draw.choice([0, 0, 1, 4])):
            text = draw.choice(texts)
            tokens = text[: draw.randrange(1, len(text) + 1)] if draw.random() < 0.5 else text
            waiting.append(cache.request(tokens + [draw.randrange(3) for _ in range(draw.choice([0, 0, 2, 9]))]))
        started = cache.step(running, waiting, budget=draw.choice([6, 20, 200]))
        waiting = [request for request in waiting if request not in started]
        running += started
        for request in running:
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([draw.randrange(3)])
        for request in list(running):
            if draw.random() < 0.06 or request.num_tokens > 60:
                running.remove(request)
                texts[draw.randrange(4)] = list(request.all_token_ids)
                cache.end(request)
            elif draw.random() < 0.04:  # preempted: it begins anew
                running.remove(request)
                cache.manager.free(request)
                request.num_computed_tokens = 0
                waiting.insert(0, request)
        if draw.random() < 0.02:
            for request in running:
                cache.end(request)
            running = []
            assert cache.manager.reset_prefix_cache()
    for request in running:
        cache.end(request)
    pool = cache.manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
