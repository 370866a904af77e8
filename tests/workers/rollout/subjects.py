"""Rollout servers of both placements behind the same verbs, for the tests of their contract."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout import tiny
from tests.workers.rollout.sleeping import poisoning_sleep
from verl.errors import ServerError
from verl.workers.config import HFModelConfig, ServerConfig
from verl.workers.rollout import engine_server
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.server import TokenOutput
from verl.workers.sharding_manager import complete


class HybridServer:
    """The engine on the trainer's devices."""

    tolerance = repeats_within = 0.0

    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout

    async def generate(self, ids: Sequence[int], params: dict[str, Any], request_id: str) -> TokenOutput:
        return await self.rollout.generate(ids, params, request_id)

    async def abort(self, request_id: str) -> bool:
        return await self.rollout.abort(request_id)

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        return await self.rollout.health(timeout_s)

    async def pause(self) -> None:
        await self.rollout.release()

    async def resume(self) -> None:
        await self.rollout.resume(["weights", "kv_cache"])

    async def version(self) -> int:
        return self.rollout.weights_version

    async def begin_update(self) -> None:
        self.rollout.begin_update()

    async def abort_update(self) -> None:
        self.rollout.abort_update()

    def load(self, model: Any, version: int) -> None:
        tiny.load_all(self.rollout, model, version)

    def close(self) -> None:
        """Leave the engine to the fixture that has started it."""


class HybridVLLM(HybridServer):
    """The engine in this process, which sleeps as on a GPU while it is paused."""

    gone = "no more memory"

    def __init__(self, rollout: Any, model: Any, level: int) -> None:
        super().__init__(rollout)
        self._model = model
        self._slept = rollout.weights_version
        self._sleep = poisoning_sleep(rollout, level)
        self._sleep.__enter__()

    async def pause(self) -> None:
        slept = self.rollout.weights_version
        await super().pause()
        self._slept = slept

    async def resume(self) -> None:
        """Wake up with the weights that have been loaded meanwhile, else with those of before."""
        await self.rollout.resume(["weights"])
        if self.rollout.weights_version == NO_WEIGHTS:
            super().load(self._model, self._slept)
        await self.rollout.resume(["kv_cache"])

    async def begin_update(self) -> None:
        await self.rollout.resume(["weights"])
        await super().begin_update()

    def load(self, model: Any, version: int) -> None:
        """Load weights into memory that is awake; the cache may still be asleep."""
        complete(self.rollout.resume(["weights"]))
        super().load(model, version)

    def close(self) -> None:
        self._sleep.__exit__(None, None, None)

    @contextmanager
    def _own_loop(self) -> Iterator[pytest.MonkeyPatch]:
        """Give the engine a loop that the caller may break."""
        from verl.workers.rollout.vllm_rollout.engine_loop import EngineLoop

        rollout, engine = self.rollout, self.rollout._llm.llm_engine
        rollout._loop.stop()
        rollout._loop = EngineLoop(rollout._llm, None, rollout._offer_fault)
        with pytest.MonkeyPatch.context() as patch:
            yield patch
        rollout._loop.stop()
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        rollout._loop = EngineLoop(rollout._llm, None, rollout._offer_fault)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        engine = self.rollout._llm.llm_engine
        goes_on, step = threading.Event(), engine.step
        with self._own_loop() as patch:
            patch.setattr(engine, "step", lambda: goes_on.wait() and step())
            try:
                yield
            finally:
                goes_on.set()
            while self.rollout._loop.load[0]:
                time.sleep(0.001)

    @contextmanager
    def failing(self) -> Iterator[None]:
        def fail() -> None:
            raise RuntimeError(self.gone)

        with self._own_loop() as patch:
            patch.setattr(self.rollout._llm.llm_engine, "step", fail)
            yield


NEVER_S = 36_000.0  # longer than a test may take
HEARTBEAT_S = engine_server._LONGEST_PULSE_S + 1.0  # by then a server has asked its engine for a sign of life


class EngineProcesses:
    """What befalls the processes of an engine; ``place`` names them."""

    place: dict[str, Any]
    gone: str
    health: Any

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop all processes, since any of several data parallel engines may have the request."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.place["engine_pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Kill the processes of an engine while a heartbeat and a caller wait for their answer."""
        self._signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            health = pool.submit(asyncio.run, self.health(NEVER_S))
            time.sleep(HEARTBEAT_S)
            for pid in self.place["engine_pids"][-self.place["engine_workers"] :]:  # one of two groups would answer
                os.kill(pid, signal.SIGKILL)
            self._signal(signal.SIGCONT)
            with pytest.raises(ServerError, match=self.gone):  # of the death, and not of the silence
                health.result()
        yield


class HybridSGLang(EngineProcesses, HybridServer):
    """The actor of an engine, which a worker of the trainer speaks to."""

    gone = "rollout server sglang_server_0: its engine has died"
    tolerance = repeats_within = 1e-5  # rounding depends on the parts in which a prompt is computed

    def __init__(self, rollout: Any) -> None:
        super().__init__(rollout)
        self.place = rollout.place


class StandaloneServer(EngineProcesses):
    """The actor of a replica, with the trainer's side of its weights."""

    tolerance = repeats_within = 0.0  # of log-probabilities

    def __init__(self, engine: str, model: Any, folder: Path, by_memory: bool | None = None, **changes: Any) -> None:
        from verl.workers.rollout.replica import get_rollout_replica_class
        from verl.workers.sharding_manager.servers import ServerSync

        model.save_pretrained(folder)
        self.gone = f"rollout server {engine}_server_0_0: its engine has died"
        if engine == "sglang":
            self.tolerance = self.repeats_within = HybridSGLang.tolerance
        server = ServerConfig(heartbeat_timeout=NEVER_S)
        config = tiny.rollout_config(engine, mode="async", max_model_len=64, server=server, **changes)
        model_config = HFModelConfig(path=str(folder), load_tokenizer=False)
        if config.tensor_model_parallel_size > 1:
            self.tolerance = 1e-4  # fp32 rounding of two layers: halves of sums are rounded before they are added
        self.replica = get_rollout_replica_class(engine)(0, config, model_config)
        self.replica.init_standalone(waits_for_weights=True)
        try:
            self.place = self.replica.wait_until_ready()
        except BaseException:
            self.replica.shutdown()  # its name and its devices are free for other tests
            raise
        self.handle = self.replica.server_handle
        self.trainer = tiny.TrainerStandIn(model)
        self.sync = ServerSync(self.trainer, bucket_bytes=1 << 18, timeout_s=600, by_memory=by_memory)

    async def generate(self, ids: Sequence[int], params: dict[str, Any], request_id: str) -> TokenOutput:
        import ray

        ref = self.handle.generate.remote(ids, params, request_id)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def abort(self, request_id: str) -> bool:
        return await self.handle.abort.remote(request_id)

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        return await self.handle.health.remote(timeout_s)

    async def pause(self) -> None:
        await self.handle.pause.remote()

    async def resume(self) -> None:
        await self.handle.resume.remote()

    async def version(self) -> int:
        return await self.handle.version.remote()

    async def begin_update(self) -> None:
        await self.handle.begin_update.remote()

    async def abort_update(self) -> None:
        await self.handle.abort_update.remote()

    def load(self, model: Any, version: int) -> None:
        """Send weights as the trainer does; the server is paused before and afterwards."""
        import ray

        self.trainer.model, self.trainer.weights_version = model, version
        assert self.sync.run({self.replica.server_name: self.handle}, None) == {}
        ray.get(self.handle.pause.remote())

    def close(self) -> None:
        """End the actor."""
        self.replica.shutdown()
