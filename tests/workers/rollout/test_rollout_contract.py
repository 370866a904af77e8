"""What every rollout does, held for vLLM, SGLang, transformers and one from outside on the same tiny model.

Before each test vLLM's engine has slept at one of its levels, as between two steps on a GPU.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout import sleeping, tiny
from verl.utils.engine_versions import LOWEST_ON_CPU, is_older_vllm
from verl.utils.numerics.seeding import RequestSeeds
from verl.workers.config import SamplingConfig
from verl.workers.config.engines import SERVED_ROLLOUTS
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.sharding_manager import complete

OUTSIDE = "examples.rollout_engine.min_p.MinPRollout"


SLEEPS = {"vllm": sleeping.LEVELS, "sglang": (None,), "hf": (None,), OUTSIDE: (None,)}
"""By the name of a rollout, the levels at which it sleeps before each test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sleep_level" in metafunc.fixturenames:
        cases = {f"{name}-{level or 'awake'}": (name, level) for name, levels in SLEEPS.items() for level in levels}
        metafunc.parametrize(
            ("started", "sleep_level"), list(cases.values()), indirect=["started"], ids=list(cases), scope="module"
        )  # by the scope, tests of one engine follow one another: it starts once
    elif "started" in metafunc.fixturenames:
        metafunc.parametrize("started", list(SLEEPS), indirect=True)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A rollout and the model that holds its weights."""
    if request.param in SERVED_ROLLOUTS:
        pytest.importorskip(request.param)
    left_engines = request.getfixturevalue("left_engines") if request.param == "sglang" else None
    model = tiny.build_model()
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    changes = {} if left_engines is None else tiny.SERVED
    rollout = tiny.start_rollout(request.param, model, tmp_path_factory.mktemp(request.param), **changes)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    with pytest.raises(RuntimeError, match="no usable weights"):
        rollout.generate_sequences(tiny.prompts_batch(1))
    tiny.load_all(rollout, model)
    with tiny.settings(rollout):  # those of batches, also of an engine that takes longer requests
        yield rollout, model
    if left_engines is not None:  # its start takes half a minute
        left_engines[request.param] = rollout
    elif request.param in SERVED_ROLLOUTS:
        rollout.shutdown()


@pytest.fixture
def rollout(started: Any, sleep_level: int | None) -> Iterator[BaseRollout]:
    rollout, model = started
    if sleep_level is None:
        yield rollout
        return
    with sleeping.poisoning_sleep(rollout, sleep_level):
        sleeping.sleep_and_wake(rollout, model)
        yield rollout


@pytest.fixture
def model(started: Any) -> Any:
    return started[1]


def test_layout_of_the_batch(rollout: BaseRollout) -> None:
    prompts = tiny.prompts_batch(6, repeat=2)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    output = rollout.generate_sequences(prompts)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])

    tensors, length = output.batch, tiny.PROMPT_LENGTH
    assert torch.equal(tensors["prompts"], prompts.batch["input_ids"])
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    assert torch.equal(tensors["attention_mask"][:, :length], prompts.batch["attention_mask"])
    assert torch.equal(tensors["attention_mask"][:, length:], tensors["response_mask"])
    assert torch.equal(tensors["position_ids"][:, :length], prompts.batch["position_ids"])
    steps = tensors["position_ids"][:, length - 1 :].diff(dim=1)
    assert torch.equal(steps, torch.ones_like(steps))
    outside = tensors["response_mask"] == 0
    assert (tensors["responses"][outside] == tiny.PAD).all()
    assert (tensors["rollout_log_probs"][outside] == 0).all()
    assert tensors["rollout_log_probs"].dtype == torch.float32
    assert output.non_tensor_batch.keys() == {"uid"}
    assert output.non_tensor_batch["uid"].tolist() == prompts.non_tensor_batch["uid"].tolist()
    assert output.meta_info["timing"]["generate_sequences"] > 0


def test_mask_follows_what_was_sampled(rollout: BaseRollout) -> None:
    ends = list(range(2, 14))  # about a tenth of all tokens ends a response
    output = rollout.generate_sequences(tiny.prompts_batch(8, repeat=4, eos_token_id=ends))
    rows = tiny.sampled_tokens(output)
    assert all(token not in ends for row in rows for token in row[:-1])
    assert all(len(row) == tiny.RESPONSE_LENGTH or row[-1] in ends for row in rows)
    assert len({len(row) for row in rows}) > 4
    stopped = sum(row[-1] in ends for row in rows)
    assert 0 < stopped < len(rows)
    assert rollout.last_generation["truncated"] == len(rows) - stopped

    with tiny.settings(rollout, ignore_eos=True):
        output = rollout.generate_sequences(tiny.prompts_batch(8, repeat=4, eos_token_id=ends))
    assert (output.batch["response_mask"] == 1).all()
    assert torch.isin(output.batch["responses"][:, :-1], torch.tensor(ends)).any()


@pytest.mark.parametrize("step", [0.0, 0.3])
def test_log_probs_equal_a_plain_forward(rollout: BaseRollout, model: Any, step: float) -> None:
    model.load_state_dict(tiny.build_model().state_dict())  # steps of tests add up, and so does rounding
    tiny.load_all(rollout, model)
    before = rollout.generate_sequences(tiny.prompts_batch(8, repeat=4))
    if step:
        tiny.disturb(model, step, seed=2)
        tiny.load_all(rollout, model)
        moved = tiny.reference_log_probs(model, before, tiny.TEMPERATURE) - before.batch["rollout_log_probs"]
        assert moved.abs().max() > 0.1
    output = rollout.generate_sequences(tiny.prompts_batch(8, repeat=4))
    gap = (output.batch["rollout_log_probs"] - tiny.reference_log_probs(model, output, tiny.TEMPERATURE)).abs()
    assert gap[output.batch["response_mask"] == 1].mean() < 1e-5 and gap.max() < 2e-4


def test_responses_keep_the_order_of_their_prompts(rollout: BaseRollout, model: Any) -> None:
    """Also when vLLM's numbers of requests get another digit, where their order as text is another one."""
    if rollout.config.name == "vllm":
        counter = rollout._llm.request_counter
        counter.counter = 10 ** len(str(counter.counter)) - 3
    output = rollout.generate_sequences(tiny.prompts_batch(6))
    gap = output.batch["rollout_log_probs"] - tiny.reference_log_probs(model, output, tiny.TEMPERATURE)
    assert gap.abs().max() < 1e-4


