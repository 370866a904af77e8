"""SGLang's engine as a server sees it: requests, pause, death."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
import zmq
from torch import Tensor

from tests.waiting import wait_until
from tests.workers.rollout.tiny import VOCABULARY, build_model, disturb
from verl.utils.net_utils import get_free_port
from verl.workers.engine.fsdp.build import checkpoint_names
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.weight_channel import SharedMemory, WeightGroup, layout_of, open_store

pytest.importorskip("sglang")

from verl.workers.rollout.sglang_rollout.engine import SGLangEngine, _ignore_quit
from verl.workers.rollout.sglang_rollout.weights import serialized

T = TypeVar("T")

PROMPT = [5, 6, 7]


def engine_args(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": 2048,
        "max_running_requests": 16,
        "mem_fraction_static": 0.3,
        "random_seed": 1,
        "log_level": "error",
    } | more


class Running:
    """An engine, and the loop on which all of its coroutines run."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = SGLangEngine(engine_args(folder, **more), batch_invariant=True)

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def sample(self, prompt: list[int] = PROMPT, count: int = 8, key: str = "r", **more: Any) -> dict[str, Any]:
        return self(self.request(prompt, count, key, **more))

    def request(self, prompt: list[int] = PROMPT, count: int = 8, key: str = "r", **more: Any) -> Any:
        params = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True} | more
        return self.engine.generate(prompt, params, key, return_logprob=True)

    def close(self) -> None:
        self.engine.stop()
        self.loop.close()


@dataclass
class Subject:
    """A model of transformers, its first weights, and its folder."""

    model: Any
    first: dict[str, Tensor]
    folder: Path
    sizes: dict[str, int]

    @property
    def tp_size(self) -> int:
        return self.sizes.get("tp_size", 1)

    @property
    def workers(self) -> int:
        return self.tp_size * self.sizes.get("dp_size", 1)

    def change(self, seed: int) -> None:
        """Give the model other weights, as far from the first ones for each seed."""
        self.model.load_state_dict(self.first)
        disturb(self.model, 0.1, seed)


