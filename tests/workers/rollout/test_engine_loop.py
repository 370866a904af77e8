"""The thread of an engine, without an engine: what happens to requests that arrive while it ends."""

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import PATIENCE_S
from verl.errors import ServerError
from verl.workers.rollout.vllm_rollout import engine_loop
from verl.workers.rollout.vllm_rollout.engine_loop import EngineLoop


def test_a_request_that_arrives_while_the_engine_fails_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails after the check whether it lives, and before the request is in the inbox."""

    def fail() -> None:
        raise RuntimeError("no more memory")

    class SlowInbox(queue.Queue[Any]):
        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(item, engine_loop._Add):
                super().put(engine_loop._Ask(fail))
                time.sleep(0.2)
            super().put(item)

    monkeypatch.setattr(engine_loop.queue, "SimpleQueue", SlowInbox)
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    llm: Any = SimpleNamespace(llm_engine=engine)
    loop = EngineLoop(llm)
    answers: list[Any] = []
    answered = threading.Event()
    loop.submit("key", {"prompt_token_ids": [1]}, SimpleNamespace(), lambda it: (answers.append(it), answered.set()))
    assert answered.wait(PATIENCE_S)
    assert isinstance(answers[0], ServerError) and "no more memory" in str(answers[0])
    for call in (lambda: loop.submit("late", {}, SimpleNamespace(), answers.append), lambda: loop.ask(fail)):
        with pytest.raises(ServerError, match="no more memory"):
            call()
    loop.stop()


def test_a_stopped_engine_takes_nothing() -> None:
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(output_processor=SimpleNamespace(request_states={})))
    loop = EngineLoop(llm)
    loop.stop()
    with pytest.raises(ServerError, match="has been stopped"):
        loop.ask(lambda: None)