def test_a_response_depends_on_its_own_seed_only(rollout: BaseRollout) -> None:
    prompts = tiny.prompts_batch(8, repeat=4)
    rows = tiny.sampled_tokens(rollout.generate_sequences(prompts))
    assert tiny.sampled_tokens(rollout.generate_sequences(prompts)) == rows
    shuffled = np.random.default_rng(3).permutation(len(prompts))[:20]
    again = tiny.sampled_tokens(rollout.generate_sequences(prompts[shuffled]))
    assert again == [rows[index] for index in shuffled]
    assert tiny.sampled_tokens(rollout.generate_sequences(prompts[5:6])) == rows[5:6]
    assert len({tuple(row) for row in rows}) > 20
    prompts.batch["sampling_seed"] += 1
    assert tiny.sampled_tokens(rollout.generate_sequences(prompts)) != rows


def test_a_response_does_not_depend_on_the_others_of_its_batch(rollout: BaseRollout) -> None:
    """Bit for bit with vLLM, whose products are on blocks; transformers pads the rows of a batch to one length.

    With SGLang rounding depends on the parts in which a prompt is computed.
    """
    prompts = tiny.prompts_batch(8, repeat=4)
    together = rollout.generate_sequences(prompts)
    order = np.random.default_rng(4).permutation(len(prompts))
    # log-probs of about 7, after two layers in fp32
    tolerance = {"vllm": 0, "sglang": 1e-5, "hf": 1e-4, OUTSIDE: 0}[rollout.config.name]
    for rows in (order, order[:7], order[-1:]):
        part = rollout.generate_sequences(prompts[rows])
        assert torch.equal(part.batch["responses"], together.batch["responses"][rows])
        expected = together.batch["rollout_log_probs"][rows]
        torch.testing.assert_close(part.batch["rollout_log_probs"], expected, atol=tolerance, rtol=0)


