"""The thread of an engine with vLLM's asynchronous scheduling: a batch is in flight whenever something else happens."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from verl.workers.rollout.vllm_rollout.engine_loop import EngineLoop

if TYPE_CHECKING:
    from tests.workers.rollout.async_engine import Device

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = {"short": [5, 6], "long": list(range(3, 60, 2)), "last": [9]}
TOKENS, MANY = 8, 10_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.workers.rollout import async_engine

    with async_engine.started(tmp_path_factory.mktemp("async")) as started:
        yield started


class Engine:
    """A loop around the engine, with three requests that the device has not begun with."""

    def __init__(self, llm: Any, device: "Device") -> None:
        self.llm, self.device = llm, device
        device.settle()
        device.permits = threading.Semaphore(0)
        device.weights = 0
        llm.llm_engine.set_weight_version("0")
        self.loop = EngineLoop(llm)
        self.loop.pause()
        self.answers = {key: self.ask(key, ids) for key, ids in PROMPTS.items()}
        self.loop.resume()

    def ask(self, key: str, ids: list[int]) -> Future[Any]:
        from vllm import SamplingParams

        answer: Future[Any] = Future()
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
        self.loop.submit(key, {"prompt_token_ids": ids}, params, lambda ended: answer.set_result(ended.output))
        return answer

    def between_steps(self, happens: Callable[[], None]) -> None:
        """Run a batch, and let a thing happen on the thread of the engine while the next one is in flight."""
        while self.device.submitted != self.device.done + 2:  # the engine waits for the device
            time.sleep(0.001)
        in_flight: Future[int] = Future()
        core = self.llm.llm_engine.engine_core.engine_core
        self.loop.ask(lambda: in_flight.set_result(len(core.batch_queue)))
        thread = threading.Thread(target=happens)
        thread.start()
        while self.loop._inbox.qsize() < 2:
            time.sleep(0.001)
        self.device.permits.release()
        thread.join()
        assert in_flight.result() == 1

    def go_on(self) -> None:
        self.device.permits.release(MANY)

    def result(self, key: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a request, and how many of them it tells each version of the weights has sampled."""
        sample = self.answers[key].result().outputs[0]
        return list(sample.token_ids), [(int(each.version), each.end - each.start) for each in sample.weight_versions]


@pytest.fixture
def running(engine: Any) -> Iterator[Engine]:
    running = Engine(*engine)
    yield running
    running.go_on()
    running.loop.stop()
    running.llm.llm_engine.abort_request(list(running.llm.llm_engine.output_processor.request_states), internal=True)


def continued(key: str, weights: list[int]) -> list[int]:
    """Return the tokens that weights sample one after the other for a prompt."""
    from tests.workers.rollout.async_engine import next_token

    tokens = list(PROMPTS[key])
    for each in weights:
        tokens.append(next_token(tokens, each))
    return tokens[len(PROMPTS[key]) :]


def check(running: Engine, *keys: str) -> None:
    """Each token is what its weights sample after those before it, and names them."""
    for key in keys:
        tokens, versions = running.result(key)
        weights = [version for version, count in versions for _ in range(count)]
        assert tokens == continued(key, weights) and len(tokens) == TOKENS, (key, tokens, versions)


def test_nothing_happens(running: Engine) -> None:
    running.go_on()
    check(running, *PROMPTS)


def test_an_abort(running: Engine) -> None:
    running.between_steps(lambda: running.loop.abort("short"))
    tokens, _ = running.result("short")
    assert 0 < len(tokens) < TOKENS and tokens == continued("short", [0] * len(tokens))
    running.go_on()
    check(running, "long", "last")


def test_a_pause(running: Engine) -> None:
    running.between_steps(running.loop.pause)
    running.loop.resume()
    running.go_on()
    check(running, *PROMPTS)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_a_sleep_and_new_weights(running: Engine, changes: bool, aborts: bool) -> None:
    """As the rollout does it, with the device that finishes the batch in flight only now."""
    if aborts:
        running.between_steps(lambda: running.loop.abort("short"))
    running.between_steps(running.loop.pause)
    running.go_on()
    llm = running.llm
    before = {key: None if answer.done() else 0 for key, answer in running.answers.items()}
    assert llm.reset_prefix_cache(reset_running_requests=True)
    llm.sleep(level=2, mode="keep")
    llm.wake_up(tags=["weights"])
    if changes:
        running.device.weights = 1
        llm.reset_prefix_cache(reset_running_requests=True)
        llm.llm_engine.engine_core.reset_encoder_cache()
        llm.reset_mm_cache()
        llm.llm_engine.set_weight_version("1")
    llm.wake_up(tags=["kv_cache"])
    running.loop.resume()
    keys = [key for key, number in before.items() if number == 0]
    assert len(keys) == 3 - aborts
    check(running, *keys)
    for key in keys:
        assert [version for version, _ in running.result(key)[1]] == ([0, 1] if changes else [0])
