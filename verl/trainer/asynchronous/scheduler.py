"""Groups of responses on their way from the data to an update: sent, finished, and taken in the order of the pace."""

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from verl.experimental.agent_loop.held import KeptTokens
from verl.experimental.agent_loop.manager import PendingGeneration, joined_answers
from verl.protocol import DataProto
from verl.trainer.asynchronous.pacing import Pace, Waiting
from verl.utils.json_types import Json
from verl.utils.observe.timeline import Part, Span

_LOOK_S = 2.0
"""Seconds between two looks at the servers while an update waits for groups."""


@dataclass
class Group:
    """The responses to one prompt, from its draw to its update.

    Attributes:
        number: place of the prompt in the data order of the run, from 0.
        prepared: the row as it was drawn.
        row: the same without the columns that the rollout reads.
        prompt: those columns.
        requests: those columns, a row for each response.
        seeds: the sampling seed of each response.
        version: version of the weights that the servers had when it was sent; once it has finished, the oldest version
            that sampled one of its tokens.
        planned: number of these weights in the engine, as records count it; that of the oldest if it was sent again.
        spans: the oldest and the newest version that sampled a token of each response.
        pending: the call of an agent loop worker for each response that is under way, by its place in the group.
        responses: those that are there while others are under way, by their place in the group.
        kept: tokens of missing responses, by their place, which an earlier run has sampled.
        sent_at: when it was sent, in monotonic seconds.
        output: the responses, once all of them are there.
        recorded: spans of its agent loops, if they were asked to record them.
    """

    number: int
    prepared: DataProto
    row: DataProto
    prompt: DataProto
    requests: DataProto
    seeds: torch.Tensor
    version: int = 0
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    pending: dict[int, PendingGeneration] = field(default_factory=dict)
    responses: dict[int, DataProto] = field(default_factory=dict)
    kept: dict[int, KeptTokens] = field(default_factory=dict)
    planned: int | None = None
    sent_at: float = 0.0
    output: DataProto | None = None
    recorded: list[Part] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """The places of the responses that are not there."""
        return [place for place in range(len(self.requests)) if place not in self.responses]

    @property
    def uid(self) -> str:
        """The id of the prompt."""
        return str(self.prepared.non_tensor_batch["uid"][0])

    def plan(self, number: int) -> None:
        """Note that weights with a number are to sample some of its responses."""
        self.planned = number if self.planned is None else min(number, self.planned)

    def joined(self) -> DataProto:
        """Return the responses, all of which are there, as one output."""
        return joined_answers([self.responses[place].select() for place in range(len(self.requests))])

    def complete(self, output: DataProto) -> None:
        """Take the joined responses as the output of a group that can be trained."""
        self.version = min(oldest for oldest, _ in self.spans.values())
        self.output = output
        self.responses = {}  # another thread may write the old ones to a checkpoint


Send = Callable[[Group], "dict[int, Future[DataProto]]"]
"""Sends the requests of the missing responses of a group; a future ends when the response of its place is there."""
Receive = Callable[[Group, int], bool | None]
"""Takes the response of a place; returns whether its group can be trained, None while others are under way.

Raises: what has ended it.
"""

Drop = Callable[[Group], None]
"""Notes that a group is dropped, because it is too old."""