DISTRIBUTIONS = {
    "first token": (1, {"temperature": 1.0}),
    "two tokens": (2, {"temperature": 0.7}),
    "three tokens, top-k": (3, {"temperature": 1.0, "top_k": 4}),
    "two tokens, top-p": (2, {"temperature": 0.7, "top_p": 0.6}),
}


IN_SHORT = ("two tokens, top-p",)  # the first token is one of two
FULL_IDS = (f"{OUTSIDE}-awake-two tokens, top-p",)
"""Its sampling is that of an example, whose log-probabilities and limits other tests hold; see tests/conftest.py."""


@pytest.mark.parametrize(
    "kind", [kind if kind in IN_SHORT else pytest.param(kind, marks=pytest.mark.full) for kind in DISTRIBUTIONS]
)
def test_responses_have_the_distribution_of_the_model(rollout: BaseRollout, model: Any, kind: str) -> None:
    """Whole responses are the cells, so tokens that depend on each other in another way than the model's show."""
    count = 2000
    length, limits = DISTRIBUTIONS[kind]
    model.load_state_dict(tiny.build_model().state_dict())  # other tests leave weights that prefer few tokens
    tiny.load_all(rollout, model)
    with tiny.settings(rollout, response_length=length, ignore_eos=True, **limits):
        prompts = tiny.prompts_batch(1, seed=5, repeat=count)
        prompts.batch["sampling_seed"] = torch.arange(count)  # close seeds must be unrelated too
        responses = rollout.generate_sequences(prompts).batch["responses"]
    found = Counter(map(tuple, responses.tolist()))
    prompt = list(prompts.non_tensor_batch["raw_prompt_ids"][0])
    p = chi_square_p(found, response_probabilities(model, prompt, length, **limits))
    moved = copy.deepcopy(model)
    tiny.disturb(moved, 0.01, seed=7)
    of_moved = chi_square_p(found, response_probabilities(moved, prompt, length, **limits))
    print(f"{rollout.config.name}, {kind}: p {p:.3f}, with other weights {of_moved:.0e}")
    assert p > 0.001 > of_moved


@torch.no_grad()
def response_probabilities(model: Any, prompt: list[int], length: int, **limits: Any) -> dict[tuple[int, ...], float]:
    """Return the probability of each response of so many tokens that can be sampled."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        logits = model(input_ids=torch.tensor([prompt + list(response) for response in found])).logits[:, -1]
        found = {
            (*response, token): probability * share
            for (response, probability), row in zip(found.items(), logits, strict=True)
            for token, share in enumerate(_distribution(row, [], **limits).tolist())
            if share
        }
    return found


def chi_square_p(found: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of counts; cells of fewer than 5 expected are pooled; a count outside all cells gives 0."""
    if found.keys() - probabilities.keys():
        return 0.0
    expected, order = (torch.tensor(list(probabilities.values()), dtype=torch.float64) * found.total()).sort()
    seen = torch.tensor([found[cell] for cell in probabilities], dtype=torch.float64)[order]
    pooled = int((expected < 5).sum())
    while pooled and expected[:pooled].sum() < 5:
        pooled += 1
    if pooled:
        expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
        seen = torch.cat([seen[:pooled].sum()[None], seen[pooled:]])
    assert len(expected) > 20
    chi_square = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), chi_square / 2))