def build_llama(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    disturb(model, 0.1, seed=2)
    return model


def build_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        moe_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    disturb(model, 0.1, seed=2)
    return model


BUILDERS: dict[str, tuple[Any, dict[str, int]]] = {
    "qwen2": (build_model, {}),
    "qwen2 tied": (partial(build_model, tied=True), {}),
    "qwen2 TP 2": (build_model, {"tp_size": 2}),
    "qwen2 DP 2": (build_model, {"dp_size": 2}),
    "one key head TP 2": (partial(build_model, tied=True, num_key_value_heads=1), {"tp_size": 2}),
    "llama": (build_llama, {}),
    "llama tied TP 2": (partial(build_llama, tied=True), {"tp_size": 2}),
    "experts": (build_experts, {}),
    "experts TP 2": (build_experts, {"tp_size": 2}),
    "experts EP 2": (build_experts, {"tp_size": 2, "ep_size": 2}),
}


@pytest.fixture(
    scope="module", params=["qwen2", *(pytest.param(name, marks=pytest.mark.full) for name in list(BUILDERS)[1:])]
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    build, sizes = BUILDERS[request.param]
    model = build()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    subject = Subject(model, first, tmp_path_factory.mktemp("model"), sizes)
    subject.model.save_pretrained(subject.folder)
    return subject


@pytest.fixture(scope="module")
def running(subject: Subject) -> Iterator[Running]:
    running = Running(subject.folder, **subject.sizes)
    yield running
    running.close()


def test_what_the_engine_says_of_itself(running: Running, subject: Subject) -> None:
    engine = running.engine
    assert (engine.context_length, engine.vocab_size, engine.workers) == (64, VOCABULARY, subject.workers)
    assert len(engine.pids) == subject.workers + ("dp_size" in subject.sizes)  # and the one that distributes requests
    assert os.getpid() in {psutil.Process(pid).ppid() for pid in engine.pids}
    assert engine.death() is None
    running(engine.ping())


def test_a_request(running: Running) -> None:
    running(running.engine.set_version(3))
    result = running.sample()
    assert len(result["output_ids"]) == 8
    assert [entry[1] for entry in result["meta_info"]["output_token_logprobs"]] == result["output_ids"]
    assert result["meta_info"]["finish_reason"]["type"] == "length"
    assert result["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]


def test_a_pause(running: Running) -> None:
    async def paused(delay_s: float) -> bool:
        task = asyncio.create_task(running.request(count=50))
        await asyncio.sleep(delay_s)
        await running.engine.pause()
        await asyncio.sleep(0.3)
        was_done = task.done()
        await running.engine.resume()
        assert len((await task)["output_ids"]) == 50
        return was_done

    assert not all(running(paused(delay_s)) for delay_s in (0.05, 0.01, 0.0))  # the first may be over on a busy machine


def test_an_engine_without_work_sleeps(running: Running) -> None:
    """Also in a pause, in which SGLang itself asks for messages without end: the core is the trainer's meanwhile."""
    processes = [psutil.Process(pid) for pid in running.engine.pids]

    def sleep() -> bool:
        for _ in range(20):
            time.sleep(0.01)
            if any(process.status() != psutil.STATUS_SLEEPING for process in processes):
                return False
        return True

    running(running.engine.pause())
    wait_until(sleep)
    running(running.engine.resume())
    wait_until(sleep)
    assert len(running.sample()["output_ids"]) == 8


def test_an_abort_ends_one_request(running: Running) -> None:
    async def aborted() -> list[str]:
        tasks = [asyncio.create_task(running.request(count=55, key=key)) for key in ("a", "ab")]
        while not await running.engine.abort("a") and not tasks[0].done():
            await asyncio.sleep(0.001)
        return [(await task)["meta_info"]["finish_reason"]["type"] for task in tasks]

    ends = [running(aborted()) for _ in range(3)]  # one may be over before it is aborted, on a busy machine
    assert ["abort", "length"] in ends and {end for _, end in ends} == {"length"}
    assert not running(running.engine.abort("unknown"))


def test_an_abort_in_a_pause_returns_the_tokens_so_far(running: Running) -> None:
    async def aborted(delay_s: float) -> dict[str, Any]:
        task = asyncio.create_task(running.request(count=50, key="a", sampling_seed=4))
        while not running.engine._manager.rid_to_state:
            await asyncio.sleep(0)
        await asyncio.sleep(delay_s)
        await running.engine.pause()
        await running.engine.abort("a")
        result = await task
        await running.engine.resume()
        return result

    whole = running.sample(count=50, sampling_seed=4)["output_ids"]
    results = (running(aborted(0.01 * tries)) for tries in range(20))
    result = next(each for each in results if 0 < len(each["output_ids"]) < 50)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert result["output_ids"] == whole[: len(result["output_ids"])]
    assert [entry[1] for entry in result["meta_info"]["output_token_logprobs"]] == result["output_ids"]
    assert len(running.sample()["output_ids"]) == 8


# Seeds

LIMITS = [{}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.9}]


def test_tokens_depend_on_the_seed_only(running: Running) -> None:
    """Bit for bit: alone, together, in another order; and after a pause up to rounding."""
    prompts = [[3 + row, *range(5, 5 + row)] for row in range(12)]

    async def ask(row: int) -> dict[str, Any]:
        return await running.request(
            prompts[row], 10 + row, f"{row}", sampling_seed=100 + row // 2, **LIMITS[row % len(LIMITS)]
        )

    async def together(order: Sequence[int], pauses: bool = False) -> list[dict[str, Any]]:
        tasks = {row: asyncio.create_task(ask(row)) for row in order}
        for _ in range(5 if pauses else 0):
            await asyncio.sleep(0.01)
            await running.engine.pause()
            await running.engine.resume()
        return [await tasks[row] for row in range(len(prompts))]

    def log_probs(result: dict[str, Any]) -> Tensor:
        return torch.tensor([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])

    alone = [running(ask(row)) for row in range(len(prompts))]
    for order, pauses in ((range(12), False), (range(11, -1, -1), False), (range(12), True)):
        for one, other in zip(alone, running(together(order, pauses)), strict=True):
            assert other["output_ids"] == one["output_ids"]
            atol = 1e-4 if pauses else 0.0  # keys and values computed again are rounded in other ways
            torch.testing.assert_close(log_probs(other), log_probs(one), atol=atol, rtol=0)


def test_other_seeds_give_other_tokens(running: Running) -> None:
    results = [running.sample(count=12, sampling_seed=seed)["output_ids"] for seed in (1, 2, 2**62, None, None)]
    assert len({tuple(tokens) for tokens in results}) == len(results)


# Weights


def pairs_of(model: Any) -> list[tuple[str, Tensor]]:
    """Return the weights as a trainer sends them: each expert by itself."""
    held = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return list(checkpoint_names(model, held))


def send(running: Running, buckets: Sequence[Sequence[tuple[str, Tensor]]], version: int) -> dict[str, Any]:
    """Send weights in buckets through shared memory, as a trainer of this node does; the engine stays paused."""
    memory = SharedMemory()
    try:
        running(running.engine.begin_update())
        for bucket in buckets:
            memory.fill(bucket)
            running(running.engine.load(layout_of(bucket), memory.path))
        return running(running.engine.finish_update(version))
    finally:
        memory.close()


def in_buckets(pairs: Sequence[tuple[str, Tensor]], size: int = 5) -> list[Sequence[tuple[str, Tensor]]]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


def gap(running: Running, model: Any, temperature: float) -> float:
    """The largest difference from transformers in the log-probabilities of sampled tokens."""
    prompts = [[5, 6, 7], [9], [100, 3, 20, 31, 77, 8, 14, 25, 90, 50, 60, 70]]

    async def sampled() -> list[dict[str, Any]]:
        return await asyncio.gather(
            *(running.request(prompt, 20, f"{row}", temperature=temperature) for row, prompt in enumerate(prompts))
        )

    largest = 0.0
    for prompt, result in zip(prompts, running(sampled()), strict=True):
        tokens = result["output_ids"]
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        found = torch.tensor([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])
        largest = max(largest, (found - expected).abs().max().item())
    return largest


TOLERANCE = 1e-4  # fp32 rounding of two layers, in other orders of sums


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])  # 0: greedy
def test_log_probs_follow_each_update(running: Running, subject: Subject, temperature: float) -> None:
    for step in range(3):
        subject.change(seed=10 + step)
        running(running.engine.resume())
        assert gap(running, subject.model, temperature) > 1e-2  # the engine does not have them yet
        pairs = pairs_of(subject.model)
        found = send(running, in_buckets(pairs), version=step)
        assert found["checksums"] == {name: int(tensor_checksum(tensor)) for name, tensor in pairs}
        assert found["unverified"] == 0 and found["dtypes"] == {name: "float32" for name, _ in pairs}
        running(running.engine.resume())
        assert gap(running, subject.model, temperature) < TOLERANCE


