"""SGLang's engine, as the server that owns it sees it."""

import asyncio
import atexit
import contextlib
import ctypes
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any

from verl.utils.json_types import Json
from verl.workers.config.model import read_config_json
from verl.workers.rollout.sglang_rollout import engine_process, patch
from verl.workers.rollout.sglang_rollout.importing import import_sglang
from verl.workers.rollout.sglang_rollout.leftovers import SocketFolder, unlink_shared_memory
from verl.workers.rollout.sglang_rollout.requests import GRAMMARS
from verl.workers.rollout.weight_channel import Layout, Meeting, Received

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
    from sglang.srt.server_args import PortArgs, ServerArgs

logger = logging.getLogger(__name__)

_LOG_LINES = 30
"""How many lines of the engine's log the message about its death has."""
_END_S = 10.0


class StoppedError(RuntimeError):
    """An engine was asked for something after its end."""


class SGLangEngine:
    """SGLang's engine in separate processes; see ``ServedEngine``.

    All its coroutines run on one event loop. It has no deadlines: the server has them. SGLang ends the process that
    owns an engine when one of the engine's processes fails; this class leaves that to the server, which asks for
    ``death``.

    Args:
        args: those of SGLang's ``ServerArgs``.
        batch_invariant: whether no log-probability may depend on the other requests of a step.
    Raises: RuntimeError with the engine's log if it does not start.
    """

    def __init__(self, args: dict[str, Any], batch_invariant: bool = False) -> None:
        import_sglang()
        self._log = _Log()
        self._sockets = SocketFolder()
        before = set(multiprocessing.active_children())
        self._processes: list[BaseProcess] = []
        self._descendants: dict[int, int] = {}  # by file descriptor: what a process of the engine has started
        self._failure: str | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_stopped = False
        atexit.register(self.stop)
        _ignore_quit()
        try:
            with _kept_logging(), patch.sockets_in(self._sockets.path, self._sockets.opened):
                self._engine: Engine = _engine_class(self._log.path, batch_invariant, self._sockets)(
                    custom_sigquit_handler=_nothing, **args
                )
        except Exception as error:  # SGLang raises errors of any class
            named = read_config_json(args["model_path"]).get("architectures")
            families = ", ".join(map(str, named)) if isinstance(named, list) and named else "a model"
            why = f"SGLang's engine has not started with {families}: {error}{self._log.tail()}"
            self._processes = [each for each in multiprocessing.active_children() if each not in before]
            self.stop()
            raise RuntimeError(why) from error
        # SGLang's shutdown ends all children of this process, whoever started them.
        atexit.unregister(self._engine.shutdown)
        self._processes = [each for each in multiprocessing.active_children() if each not in before]
        self._manager: Any = self._engine.tokenizer_manager
        patch.take_encoded_media(self._manager)
        # With data parallelism another process reads the counters that distribute requests.
        has_readers = self._engine.server_args.dp_size > 1
        unlink_shared_memory(self.pids, None if has_readers else self._engine.port_args.instance_id)
        watchdog = self._manager._subprocess_watchdog
        watchdog.stop()  # the watchdog ends this process when a process of the engine is gone
        self._names = {process.pid: name for process, name in zip(watchdog._processes, watchdog._names, strict=True)}
        self._manager._subprocess_watchdog = None
        # Schedulers that SGLang's data-parallel controller has started.
        for pid in set(self.pids) - {process.pid for process in self._processes}:
            self._descendants[os.pidfd_open(pid)] = pid
            self._names[pid] = "scheduler"
        self.context_length: int = self._manager.context_len
        self.vocab_size: int = self._manager.model_config.vocab_size
        server = self._engine.server_args
        if why_not := patch.without_seeds(server.sampling_backend):
            logger.warning(why_not)
        replicas = 1 if server.enable_dp_attention else server.dp_size  # else they share the tensor-parallel ranks
        self.workers: int = server.tp_size * server.pp_size * replicas
        self._keys: dict[str, str] = {}  # SGLang's id of each request
        self._constrained: set[str] = set()  # requests with a grammar
        self._is_paused = False
        self._is_usable = server.load_format != "dummy"
        self._released: set[str] = set()

    # ---- life

    @property
    def pids(self) -> list[int]:
        """The processes of the engine: its schedulers, and with a tokenizer a detokenizer."""
        return list(self._engine.get_all_child_pids())

    def death(self) -> str | None:
        """Return why the engine is gone, with the end of its log; None while it lives."""
        if self._is_stopped:
            return "its engine has been stopped"
        if self._failure is not None:
            return f"its engine has failed: {self._failure}{self._log.tail()}"
        sentinels = [process.sentinel for process in self._processes]
        gone = multiprocessing.connection.wait([*sentinels, *self._descendants], timeout=0)
        for process in self._processes:
            if process.sentinel in gone:
                name = self._names.get(process.pid, process.name)
                return f"its engine has died: process {name} {_ending(process.exitcode)}{self._log.tail()}"
        for descendant, pid in self._descendants.items():
            if descendant in gone:
                return f"its engine has died: process {self._names[pid]} {_ending(None)}{self._log.tail()}"
        return None

    def stop(self) -> None:
        """End the engine's own processes."""
        self._is_stopped = True
        if self._reader is not None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                self._reader.cancel()
        atexit.unregister(self.stop)
        for process in self._processes:
            with contextlib.suppress(ValueError, ProcessLookupError):
                process.kill()
        for process in self._processes:
            with contextlib.suppress(ValueError):
                process.join(_END_S)
        while self._descendants:
            descendant, _ = self._descendants.popitem()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descendant, signal.SIGKILL)
            multiprocessing.connection.wait([descendant], _END_S)
            os.close(descendant)
        # An engine that has not started may leave shared memory.
        unlink_shared_memory([each.pid for each in self._processes if each.pid], None)
        self._sockets.close()
        self._log.close()

    async def ping(self) -> None:
        """Wait for an answer of the schedulers."""
        await self._call("ping")

    async def _call(self, verb: str, **arguments: Json | Meeting) -> list[Received | None]:
        """Call a verb of ``WeightReceiver`` on all schedulers; return a result for each data-parallel group.

        Raises: RuntimeError with the messages of those that failed.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self._listen()
        action = patch.CALL + json.dumps({"verb": verb, "arguments": arguments})
        answers = await self._manager.check_weights_communicator(CheckWeightsReqInput(action=action))
        failures = dict.fromkeys(answer.message for answer in answers if not answer.success)
        if failures:
            raise RuntimeError("; ".join(failures))
        return [json.loads(answer.message) for answer in answers]

    def _listen(self) -> None:
        """Start to read the messages of the engine's processes; SGLang's own reader ends this process if that fails.

        Raises: StoppedError.
        """
        if self._is_stopped:
            raise StoppedError("the engine has been stopped")
        if self._reader is None:
            loop = asyncio.get_running_loop()
            self._manager.event_loop = loop
            self._reader = loop.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self._manager.handle_loop()
        except Exception as error:  # whatever it is, no request gets an answer from now on
            self._failure = repr(error)

    # ---- requests

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        rid: str,
        *,
        return_logprob: bool,
        media: "MultimodalProcessorOutput | None" = None,
    ) -> dict[str, Any]:
        """Return SGLang's result: ``output_ids`` and ``meta_info``.

        Args: ``media`` are the images and videos of ``input_ids``, which have all of their tokens.
        Raises: ValueError for a request that SGLang refuses; RuntimeError without usable weights.
        """
        self._check_usable()
        self._listen()
        key = uuid.uuid4().hex  # SGLang aborts all requests whose id begins with the one that it is told
        self._keys[rid] = key
        if any(sampling_params.get(name) for name in GRAMMARS):
            self._constrained.add(rid)
        try:
            result = await self._engine.async_generate(
                input_ids=input_ids,
                sampling_params=sampling_params,
                image_data=None if media is None else [media],
                return_logprob=return_logprob,
                rid=key,
            )
        finally:
            del self._keys[rid]
            self._constrained.discard(rid)
        return dict(result)

    async def abort(self, rid: str) -> bool:
        """End a request, which then returns its tokens so far; return whether the engine knows it."""
        key = self._keys.get(rid)
        state = self._manager.rid_to_state.get(key)
        if key is None or state is None or self._is_stopped:
            return False
        self._manager.abort_request(key)
        return True

    async def pause(self) -> None:
        """Stop between two steps; the keys and values of unfinished requests are computed again after ``resume``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if not self._is_paused:
            self._listen()
            self._is_paused = True
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        await self.ping()  # schedulers answer in order, so the pause has taken effect then

    async def resume(self) -> None:
        """Go on.

        Raises: RuntimeError without usable weights.
        """
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._check_usable()
        self._listen()
        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._is_paused = False

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise RuntimeError("the engine holds no usable weights: none have been loaded, or the last update failed")
        if self._released:
            raise RuntimeError(f"the engine has released the memory of {sorted(self._released)}: resume it first")

    # ---- memory

    async def release(self, tags: list[str]) -> None:
        """Pause, and free the memory of ``weights``, whose values are lost, or ``kv_cache``.

        An engine without ``enable_memory_saver``, as on a CPU, keeps its memory.

        Raises: RuntimeError while a request has a grammar: a scheduler that compiles one would die.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        new = sorted(set(tags) - self._released)
        if not new or not self._engine.server_args.enable_memory_saver:
            return
        if self._constrained:
            raise RuntimeError(
                f"memory cannot be released while {len(self._constrained)} requests with {', '.join(GRAMMARS[:-1])} or "
                f"{GRAMMARS[-1]} are under way: wait until they have ended"
            )
        await self.pause()  # a scheduler that runs requests would die
        self._released.update(new)
        if "weights" in new:
            self._is_usable = False
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=new))

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocate memory that has been released again; weights need an update afterwards."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        due = sorted(set(tags) & self._released)  # a scheduler dies of other tags
        if due:
            self._listen()
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=due))
            self._released.difference_update(due)

    # ---- weights

    async def set_version(self, version: int) -> None:
        """Set the version of the weights that the engine has loaded by itself."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        self._listen()
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )

    async def connect(self, meeting: Meeting) -> None:
        """Let the schedulers join the process group that broadcasts weights."""
        await self._call("connect", meeting=meeting)

    async def begin_update(self) -> None:
        """Pause, and open the model for new weights; the engine generates nothing until the update is finished."""
        self._is_usable = False
        await self.pause()
        await self._call("begin")

    async def load(self, layout: Layout, path: str | None) -> None:
        """Load a bucket from shared memory, or from the group.

        Raises: RuntimeError naming a tensor that the model lacks, or that arrived twice.
        """
        await self._call("load", layout=layout, path=path)

    async def load_handles(self, payloads: list[str]) -> None:
        """Load a bucket from the memory of GPUs: one payload of ``weights.serialized`` per tensor-parallel rank."""
        await self._call("load_handles", payloads=payloads)

    async def finish_update(self, version: int) -> Received:
        """Complete the update, read the weights back, and drop cached results of older ones; it stays paused.

        Returns the ``checksums`` of the tensors that arrived, and how many of them are ``unverified``.
        Raises: RuntimeError naming tensors that are missing or differ.
        """
        received = engine_process.merged(await self._call("finish"))
        assert received is not None
        unlike = [name for name, checksum in received["checksums"].items() if checksum is None]
        if unlike:
            raise RuntimeError(f"the schedulers of the engine got different weights, for instance {unlike[0]}")
        await self.set_version(version)
        self._is_usable = True
        return received

    async def abort_update(self) -> None:
        """End a failed update; the engine then needs a complete update."""
        self._is_usable = False
        await self._call("abort")