def test_greedy_and_validation(rollout: BaseRollout, model: Any) -> None:
    prompts = tiny.prompts_batch(4, do_sample=False, validate=True)
    del prompts.batch["sampling_seed"]
    output = rollout.generate_sequences(prompts)
    for prompt, response in zip(prompts.non_tensor_batch["raw_prompt_ids"], tiny.sampled_tokens(output), strict=True):
        ids = list(prompt)
        for token in response:
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
    greedy = tiny.reference_log_probs(model, output, 1.0)
    torch.testing.assert_close(output.batch["rollout_log_probs"], greedy, atol=1e-4, rtol=0)

    hot = {"temperature": 1.5, "top_k": -1, "top_p": 1.0, "do_sample": True}
    with tiny.settings(rollout, val_kwargs=SamplingConfig(**hot)):
        output = rollout.generate_sequences(tiny.prompts_batch(4, validate=True))
    expected = tiny.reference_log_probs(model, output, 1.5)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.4}, {"repetition_penalty": 2.0}])
def test_limits_of_sampling(rollout: BaseRollout, model: Any, limits: dict[str, float]) -> None:
    """Log-probabilities are of the distribution that was drawn from, held against a slow row by row reference."""
    with tiny.settings(rollout, **limits):
        output = rollout.generate_sequences(tiny.prompts_batch(4, seed=7, repeat=2))
    prompts = tiny.prompts_batch(4, seed=7, repeat=2).non_tensor_batch["raw_prompt_ids"]
    for row, (prompt, response) in enumerate(zip(prompts, tiny.sampled_tokens(output), strict=True)):
        ids = list(prompt)
        for position, token in enumerate(response):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            expected = float(np.log(_distribution(logits, ids, **limits)[token]))
            assert output.batch["rollout_log_probs"][row, position] == pytest.approx(expected, abs=1e-3)
            ids.append(token)