def test_weights_in_a_group(running: Running, subject: Subject) -> None:
    subject.change(seed=20)
    pairs = pairs_of(subject.model)
    store, meeting = open_store("127.0.0.1", 1 + subject.workers, "gloo", 60.0)

    async def sent() -> dict[str, Any]:
        engine = running.engine
        joined = asyncio.create_task(engine.connect(asdict(meeting)))
        group = await asyncio.to_thread(WeightGroup, meeting, 0, torch.device("cpu"), store)
        await joined
        await engine.begin_update()
        for bucket in in_buckets(pairs):
            loaded = asyncio.create_task(engine.load(layout_of(bucket), None))
            await asyncio.to_thread(group.send, bucket)
            await loaded
        return await engine.finish_update(5)

    assert running(sent())["unverified"] == 0
    running(running.engine.resume())
    assert gap(running, subject.model, 1.0) < TOLERANCE


def test_weights_by_handles(running: Running, subject: Subject) -> None:
    if "dp_size" in subject.sizes:
        pytest.skip("the engine is not on the trainer's devices, and a handle is for one process")
    subject.change(seed=21)
    running(running.engine.begin_update())
    for bucket in in_buckets(pairs_of(subject.model)):
        running(running.engine.load_handles([serialized(bucket) for _ in range(subject.tp_size)]))
    assert running(running.engine.finish_update(6))["unverified"] == 0
    running(running.engine.resume())
    assert gap(running, subject.model, 1.0) < TOLERANCE


def broken_updates(pairs: list[tuple[str, Tensor]]) -> dict[str, tuple[list[tuple[str, Tensor]], str]]:
    gone = "model.layers.1.self_attn.k_proj.weight"
    norm = "model.layers.1.input_layernorm.weight"
    last = next(name for name, _ in reversed(pairs) if "down_proj" in name)
    return {
        "missing": ([pair for pair in pairs if pair[0] != gone], gone),
        "missing and not stacked": ([pair for pair in pairs if pair[0] != norm], norm),
        "missing at the end of a layer": ([pair for pair in pairs if pair[0] != last], last),
        "unknown": ([*pairs, ("model.layers.9.mlp.up_proj.weight", torch.ones(2, 2))], "model.layers.9.mlp.up_proj.w"),
        "twice": ([*pairs, next(pair for pair in pairs if pair[0] == norm)], f"{norm}' came twice"),
        "of another size": ([*pairs[:-1], (pairs[-1][0], torch.ones(3))], "AssertionError"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("missing", "missing and not stacked", "missing at the end of a layer"),
        *("unknown", "twice", "of another size"),
    ],
)
def test_an_incomplete_update_leaves_no_usable_engine(running: Running, subject: Subject, kind: str) -> None:
    pairs, told = broken_updates(pairs_of(subject.model))[kind]
    with pytest.raises(RuntimeError, match=re.escape(told)):
        send(running, in_buckets(pairs), version=7)
    running(running.engine.abort_update())
    for refused in (running.engine.resume, running.request):
        with pytest.raises(RuntimeError, match="no usable weights"):
            running(refused())
    assert running.engine.death() is None
    send(running, in_buckets(pairs_of(subject.model)), version=8)
    running(running.engine.resume())
    assert gap(running, subject.model, 1.0) < TOLERANCE


