"""Step a vLLM engine in a thread of the worker, for callers in any thread or event loop.

The thread owns the engine. Requests, aborts, pauses and calls arrive in an inbox and are handled between two steps.
Ranks that share an engine (tensor parallelism) have a scheduler each, and their steps must agree. So rank 0 of the
group, the leader, sends what it handles before a step to the others, which do the same.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.errors import ServerError
from verl.utils.device import get_torch_device
from verl.utils.failures import settle
from verl.workers.rollout.base import preserved_random_state
from verl.workers.rollout.vllm_rollout.media import Request

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm import LLM, RequestOutput, SamplingParams

T = TypeVar("T")

_POLL_S = 1.0
_GATHER_S = 0.002
_GATHER_AT_MOST_S = 0.2
"""How long an idle engine waits after a request for the next one, and for all requests of a burst."""


@dataclass(frozen=True)
class Ended:
    """The output of a request, and when the engine began with it, in monotonic seconds."""

    output: "RequestOutput"
    started: float


Deliver = Callable[[Ended | BaseException], None]
"""Takes the output of a request, or the error that ended it; called on the thread of the engine."""


class NotStartedError(Exception):
    """A request was aborted before it reached the engine."""


@dataclass
class _Add:
    """A request; ``key`` is unique among all requests of the engine, ``deliver`` is known to the leader only."""

    key: str
    request: Request
    params: "SamplingParams"
    deliver: Deliver | None = field(default=None, compare=False)


@dataclass
class _Abort:
    """The end of a request, whose caller gets the tokens so far."""

    key: str


@dataclass
class _Switch:
    """The start or the end of a pause of the engine."""

    paused: bool


@dataclass
class _Stop:
    """The end of the thread."""


@dataclass
class _Ask:
    """A question of the leader's process, which the thread answers between two steps."""

    answer: Callable[[], Any]


_Event = _Add | _Abort | _Switch | _Stop | _Ask


@dataclass
class _Open:
    """A request in the engine, the engine's own id of it, and when it left the engine's queue."""

    own_id: str
    key: str
    deliver: Deliver | None
    started: float | None = None


class _LastOutput:
    """Keeps the output that vLLM makes of an aborted request."""

    def __init__(self) -> None:
        self.output: Any = None

    def put(self, output: Any) -> None:
        self.output = output


