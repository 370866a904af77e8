"""The training loop with generation that goes on while it trains."""

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import torch

from verl.errors import WrongInput
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.attempts import REPLACED
from verl.experimental.agent_loop.held import KEPT_COLUMN, KeptTokens
from verl.experimental.agent_loop.manager import joined_answers
from verl.protocol import DataProto, tensors_of
from verl.single_controller.base.actor import Actor
from verl.single_controller.base.driver_phase import phase
from verl.trainer.asynchronous.history import check_samples
from verl.trainer.asynchronous.kept import FILE_NAME, Progress, load_groups, save_groups
from verl.trainer.asynchronous.metrics import group_metrics, overlap
from verl.trainer.asynchronous.pacing import Pace
from verl.trainer.asynchronous.record import SEGMENT, RunRecord
from verl.trainer.asynchronous.scheduler import Group, Scheduler
from verl.trainer.config.async_training import DROP, ONE_STEP_OFF, AsyncTrainingConfig
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.loaders import EndOfDataError, Rows
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.rollouts import Sampled
from verl.trainer.ppo.state import Metrics, Timing
from verl.utils.dataset.factory import has_state
from verl.utils.failures import on_failure
from verl.utils.numerics.seeding import seed_process
from verl.utils.observe.timeline import RECORDED, Clock, Part
from verl.utils.profiler import marked_timer
from verl.utils.py_functional import object_array
from verl.workers.rewards.scoring import FAILURE_COLUMN
from verl.workers.rollout.base import DROPPED_COLUMN

_REQUESTS_PER_SERVER = 16
"""Groups that a server gets at once."""
_MOST_FAILED = 8
"""Groups that may fail one after the other, as a multiple of those of an update."""