def test_a_request_goes_on_with_new_weights(running: Running, subject: Subject) -> None:
    """Its keys and values are computed again, and cached prefixes of the old weights are gone."""

    async def with_an_update() -> dict[str, Any]:
        await running.engine.set_version(1)
        task = asyncio.create_task(running.request(PROMPT, 50, temperature=0.0))
        while not running.engine._manager.rid_to_state:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        await running.engine.pause()
        memory = SharedMemory()
        pairs = pairs_of(subject.model)
        memory.fill(pairs)
        await running.engine.begin_update()
        await running.engine.load(layout_of(pairs), memory.path)
        await running.engine.finish_update(2)
        memory.close()
        await running.engine.resume()
        return await task

    subject.change(seed=30)
    result = running(with_an_update())
    spans = result["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] in (["1", "2"], ["2"], ["1"])
    if spans[-1]["version"] == "2":
        old = spans[-1]["start"]
        anew = running.sample(PROMPT + result["output_ids"][:old], 50 - old, temperature=0.0)
        assert anew["output_ids"] == result["output_ids"][old:]


# The end


def open_sockets() -> list[Any]:
    """Return this process's open sockets of ZeroMQ."""
    return [each for each in gc.get_objects() if issubclass(type(each), zmq.Socket) and not each.closed]


def runs(pid: int) -> bool:
    """Return whether a process has not ended; whoever has to take note of its end may not have done so."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_start_that_fails(tmp_path: Path) -> None:
    """It leaves no process, and no socket that Python would close after its context: the context waits for it."""
    before = set(psutil.Process().children())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["Unheard"]}')
    others = open_sockets()
    gc.disable()  # the sockets of this engine are garbage from its end on
    try:
        with pytest.raises(RuntimeError, match="SGLang's engine has not started with Unheard: "):
            SGLangEngine(engine_args(tmp_path))
        left = [each for each in open_sockets() if each not in others]
        for each in left:
            each.close(linger=0)
    finally:
        gc.enable()
    assert not left
    assert not [each for each in psutil.Process().children() if each not in before and "sglang" in each.name()]


def test_only_the_owner_ignores_that_it_should_quit() -> None:
    """Not the processes that it starts: one of the engine's ends another that way."""
    owner = threading.Thread(target=_ignore_quit)
    owner.start()
    owner.join()
    try:
        os.kill(os.getpid(), signal.SIGQUIT)
        quits = "import os, signal; os.kill(os.getpid(), signal.SIGQUIT)"
        assert subprocess.run([sys.executable, "-c", quits]).returncode == -signal.SIGQUIT
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.mark.full
def test_a_start_that_fails_in_one_of_two_groups(tmp_path: Path) -> None:
    """In another thread than the main one, as in an actor; both groups are told the same port."""
    build_model().save_pretrained(tmp_path)
    args = engine_args(tmp_path, dp_size=2, nccl_port=get_free_port())
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="address already in use"):
        pool.submit(SGLangEngine, args).result()


def test_memory_that_the_device_cannot_free(running: Running) -> None:
    running(running.engine.release(["weights", "kv_cache"]))
    assert len(running.sample()["output_ids"]) == 8
    running(running.engine.resume_memory(["weights", "kv_cache"]))


def test_death_names_the_culprit(running: Running, subject: Subject) -> None:
    """The last test of this engine. SGLang asks the process that owns it to end too; it lives on."""
    engine = running.engine
    pids = engine.pids
    if subject.workers == 1:

        async def released_too_early() -> None:
            from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

            request = asyncio.create_task(running.request(count=50))
            while not engine._manager.rid_to_state:
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            release = engine._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None))
            await asyncio.wait([asyncio.create_task(release)], timeout=1.0)
            request.cancel()

        for _ in range(10):  # a request may be over before its memory is released, on a busy machine
            running(released_too_early())
            if engine.death() is not None:
                break
        culprit = "should be called only when server is idle"
    else:
        os.kill(pids[-1], signal.SIGKILL)
        culprit = f"process {list(engine._names.values())[-1]} "
    wait_until(lambda: engine.death() is not None)
    assert culprit in str(engine.death())
    engine.stop()
    assert not [pid for pid in pids if runs(pid)]
    assert not running(engine.abort("r"))
    with pytest.raises(RuntimeError):
        running(engine.ping())