class EngineLoop:
    """The thread that steps an engine.

    A paused engine does not step, and requests wait; then the thread that has paused it may use the engine. All ranks
    of the group pause and resume together.

    Args:
        group: process group of the ranks that share the engine; None for one rank.
        between: called on the thread after the first step of each burst of requests.
    """

    def __init__(
        self, llm: "LLM", group: "ProcessGroup | None" = None, between: Callable[[], None] = lambda: None
    ) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._group = group
        self._is_leader = group is None or torch.distributed.get_rank(group) == 0
        self._between = between
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._states = self._engine.output_processor.request_states
        self._open: dict[str, _Open] = {}  # open requests by the number that vLLM's outputs carry
        self._numbers: dict[str, str] = {}  # numbers of the open requests by their keys
        self._queued: list[_Open] = []  # requests in the engine that the engine might not have begun
        self._held: list[_Add] = []  # requests that came while the engine was paused
        self._paused = False
        # Whether the thread that has paused the engine owns it; other ranks may lag behind the leader.
        self._is_owned = False
        self._is_paused = threading.Event()
        self._may_resume = threading.Event()
        self._burst = ExitStack()
        self._in_burst = self._entered = False
        self._error: BaseException | None = None
        self._closing = threading.Lock()  # nothing may arrive between the last look into the inbox and the end
        self._is_closed = False
        self.steps = 0
        device = get_torch_device()
        index = device.current_device()
        self._thread = threading.Thread(target=self._run, args=(device, index), name="engine-loop", daemon=True)
        self._thread.start()

    # ---- for any thread of the leader

    def submit(self, key: str, request: Request, params: "SamplingParams", deliver: Deliver) -> None:
        """Add a request; ``deliver`` gets its output.

        Raises: ServerError if the engine is gone.
        """
        self._put(_Add(key, request, params, deliver))

    def abort(self, key: str) -> None:
        """End a request, if it has not ended."""
        self._inbox.put(_Abort(key))

    def ask(self, answer: Callable[[], Any]) -> None:
        """Call a function between two steps."""
        self._put(_Ask(answer))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function between two steps on the engine's thread, and return its result; must not be called there.

        Raises: what the function raises; ServerError if the engine is gone.
        """
        answer: Future[T] = Future()
        self.ask(partial(settle, answer, function))
        while True:
            try:
                return answer.result(_POLL_S)
            except TimeoutError:
                if answer.done():  # the function itself raised the error
                    raise
                self._check_alive()

    def deliver(self, output: "RequestOutput") -> None:
        """Deliver the output of a request that ended in a step of a function of ``call``."""
        self._deliver(output.request_id, output)

    @property
    def load(self) -> tuple[int, int]:
        """The number of requests in the engine, and the number that wait for a paused engine."""
        return len(self._open), len(self._held)

    # ---- for one thread of every rank

    def pause(self) -> None:
        """Stop after the present step; the engine then belongs to the caller. No effect on a paused engine.

        Raises: ServerError if the engine is gone.
        """
        if self._is_owned:
            return
        if self._is_leader:
            self._inbox.put(_Switch(paused=True))
        while not self._is_paused.wait(_POLL_S):
            self._check_alive()
        self._is_owned = True

    @property
    def is_paused(self) -> bool:
        """Whether the engine belongs to the thread that has paused it."""
        return self._is_owned

    def resume(self) -> None:
        """Give the engine back to its thread."""
        if not self._is_owned:
            return
        self._is_owned = False
        self._is_paused.clear()
        self._may_resume.set()
        if self._is_leader:
            self._inbox.put(_Switch(paused=False))

    def stop(self) -> None:
        """End the thread on all ranks; callers that still wait get an error."""
        self._may_resume.set()
        if self._is_leader:
            self._inbox.put(_Stop())
        self._thread.join()

    def _put(self, event: _Event) -> None:
        """Hand an event to the thread, unless the thread has ended."""
        with self._closing:
            self._check_alive()
            self._inbox.put(event)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise ServerError(f"the rollout engine has failed: {self._error!r}") from self._error
        if self._is_closed:
            raise ServerError("the rollout engine has been stopped")

    # ---- the thread

    def _run(self, device: Any, index: Any) -> None:
        try:
            device.set_device(index)
            while self._turn():
                pass
            self._fail(ServerError("the rollout engine has been stopped"))
        except BaseException as error:  # nobody may wait for ever
            failed = ServerError(f"the rollout engine has failed: {error!r}")
            failed.__cause__ = error
            self._fail(failed, error)
        finally:
            self._end_burst()

    def _turn(self) -> bool:
        """Handle the messages in the inbox, and step if there is work; return whether the thread goes on."""
        events, steps = self._arrived()
        for event in events:
            if isinstance(event, _Stop):
                return False
            self._handle(event)
        if steps:
            self._step()
        elif not self._open:
            self._end_burst()
        return True

    def _arrived(self) -> tuple[Sequence[_Event], bool]:
        """Return the next events, and whether a step follows; the same on all ranks."""
        if not self._is_leader:
            box: list[Any] = [None]
            torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
            return box[0]
        events, paused = self._in_order(self._received())
        steps = not paused and (bool(self._open) or any(isinstance(event, _Add) for event in events))
        shared = [event for event in events if not isinstance(event, _Ask)]
        if self._group is not None and (shared or steps):
            plain = [_Add(e.key, e.request, e.params) if isinstance(e, _Add) else e for e in shared]
            torch.distributed.broadcast_object_list([(plain, steps)], group=self._group, group_src=0)
        return events, steps

    def _received(self) -> list[_Event]:
        """Return the messages in the inbox; an idle engine waits for a message, and for requests right after it.

        A batch arrives request by request, and a step with only the first of them would hold up all the others.
        """
        events: list[_Event] = []
        if self._paused or not self._open:
            events.append(self._inbox.get())
            until = time.monotonic() + _GATHER_AT_MOST_S
            while isinstance(events[-1], _Add) and not self._paused and time.monotonic() < until:
                try:
                    events.append(self._inbox.get(timeout=_GATHER_S))
                except queue.Empty:
                    break
        while True:
            try:
                events.append(self._inbox.get_nowait())
            except queue.Empty:
                return events

    def _in_order(self, events: Sequence[_Event]) -> tuple[list[_Event], bool]:
        """Hold back requests while the engine is paused; return the events to handle, and whether it is paused then."""
        paused = self._paused
        ready: list[_Event] = []
        for event in events:
            if isinstance(event, _Switch):
                paused = event.paused
                ready.append(event)
                if not paused:
                    ready += self._held
                    self._held = []
            elif paused and isinstance(event, _Add):
                self._held.append(event)
            elif isinstance(event, _Abort) and self._give_up(event.key):
                continue
            else:
                ready.append(event)
        return ready, paused

    def _give_up(self, key: str) -> bool:
        """Drop a request that has not reached the engine; return whether there is one."""
        for held in self._held:
            if held.key == key:
                self._held.remove(held)
                if held.deliver is not None:
                    held.deliver(NotStartedError())
                return True
        return False

    def _handle(self, event: _Event) -> None:
        if isinstance(event, _Add):
            self._add(event)
        elif isinstance(event, _Abort):
            self._abort(event.key)
        elif isinstance(event, _Switch):
            self._switch(event.paused)
        elif isinstance(event, _Ask):
            event.answer()

    def _add(self, event: _Add) -> None:
        self._begin_burst()
        try:
            request: Any = event.request
            (own_id,) = self._llm.enqueue([request], [event.params], use_tqdm=False)
        except Exception as error:  # a bad request costs its caller, on all ranks alike
            if event.deliver is not None:
                event.deliver(error)
            return
        number = self._states[own_id].external_req_id
        self._open[number] = _Open(own_id, event.key, event.deliver)
        if self._is_leader:
            self._queued.append(self._open[number])
        self._numbers[event.key] = number

    def _abort(self, key: str) -> None:
        number = self._numbers.get(key)
        if number is None:  # the request has ended in the meantime
            return
        last = _LastOutput()
        own_id = self._open[number].own_id
        self._states[own_id].queue = last  # type: ignore[assignment]  # vLLM gives it the tokens so far
        self._engine.abort_request([own_id], internal=True)
        self._deliver(number, last.output)

    def _switch(self, paused: bool) -> None:
        if paused and not self._paused:
            self._end_burst()
            self._paused = True
            self._is_paused.set()
        elif not paused and self._paused:
            self._may_resume.wait()  # the other ranks may be ahead of this process
            self._may_resume.clear()
            self._paused = False

    def _step(self) -> None:
        began = time.monotonic()
        outputs = self._engine.step()
        self.steps += 1
        if self._queued and self._is_leader:
            self._note_starts(began)
        if not self._entered:
            self._between()
            self._entered = True
        for output in outputs:
            if output.finished:
                self._deliver(output.request_id, output)

    def _note_starts(self, began: float) -> None:
        """Note which requests the last step has taken out of the engine's queue."""
        core: Any = self._engine.engine_core
        waiting = {request.request_id for request in core.engine_core.scheduler.waiting}
        for each in self._queued:
            if each.own_id not in waiting:
                each.started = began
        self._queued = [each for each in self._queued if each.started is None]

    def _deliver(self, number: str, output: Any) -> None:
        ended = self._open.pop(number)
        del self._numbers[ended.key]
        if ended.deliver is not None:
            ended.deliver(Ended(output, time.monotonic() if ended.started is None else ended.started))

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """Take nothing more, and give every caller that waits an error."""
        with self._closing:
            self._error = cause
            self._is_closed = True
        waiting = [ended.deliver for ended in self._open.values()]
        waiting += [event.deliver for event in self._held]
        while not self._inbox.empty():
            event = self._inbox.get()
            if isinstance(event, _Add):
                waiting.append(event.deliver)
        for deliver in waiting:
            if deliver is not None:
                deliver(error)

    # A burst of requests leaves the random state of the process as it was, as ``generate_sequences`` does.

    def _begin_burst(self) -> None:
        if not self._in_burst:
            self._burst.enter_context(preserved_random_state())
            self._in_burst = True
            self._entered = False

    def _end_burst(self) -> None:
        self._burst.close()
        self._in_burst = False