class AsyncTrainer(RayPPOTrainer):
    """PPO whose servers generate group after group, while the trainer trains on those that have finished.

    A step is one update. Before it, the weights are published if that is due, and prompts are drawn as far as the pace
    allows. Prompts have their uids and seeds by their place in the data, so these do not depend on when they are drawn;
    they are those of the step in which the main trainer would train them.

    With ``async_training.mode=colocate_async`` servers and trainer take turns on the same devices: once an update has
    its groups, the other responses are interrupted, and go on under the new weights after the update.

    A checkpoint holds the groups that are drawn and not trained: the finished ones with their responses, the others to
    be sampled anew, with the same seeds, but for the responses that are there. If updates take the groups in the order
    of the data, the checkpoint waits for those in flight, so that a resumed run has the responses of one that was not
    stopped.
    """

    _may_end_before = ()  # a checkpoint of the last step would need the groups of this one
    _scores_while_generating = False  # the devices of a reward model may train or score the batch before
    _taken: Sequence[Group] = ()
    _end_of_data: EndOfDataError | None = None
    _undrawn: DataPosition | None = None
    """The place in the data after the last draw in their order: a longer run draws the next one there.

    It draws by what a sampler knew then, as a run does that draws a batch ahead.
    """
    _failed_in_a_row = 0
    _published = 0
    """The engine's version of the weights that the servers have."""
    _moved = 0
    """What the engine's version in this process lacks to that in the first process of the run, which records have."""

    @property
    def _options(self) -> AsyncTrainingConfig:
        return self.run_config.async_training.decided

    # ---- the parts of a run

    def fit(self) -> None:
        """Train until the last step."""
        try:
            super().fit()
        finally:
            if "scheduler" in self.__dict__:  # an error may have come before
                self.scheduler.stop()
            if "record" in self.__dict__:
                self.record.close()

    def _start_agent_loops(self) -> None:
        """Start the servers and the actors that run agent loops, which a replay does not need."""
        if self._options.replay is None:
            super()._start_agent_loops()
        self.async_rollout_mode = True

    @functools.cached_property
    def record(self) -> RunRecord:
        """The ledger of the run."""
        trusted = self.run_config.trainer.trusted_classes
        replay = self._options.replay
        if replay is not None:
            return RunRecord.of_replay(Path(replay), trusted)
        if self.run_config.trainer.val_only:
            return RunRecord.of_validation()
        return RunRecord.of_run(self.checkpoints.root, trusted, self.run_config.trainer.resume_mode == "disable")

    @functools.cached_property
    def pace(self) -> Pace:
        """How far generation runs ahead."""
        options = self._options
        return Pace(
            self.run_config.prompts_per_step,
            options.trigger_parameter_sync_step,
            options.staleness_threshold,
            options.max_off_policy_threshold,
            in_order=options.mode == ONE_STEP_OFF,
            drops=options.off_policy_strategy == DROP,
        )

    @functools.cached_property
    def scheduler(self) -> Scheduler:
        """The groups on their way."""
        servers = None if self.record.is_replay else self._loops.servers
        is_limited = servers is not None and not self.pace.in_order  # in their order the servers get whole batches
        most = _REQUESTS_PER_SERVER * len(servers.replicas) if servers and is_limited else self.pace.room(0, 0, 0)
        return Scheduler(
            self.pace, self._send, self._receive, self._drop, most, self.run_config.trainer.worker_call_timeout_s
        )

    @functools.cached_property
    def progress(self) -> Progress:
        """How far the data are drawn and generated."""
        return Progress()

    @functools.cached_property
    def _unsent(self) -> "deque[Group]":
        """Groups that are drawn, and wait for room."""
        return deque()

    @functools.cached_property
    def _version_of(self) -> dict[int, int]:
        """The published version of the weights by the engine's version, which counts every update."""
        return {}

    @property
    def _takes_turns(self) -> bool:
        """Whether servers and trainer take turns on the same devices."""
        return self._options.takes_turns and not self.record.is_replay

    @property
    def _loops(self) -> AgentLoopManager:
        assert self.async_rollout_manager is not None, "the checks before the start ask for rollout.mode=async"
        return self.async_rollout_manager

    # ---- weights

    def _sync_before_generation(self, timing: Timing) -> None:
        """Publish the weights if that is due before this step."""
        if self.record.is_replay:
            self.scheduler.published(self.pace.version(self.scheduler.next_update))
            return
        update = self.state.step - 1
        if update % self.pace.updates == 0 or self.state.engine_version is None:
            self._publish(timing)

    def _publish(self, timing: Timing) -> None:
        """Give the weights to the servers; unfinished responses go on under them, or are waited for before."""
        version = self.pace.version(self.scheduler.next_update)
        if not self._options.partial_rollout and not self._takes_turns:
            self._drain(timing)
        with marked_timer("sync_rollout_weights", timing):
            if self._takes_turns:
                self._number_weights(version)
                self._loops.go_on(self.state.step)
            else:
                with self._flushed():
                    self._number_weights(version)
                    self.state.engine_version = None  # servers that have lost their weights get them too
                    self.sync_weights()
        self.scheduler.published(version)

    @contextmanager
    def _flushed(self) -> Iterator[None]:
        """Interrupt unfinished responses for new weights, and record their tokens; they go on afterwards."""
        has_new = self.actor_rollout_wg.trained_version()[0] != self._published
        if not has_new or not self._options.partial_rollout:
            yield
            return
        self._record_interrupted(self._loops.interrupt())
        yield
        self._loops.proceed()

    def _record_interrupted(self, responses: Sequence[KeptTokens]) -> None:
        groups = {group.uid: group for group in self.scheduler.outstanding}
        for kept in responses:
            self.record.interrupted(groups[kept.uid], kept.moved(self._moved))

    def _drain(self, timing: Timing) -> None:
        """Wait until the servers have finished what they have."""
        with self._waiting(timing):
            self.scheduler.drain(self._look_after_servers)

    @contextmanager
    def _waiting(self, timing: Timing) -> Iterator[None]:
        """Time a wait for responses; if one fails, the account of its attempts is kept."""
        timer = "wait_prev_gen" if self.pace.in_order else "wait_groups"
        with (
            phase("generate", step=self.state.step),
            marked_timer(timer, timing),
            on_failure(lambda _: self._log_attempts()),
        ):
            yield

    def _log_attempts(self) -> None:
        if self.records is not None and not self.record.is_replay:
            self.records.log_attempts(self._loops.take_attempts())

    def _number_weights(self, version: int) -> None:
        """Note the version of the weights that the trainer has now, which servers may get."""
        self._published = self.actor_rollout_wg.trained_version()[0]
        if self._version_of.get(self._published) != version:
            self.record.published(version, self._published + self._moved)
        self._version_of[self._published] = version

    def _look_after_servers(self) -> None:
        """Replace servers that have died; if one has, all get the present weights.

        If no response may go on under other weights, they get them only if all have died.
        """
        servers = self._loops.servers
        if servers is None:  # the workers of the trainer serve, and their death ends the run
            return
        sender = self._loops.sender(self.state.step)

        def send(handles: dict[str, Actor]) -> dict[str, str]:
            self._number_weights(self.pace.version(self.scheduler.next_update))
            return sender(handles)

        servers.look_after(send, not self._options.partial_rollout, Event())

    # ---- groups

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Wait for the groups of this step, send others as far as the pace allows, and score these."""
        started = time.perf_counter()
        update = self.scheduler.next_update
        with self._waiting(timing):
            self._taken = self._recorded(rows, update) or self._finished(rows)
        if self._takes_turns:
            with phase("generate", step=self.state.step), marked_timer("interrupt", timing):
                self._interrupt()
        self.record.batch(update, self.scheduler.version, self._taken)
        if self.pace.in_order and self.state.is_last_step and self.checkpoints.may_be_written:
            self._undrawn = self.checkpoints.position()
        metrics["fully_async/total_wait_time"] = time.perf_counter() - started
        if not self.pace.in_order:  # which draws after a publication alone
            self._draw(rows)
        metrics |= group_metrics(self._taken, self.scheduler.version, self.progress, self.pace.in_order)
        seed_process(self.state.seed, "driver", self.state.step)  # whatever was drawn meanwhile
        batch = self._checked("prepare", None, lambda: DataProto.concat([group.prepared for group in self._taken]))
        batch = self._checked("generate", batch, self.generate, metrics, timing)
        return self._checked("score", batch, self.score, metrics, timing)

    def _interrupt(self) -> None:
        """Take the devices from the servers; unfinished responses keep their tokens, or are waited for before."""
        if self._options.partial_rollout:
            self.scheduler.hold()
        else:
            self.scheduler.drain(self._look_after_servers)
        self._record_interrupted(self._loops.hold())

    def _finished(self, rows: Iterator[Rows]) -> list[Group]:
        """Wait for the groups of the next update."""

        def draw() -> None:
            self._draw(rows)
            if self._end_of_data is not None and len(self.scheduler.outstanding) < self.pace.groups:
                if self._takes_turns:  # validation and checkpoint follow, and need the devices
                    self._interrupt()
                raise self._end_of_data

        def look() -> None:
            self._look_after_servers()
            draw()  # groups that failed leave room

        draw()
        return self.scheduler.take(look)

    def _recorded(self, rows: Iterator[Rows], update: int) -> list[Group]:
        """Return the groups that the ledger names for an update; none if it does not know it.

        Raises: EndOfDataError at the end of a replay.
        """
        wanted = self.record.history.batches.get(update)
        if wanted is None:
            if self.record.is_replay:
                raise EndOfDataError(f"the ledger of the replay has no batch of update {update}")
            return []
        if len(wanted) != self.pace.groups:
            raise WrongInput(
                f"update {update} was recorded with {len(wanted)} groups, and has {self.pace.groups} now: restore "
                "actor_rollout_ref.actor.ppo_mini_batch_size and async_training.require_batches, with "
                "async_training.mode=one_step_off data.train_batch_size, or give the run another folder"
            )
        if self.pace.in_order and not self.record.is_replay:
            return []  # the order of the data gives the same groups
        while self.progress.drawn <= max(wanted):
            self._unsent.extend(self._prepared(rows))
        known = [group for group in self._unsent if group.number in wanted and group.output is not None]
        for group in known:
            self._unsent.remove(group)
        self.scheduler.add(known)
        return self.scheduler.pick(wanted)

    def _sample(self, batch: DataProto, metrics: Metrics, timing: Timing) -> Sampled:
        """Join the responses of the groups of this step."""
        taken = self._taken
        rows = DataProto.concat([group.row for group in taken])
        batch.batch = rows.batch
        batch.non_tensor_batch = rows.non_tensor_batch
        prompts = DataProto.concat([group.prompt for group in taken])
        requests = DataProto.concat([group.requests for group in taken])
        outputs = [moved(group.output, -self._moved) for group in taken if group.output is not None]
        if self.record.is_replay:
            output = _without_reports(joined_answers(outputs))
        else:
            planned = min(group.planned for group in taken if group.planned is not None) - self._moved
            if self.pace.in_order:  # they were generated during the step before
                seconds = max(output.meta_info["elapsed_s"] for output in outputs)
            else:
                seconds = timing["wait_groups"]
            output = self._loops.gather(outputs, seconds, planned)
            self._log_attempts()
            if self.records is not None:
                self.records.keep_spans([part for group in taken for part in group.recorded])
        self.rollouts.receive(requests, output, metrics, timing)
        return prompts, output, tensors_of(requests)["sampling_seed"]

    def _draw(self, rows: Iterator[Rows]) -> None:
        """Draw prompts and send them, as far as the pace allows."""
        if self.record.is_replay:
            return
        room = self.scheduler.room()
        rest = (self.state.total_steps - self.scheduler.next_update) * self.pace.groups
        room = min(room, rest - len(self.scheduler.outstanding))
        groups: list[Group] = []
        while len(groups) < room and (group := self._next_group(rows)) is not None:
            if self._is_wanted(group):
                groups.append(group)
            elif self.pace.in_order:
                self.scheduler.leave_out()
                room -= 1
        self.scheduler.add(groups)

    def _next_group(self, rows: Iterator[Rows]) -> Group | None:
        """Return the next group to be sent; None at the end of the data."""
        while not self._unsent and self._end_of_data is None:
            before = self.checkpoints.position() if self.pace.in_order else None
            try:
                self._unsent.extend(self._prepared(rows))
            except EndOfDataError as end:
                self._end_of_data = end
                self._undrawn = before
        return self._unsent.popleft() if self._unsent else None

    def _prepared(self, rows: Iterator[Rows]) -> list[Group]:
        """Draw the next prompts of the data."""
        first = self.progress.drawn
        with self._as_drawn(first):
            prepared = self.prepare(next(rows))
        prepared.meta_info.pop("first_prompt")  # rows of several draws are joined
        self.progress.drawn += len(prepared)
        groups = [self._group(first + at, prepared[at : at + 1]) for at in range(len(prepared))]
        for group in groups:
            self.record.drawn(group)
            self._restore(group)
        return groups

    def _restore(self, group: Group) -> None:
        """Give a group what the ledger has of it."""
        history = self.record.history
        if group.number in history.failed:
            self.progress.failed.append(group.number)
            return
        history.restore(group)
        if not group.missing and not self._completed(group):
            history.failed[group.number] = "its recorded responses failed"

    def _is_wanted(self, group: Group) -> bool:
        """Whether a group can be trained: not if the ledger says that it has failed."""
        return group.number not in self.record.history.failed

    def _step_of(self, number: int) -> int:
        """Return the step of which the prompt with a number is one if none fails."""
        return number // self.pace.groups + 1

    def _group(self, number: int, prepared: DataProto) -> Group:
        """Return the group of a prompt, which is still to be sent."""
        row = prepared.select()
        row.meta_info = {"first_prompt": number % self.pace.groups}
        with self._as_drawn(number):
            prompt, requests, seeds = self.rollouts.requests(row, self.reward_fn, {})
        row.meta_info.pop("first_prompt")
        for part in (prompt, requests):
            meta = part.meta_info.items()
            part.meta_info = {name: value for name, value in meta if name not in ("first_prompt", "global_steps")}
        return Group(number, prepared, row, prompt, requests, seeds)

    @contextmanager
    def _as_drawn(self, number: int) -> Iterator[None]:
        """Let the state be that of the main trainer when it draws a prompt, whatever the step in which it is drawn."""
        state = self.state
        step = state.step
        drawn = state.prompts_drawn
        state.step = self._step_of(number)
        state.prompts_drawn = number % self.pace.groups
        try:
            yield
        finally:
            state.step = step
            state.prompts_drawn = drawn

    def _send(self, group: Group) -> "dict[int, Future[DataProto]]":
        """Send the requests of the missing responses of a group to agent loops."""
        step = self._step_of(group.number) if self.pace.in_order else self.scheduler.next_update + 1
        records_spans = self.pace.in_order and self.records is not None and self.records.has_timeline(step)
        group.plan(self._published + self._moved)
        self.record.sent(group, self.scheduler.next_update)
        answers: dict[int, Future[DataProto]] = {}
        for place in group.missing:
            request = group.requests[place : place + 1]
            request.meta_info = group.requests.meta_info | {"global_steps": step}
            if records_spans:
                request.meta_info[RECORDED] = True
            tensors_of(request)["sample"] = torch.tensor([place])
            if place in group.kept:
                kept = group.kept[place].moved(-self._moved)
                request.non_tensor_batch[KEPT_COLUMN] = object_array([kept])
            group.pending[place] = self._loops.send(request)
            answers[place] = group.pending[place].refs[0].future()
        return answers

    def _receive(self, group: Group, place: int) -> bool | None:
        """Take a response of a group; return whether the group can be trained, which a failed one cannot.

        Raises: RuntimeError if a server has answered by weights that the trainer has not sent.
        """
        response = self._loops.receive(group.pending[place])
        group.pending.pop(place)
        if self.pace.in_order:
            group.recorded += self._loops.take_timeline()
        group.spans[place] = self._span(*_engine_versions(response), group.version)
        group.responses[place] = moved(response, self._moved)
        self.record.finished(group, place)
        return None if group.missing else self._completed(group)

    def _completed(self, group: Group) -> bool:
        """Join the responses of a group; return whether it can be trained."""
        output = group.joined()
        dropped = output.non_tensor_batch.get(DROPPED_COLUMN)
        is_replaced = any(line["outcome"] == REPLACED for line in output.meta_info["attempts"])
        if is_replaced or (dropped is not None and dropped.astype(bool).all()):
            lines = output.meta_info["attempts"]
            reason = next((line["reason"] for line in lines if line["reason"]), "its agent loops failed")
            self._loops.give_up(output)
            self.record.failed(group, str(reason))
            self.progress.failed.append(group.number)
            self._failed_in_a_row += 1
            if self._failed_in_a_row > _MOST_FAILED * self.pace.groups:
                raise RuntimeError(
                    f"the agent loops of {self._failed_in_a_row} prompts failed one after the other, at last: {reason}"
                    ". Mend the loop, its tools or the reward; rollout.agent.on_failure=fail ends the run at the first"
                )
            return False
        self._failed_in_a_row = 0
        group.complete(output)  # not before: a checkpoint that is written meanwhile would keep a failed group
        self.record.history.add_scores(group)
        self.progress.add_generated(output)
        return True

    def _drop(self, group: Group) -> None:
        """Record that a group is too old to be trained."""
        reason = f"a token is older than async_training.max_off_policy_threshold={self.pace.bound} allows"
        if not self.pace.drops:
            reason += ", which is lower than when it was sampled"
        self.record.dropped(group, reason)
        self.progress.dropped += 1

    def _span(self, oldest: int | None, newest: int | None, at_send: int) -> tuple[int, int]:
        """Return the versions of two numbers of the engine; without numbers, the version at which the group was sent.

        Raises: RuntimeError.
        """
        found = []
        for number in (oldest, newest):
            if number is not None and number not in self._version_of:
                raise RuntimeError(
                    f"a server has answered with weights number {number}, which this run has not published: "
                    f"known are {sorted(self._version_of)}"
                )
            found.append(at_send if number is None else self._version_of[number])
        return found[0], found[1]

    # ---- the rest of a step

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Record the scores of the groups before PF-PPO may draw other rows, and add advantages and returns."""
        order = self.state.row_order
        if len(order) == len(batch) == sum(len(group.requests) for group in self._taken):  # no group has segments
            failures = batch.non_tensor_batch.get(FAILURE_COLUMN, np.full(len(batch), None))
            self.record.scored(self._taken, tensors_of(batch)["token_level_scores"][order], failures[order].tolist())
        return super().add_advantages(batch)

    def update(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Update the models, and record the weights."""
        begin = time.monotonic()
        batch = super().update(batch, metrics, timing)
        spans = self.scheduler.take_spans()
        if not self._takes_turns:
            metrics["fully_async/update_overlap"] = overlap(spans, begin, time.monotonic())
        if self.records is not None and self.records.has_timeline(self.state.step):
            self.records.keep_spans([Part("groups", Clock.now(), spans)])
        with marked_timer("record_weights", timing):
            digests = self.actor_rollout_wg.weights_digest()
        number = self.actor_rollout_wg.trained_version()[0] + self._moved
        self.record.updated(self.scheduler.next_update - 1, digests, number)
        return batch

    # ---- validation and checkpoints

    def _validate(self) -> Metrics:
        """Return the metrics of the newest weights; unfinished responses go on beside the validation."""
        if self.record.is_replay:  # there are no servers
            return {}
        if not self._takes_turns:  # else the validation gives the weights to the engines itself
            self._publish({})
        return super()._validate()

    def _save_checkpoint(self) -> None:
        """Write a checkpoint with the groups that are drawn and not trained, and its place in the ledger."""
        if self.pace.in_order and not self.record.is_replay:
            self._drain({})
        progress = self.progress
        progress.trained_number = self.actor_rollout_wg.trained_version()[0] + self._moved
        progress.ledger_seq = self.record.place(self.scheduler.next_update)
        folder = self.checkpoints.begin()
        untrained = self._taken if self.scheduler.next_update > self.state.step else ()  # the run ends within a step
        unsent = [group for group in self._unsent if self._is_wanted(group)]
        save_groups(folder, [*untrained, *self.scheduler.outstanding, *unsent], progress)
        files = [FILE_NAME]
        if not self.record.is_replay:
            self.record.export(folder)
            files.append(SEGMENT)
        position = self.checkpoints.position()  # all that was drawn and not trained is in the file
        if self._undrawn is not None:
            sampler = self.train_dataloader.sampler
            position = replace(self._undrawn, learned=sampler.state_dict() if has_state(sampler) else {})
        self.checkpoints.save(position, files)
        self.record.saved(self.state.step, progress.ledger_seq)

    def _load_checkpoint(self) -> int | None:
        """Restore the run that the configuration resumes, with the groups that were under way."""
        step = super()._load_checkpoint()
        self.scheduler.next_update = self.state.step
        self.progress.drawn = self.state.step * self.pace.groups  # unless the checkpoint says how many
        files = [path for path in self.checkpoints.extra_files if path.name == FILE_NAME]
        for path in files if step is not None else ():
            self.checkpoints.check_extra_file(path)
            trusted = list(self.run_config.trainer.trusted_classes)
            groups, self.progress = load_groups(path, trusted, self._group)
            self._moved = self.progress.trained_number - self.actor_rollout_wg.trained_version()[0]
            self.record.resume(self.state.step, self.progress.ledger_seq, path.with_name(SEGMENT), trusted)
            for group in groups:
                if group.output is not None:
                    check_samples(group, len(group.output))
                    self.record.history.add_scores(group)
                else:
                    self._restore(group)
            self._unsent.extend(groups)
        for number, version in self.record.history.published.items():
            self._version_of[number - self._moved] = version
        self.progress.restarted += self.record.tell_resumed(self.state.step, self.progress.drawn)
        return step


def moved(output: DataProto, by: int) -> DataProto:
    """Return responses whose versions of the engine are moved."""
    result = output.select()
    meta = output.meta_info
    result.meta_info = meta | {
        "versions": [None if version is None else version + by for version in meta["versions"]],
        "sampled_by": [[(version + by, count) for version, count in of_row] for of_row in meta["sampled_by"]],
    }
    return result


def _without_reports(output: DataProto) -> DataProto:
    """Return joined responses without what their loops have reported of them."""
    for name in ("attempts", "versions", "sampled_by", "seconds", "elapsed_s"):
        output.meta_info.pop(name)
    return output


def _engine_versions(response: DataProto) -> tuple[int | None, int | None]:
    """Return the oldest and the newest of the engine's versions that sampled a token of a response."""
    (oldest,) = response.meta_info["versions"]
    (sampled_by,) = response.meta_info["sampled_by"]
    return oldest, max((version for version, count in sampled_by if count), default=oldest)