@dataclass
class Scheduler:
    """Sends groups as far as the servers have room, and hands the finished ones out to updates.

    A thread sends and receives; drawing, choosing and publishing belong to the thread of the trainer. What ends a group
    or the thread is raised by the next ``take`` or ``drain``, so that a running update is not disturbed.

    Attributes:
        pace: how many groups may be outstanding, and which ones an update takes.
        send, receive, drop: see their types; the thread calls the first two.
        most_in_flight: groups that the servers get at once; others wait for one of these.
        limit_s: seconds that an update may wait without a group that ends.
    """

    pace: Pace
    send: Send
    receive: Receive
    drop: Drop
    most_in_flight: int
    limit_s: float = float("inf")
    version: int = 0
    next_update: int = 0
    _backlog: "deque[Group]" = field(default_factory=deque)
    _in_flight: dict[int, Group] = field(default_factory=dict)
    _finished: dict[int, Group] = field(default_factory=dict)
    _events: "queue.SimpleQueue[tuple[Group, int, Future[DataProto]] | None]" = field(default_factory=queue.SimpleQueue)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: list[Span] = field(default_factory=list)
    _failed_count: int = 0
    _is_held: bool = False
    _last_change: float = 0.0
    _last_look: float = 0.0
    _failed: tuple[Group, int] | None = None
    _error: BaseException | None = None
    _thread: threading.Thread | None = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more; responses under way are given up."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()
            self._thread = None

    # ---- the trainer's side

    @property
    def outstanding(self) -> list[Group]:
        """The groups that are drawn and in no update yet, in the order of the data."""
        with self._changed:
            groups = [*self._backlog, *self._in_flight.values(), *self._finished.values()]
        return sorted(groups, key=lambda group: group.number)

    def room(self) -> int:
        """Return how many groups may be drawn now.

        In the order of the data, the place of a group that failed stays empty until the next publication, unless the
        next update lacks groups. Which version samples a group thus does not depend on when another one fails.
        """
        with self._changed:
            count = len(self._backlog) + len(self._in_flight) + len(self._finished)
            if not self.pace.in_order:
                return self.pace.room(self.version, self.next_update, count)
            room = self.pace.room(self.version, self.next_update, count + self._failed_count)
            return max(room, self.pace.groups - count)

    def leave_out(self) -> None:
        """Note that a group is not sent because it failed before."""
        with self._changed:
            self._failed_count += 1

    def add(self, groups: Sequence[Group]) -> None:
        """Send these groups, or keep those that have their responses already."""
        if self._thread is None:
            self._start()
        with self._changed:
            for group in groups:
                if group.output is None:
                    self._backlog.append(group)
                else:
                    self._finished[group.number] = group
            self._send_what_fits()

    def take(self, look: Callable[[], None]) -> list[Group]:
        """Wait for the groups of the next update, and return them in the order of the data.

        Args: ``look`` is called every few seconds of the wait.
        Raises: what ended a group or the thread; TimeoutError when no group has ended for ``limit_s``.
        """
        self._last_change = time.monotonic()
        while True:
            with self._changed:
                self._check()
                is_dropped = self.pace.drops and self._drop_too_old()
                chosen = self._choose()
                if chosen is None and not (self._in_flight or self._backlog):
                    self._drop_late()
                if chosen is not None:
                    self.next_update += 1
                    return [self._finished.pop(number) for number in sorted(chosen)]
            if is_dropped:
                look()  # which sends others instead
            self._wait(look)

    def _drop_too_old(self) -> bool:
        """Drop the groups that the next update may not train; return whether there are any."""
        too_old = [group for group in self._finished.values() if self.pace.is_late(group.version, self.next_update)]
        for group in too_old:
            self.drop(self._finished.pop(group.number))
        return bool(too_old)

    def _drop_late(self) -> None:
        """Drop the groups that no update can train in time, which a resume with a lower limit may leave."""
        finished = list(self._finished.values())
        for place in self.pace.late([group.version for group in finished], self.next_update):
            self.drop(self._finished.pop(finished[place].number))

    def pick(self, numbers: Sequence[int]) -> list[Group]:
        """Return these finished groups as those of the next update.

        Raises: KeyError for one that has not finished.
        """
        with self._changed:
            groups = [self._finished.pop(number) for number in numbers]
            self.next_update += 1
        return groups

    def published(self, version: int) -> None:
        """Note that the servers have a version, and send on."""
        with self._changed:
            self.version = version
            self._failed_count = 0
            self._is_held = False
            self._send_what_fits()

    def hold(self) -> None:
        """Send nothing until ``published``."""
        with self._changed:
            self._is_held = True

    def drain(self, look: Callable[[], None]) -> None:
        """Send nothing until ``published``, and wait until the servers have finished what they have."""
        self.hold()
        with self._changed:
            self._last_change = time.monotonic()
        while True:
            with self._changed:
                self._check()
                if not self._in_flight:
                    return
            self._wait(look)

    def _wait(self, look: Callable[[], None]) -> None:
        """Wait for a change, and look at the servers every few seconds, however many changes come.

        Raises: TimeoutError when no group has ended for ``limit_s``.
        """
        with self._changed:
            self._changed.wait(_LOOK_S)
            now = time.monotonic()
            waited_s = now - self._last_change
            numbers = sorted(self._in_flight)
        if now - self._last_look < _LOOK_S:
            return
        if waited_s > self.limit_s:
            raise TimeoutError(
                f"update {self.next_update} waits for responses, and none has come for {waited_s:.0f} s, more than "
                f"trainer.worker_call_timeout_s={self.limit_s:g}: the servers have the prompts {numbers} of the data. "
                "Raise the limit, or set rollout.agent.trajectory_timeout_s"
            )
        look()
        self._last_look = time.monotonic()

    def _check(self) -> None:
        """Raise what has ended a group or the thread."""
        if self._error is not None:
            raise self._error
        if self._failed is not None:
            self.receive(*self._failed)  # which raises it with the names of the actors
            raise RuntimeError(f"the responses to prompt {self._failed[0].number} of the data were lost")

    def _choose(self) -> list[int] | None:
        finished = list(self._finished.values())
        waiting = [Waiting(order, group.version, group.number) for order, group in enumerate(finished)]
        unfinished = [group.version for group in self._in_flight.values()]
        unfinished += [self.version] * len(self._backlog)
        first = min((group.number for group in [*self._in_flight.values(), *self._backlog]), default=None)
        chosen = self.pace.choose(self.next_update, waiting, unfinished, first)
        return None if chosen is None else [finished[each.order].number for each in chosen]

    def take_spans(self) -> list[Span]:
        """Return when each group was under way: those that have finished since the last call, and those in flight."""
        with self._changed:
            spans = [*self._ended, *(_span_of(group) for group in self._in_flight.values())]
            self._ended = []
        return spans

    # ---- the thread

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                if not self._take_in(*event):
                    return
        except Exception as error:  # whatever it is, the thread of the trainer raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take_in(self, group: Group, place: int, answer: "Future[DataProto]") -> bool:
        """Take the answer to a request of a group; return whether there was one."""
        is_trained = None if answer.exception() is not None else self.receive(group, place)
        with self._changed:
            self._last_change = time.monotonic()
            if answer.exception() is not None:
                self._failed = group, place
            elif is_trained is not None:
                del self._in_flight[group.number]
                self._ended.append(_span_of(group))
                if is_trained:
                    self._finished[group.number] = group
                else:
                    self._failed_count += 1
                self._send_what_fits()
            self._changed.notify_all()
        return self._failed is None

    def _send_what_fits(self) -> None:
        while self._backlog and len(self._in_flight) < self.most_in_flight and not self._is_held:
            group = self._backlog.popleft()
            group.version = min([self.version, *(oldest for oldest, _ in group.spans.values())])
            group.sent_at = time.monotonic()
            self._in_flight[group.number] = group
            for place, answer in self.send(group).items():
                answer.add_done_callback(functools.partial(self._ended_with, group, place))

    def _ended_with(self, group: Group, place: int, answer: "Future[DataProto]") -> None:
        self._events.put((group, place, answer))


def _span_of(group: Group) -> Span:
    """Return the span of a group from its sending until now."""
    facts: dict[str, Json] = {"number": group.number, "version": group.version, "responses": len(group.requests)}
    return Span("group", group.sent_at, time.monotonic(), "group", str(group.number), None, facts)