def _engine_class(log: str, batch_invariant: bool, sockets: SocketFolder) -> type["Engine"]:
    """Return SGLang's engine class with verl's functions for its processes; it records its id before they start."""
    from sglang.srt.entrypoints.engine import Engine

    class OurEngine(Engine):
        run_scheduler_process_func = staticmethod(partial(engine_process.run_scheduler, log, batch_invariant))
        run_detokenizer_process_func = staticmethod(partial(engine_process.run_detokenizer, log))

        @classmethod
        def _launch_scheduler_processes(
            cls, server_args: "ServerArgs", port_args: "PortArgs", *args: Any, **kwargs: Any
        ) -> "tuple[SchedulerInitResult, list[BaseProcess] | None]":
            sockets.note(port_args.instance_id)
            return super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)

        @classmethod
        def _launch_detokenizer_subprocesses(
            cls, server_args: "ServerArgs", **kwargs: Any
        ) -> tuple[list[BaseProcess], list[str]]:
            if server_args.skip_tokenizer_init:  # the detokenizer would have no work, and its imports take seconds
                return [], []
            return super()._launch_detokenizer_subprocesses(server_args=server_args, **kwargs)

    return OurEngine


class _Log:
    """The standard error of the engine's processes: it is passed on, and its last lines are kept."""

    def __init__(self) -> None:
        self._source, self._sink = os.pipe()
        self.path = f"/proc/{os.getpid()}/fd/{self._sink}"
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._reader = threading.Thread(target=self._read, name="sglang-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with open(self._source, "rb") as source:
            for line in source:
                self._lines.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError):  # nobody might read the standard error of this process
                    os.write(2, line)

    def tail(self) -> str:
        """Return the last lines of the log after a heading."""
        lines = [line for line in list(self._lines) if line]
        return "\n".join(["; the end of its log:", *lines]) if lines else ""

    def close(self) -> None:
        """Stop reading once all processes that write are gone."""
        if self._sink >= 0:
            os.close(self._sink)
            self._sink = -1


def _ending(code: int | None) -> str:
    if code is None:  # other code has waited for the process
        return "has ended"
    if code >= 0:
        return f"has ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def _ignore_quit() -> None:
    """Ignore SIGQUIT, by which a process of the engine that fails would end this one.

    Python sets handlers in the main thread only, and SGLang sets its own there; it takes ``custom_sigquit_handler``.
    In other threads the handler is a C function that does nothing. ``SIG_IGN`` would be inherited by the engine's
    processes: with data parallelism the one that distributes requests has to end when a scheduler fails.
    """
    if threading.current_thread() is not threading.main_thread():
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGQUIT, ctypes.cast(libc.abs, ctypes.c_void_p))


@contextlib.contextmanager
def _kept_logging() -> Iterator[None]:
    """Keep this process's logging, which SGLang replaces."""
    about_quit = logging.getLogger("sglang.srt.entrypoints.engine")
    about_quit.addFilter(lambda record: "custom SIGQUIT handler" not in str(record.msg))
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