def _distribution(
    logits: torch.Tensor,
    seen: list[int],
    temperature: float = tiny.TEMPERATURE,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> np.ndarray:
    """Return the probability of each token after those that were seen."""
    values = logits.tolist()
    for index in set(seen):
        values[index] = values[index] / repetition_penalty if values[index] > 0 else values[index] * repetition_penalty
    weights = np.exp((np.array(values) - max(values)) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    if top_p < 1:
        kept = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
        weights[order[kept:]] = 0
        weights /= weights.sum()
    return weights


def test_requests_without_seeds_get_those_of_their_place(rollout: BaseRollout) -> None:
    """Two processes that halve the requests of a step draw what one draws; a second call draws anew."""
    prompts = tiny.prompts_batch(4, repeat=2)
    del prompts.batch["sampling_seed"]

    def responses(shard: int = 0, num_shards: int = 1) -> list[torch.Tensor]:
        rollout.seeds = RequestSeeds(5, shard, num_shards)
        part = prompts.chunk(num_shards)[shard]
        return [rollout.generate_sequences(part).batch["responses"] for _ in range(2)]

    first, second = responses()
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    halves = [responses(shard, 2) for shard in range(2)]
    assert torch.equal(torch.cat([half[0] for half in halves]), first)
    assert torch.equal(torch.cat([half[1] for half in halves]), second)


def test_bad_batches_are_refused(rollout: BaseRollout) -> None:
    empty = tiny.prompts_batch(2)
    empty.non_tensor_batch["raw_prompt_ids"][1] = []
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        rollout.generate_sequences(empty)
    too_long = tiny.prompts_batch(3)
    too_long.non_tensor_batch["raw_prompt_ids"][2] = [5] * (tiny.PROMPT_LENGTH + 1)
    with pytest.raises(ValueError, match=r"prompts\[2\] has 13 tokens"):
        rollout.generate_sequences(too_long)


def test_fault_point_lies_inside_generation(
    rollout: BaseRollout, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    if rollout.config.name == OUTSIDE:
        pytest.skip("fault points are those of our engines")
    monkeypatch.setenv("VERL_FAULT", "raise:generate:step=1")
    monkeypatch.setenv("VERL_FAULT_FILE", str(tmp_path / "fault"))
    prompts = tiny.prompts_batch(3)
    with pytest.raises(RuntimeError, match="injected at generate"):
        rollout.generate_sequences(prompts)
    assert "generate" in (tmp_path / "fault").read_text()
    assert len(rollout.generate_sequences(prompts)) == 3  # the engine has forgotten the broken requests


def broken_updates() -> dict[str, Any]:
    norm = "model.layers.1.input_layernorm.weight"
    return {
        "missing": (lambda pairs: [pair for pair in pairs if "1.self_attn.k_proj.bias" not in pair[0]], "k_proj.bias"),
        "unknown": (lambda pairs: [*pairs, ("model.layers.9.mlp.up_proj.weight", torch.ones(2, 2))], "layers.9.mlp"),
        "twice": (lambda pairs: [*pairs, next(pair for pair in pairs if pair[0] == norm)], norm),
    }


@pytest.mark.parametrize("kind", ["missing", "unknown", "twice"])
def test_an_incomplete_update_leaves_no_usable_engine(rollout: BaseRollout, model: Any, kind: str) -> None:
    change, name = broken_updates()[kind]
    pairs = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    rollout.begin_update()
    with pytest.raises(RuntimeError, match=name):
        rollout.load(change(pairs))
        rollout.finish_update(2)
    rollout.abort_update()
    assert rollout.weights_version == -1
    with pytest.raises(RuntimeError, match="no usable weights"):
        rollout.generate_sequences(tiny.prompts_batch(1))

    tiny.disturb(model, 0.05, seed=4)
    tiny.load_all(rollout, model, version=3)
    assert rollout.weights_version == 3
    output = rollout.generate_sequences(tiny.prompts_batch(8))
    expected = tiny.reference_log_probs(model, output, tiny.TEMPERATURE)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)


def test_loaded_tensors_may_be_reused(rollout: BaseRollout, model: Any) -> None:
    rollout.begin_update()
    for name, parameter in model.named_parameters():
        borrowed = parameter.detach().clone()
        rollout.load([(name, borrowed)])
        borrowed.fill_(float("nan"))
    rollout.finish_update(4)
    sums = rollout.weights_checksum()
    due = dict(rollout.source_checksum(name, parameter) for name, parameter in model.named_parameters())
    assert sums == {name: int(value) for name, value in due.items()}
    whole = {name: int(tensor_checksum(parameter)) for name, parameter in model.named_parameters()}
    assert sums == whole  # one rank holds everything


def skip_where_vllm_keeps_its_cache(rollout: Any) -> None:
    """Skip what ``patch.touch_cache_on_use`` does."""
    if not hasattr(rollout, "_llm"):
        pytest.skip("of vLLM's cache")
    if is_older_vllm(LOWEST_ON_CPU):
        pytest.skip(f"of the cache of vLLM {LOWEST_ON_CPU}, which the extra cpu installs")


def test_after_a_sync_vllm_uses_the_same_part_of_its_cache_again(started: Any) -> None:
    """Otherwise a cache is in memory as a whole after a while, however little of it a batch needs."""
    rollout, model = started
    skip_where_vllm_keeps_its_cache(rollout)
    pool = rollout._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def free_blocks() -> list[int]:
        return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]

    rollout.generate_sequences(tiny.prompts_batch(6, repeat=2))
    used = free_blocks()
    tiny.load_all(rollout, model, rollout.weights_version + 1)
    assert free_blocks() == sorted(used) != used
    rollout.generate_sequences(tiny.prompts_batch(6, repeat=2))
    assert sorted(free_blocks()) == sorted(used)


def test_vllm_on_a_cpu_gives_the_memory_of_its_cache_back(started: Any) -> None:
    """Between two batches the trainer has it (``free_cache_engine``); nothing that is generated changes."""
    rollout, _ = started
    skip_where_vllm_keeps_its_cache(rollout)
    assert rollout.config.free_cache_engine and rollout._caches

    def written() -> int:
        return sum(int(cache.count_nonzero()) for cache in rollout._caches)

    before = rollout.generate_sequences(tiny.prompts_batch(4, repeat=2))
    assert written()
    complete(rollout.release())
    assert not written()
    complete(rollout.resume(["weights", "kv_cache"]))
    after = rollout.generate_sequences(tiny.prompts_batch(4, repeat=2))
    for name in ("responses", "rollout_log_probs"):
        assert torch.equal(before.batch[name], after.batch[name]), name
