"""The driver's side of agent loops: the servers, the actors that run the loops, and a batch through both."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.base_config import omega_conf_to_dataclass
from verl.experimental.agent_loop.attempts import (
    CANCELLED,
    OK,
    REPLACED,
    Attempt,
    TrajectoryError,
    attempt_metrics,
    mark_replaced,
)
from verl.experimental.agent_loop.batch import places_of, sample_numbers
from verl.experimental.agent_loop.held import KeptTokens
from verl.experimental.agent_loop.rows import joined
from verl.experimental.agent_loop.worker import AgentLoopWorker
from verl.protocol import DataProto, tensors_of
from verl.single_controller.base.actor import Actor
from verl.single_controller.base.worker_group import Manager
from verl.utils.failures import on_failure
from verl.utils.observe import timeline
from verl.utils.observe.attempts import AttemptLine
from verl.utils.py_functional import object_array
from verl.workers.config.actor_rollout_ref import is_hybrid
from verl.workers.rewards.model_scores import SCORED_BY_MODEL, ScoresOfParts
from verl.workers.rollout.base import BEHIND_COLUMN, DROPPED_COLUMN, STAYS_AWAKE
from verl.workers.rollout.server_replica import MOST_CALLS, RolloutReplica
from verl.workers.rollout.standalone import ServerWatch, StandaloneServers, replica_class_of

if TYPE_CHECKING:
    from verl.single_controller.base.actor import Ref
    from verl.single_controller.ray import RayWorkerGroup
    from verl.workers.config import RolloutConfig

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 600.0
_ACTIVITIES = ("generate_sequences", "tool_calls")


@dataclass
class PendingGeneration:
    """A batch that agent loops generate.

    Attributes:
        prompts: the requests, with their places.
        parts: the part of each worker that has one.
        callers: names and handles of these workers.
        refs: their answers.
        scores: scores the parts that have ended, if there is a reward model.
        planned_version: the version of the weights that should sample all rows, if the trainer goes on during the
            generation.
        watch: restarts servers that die while the trainer goes on.
    """

    prompts: DataProto
    parts: list[DataProto] = field(default_factory=list)
    callers: list[tuple[str, Actor]] = field(default_factory=list)
    refs: "list[Ref]" = field(default_factory=list)
    scores: ScoresOfParts | None = None
    started: float = field(default_factory=time.perf_counter)
    planned_version: int | None = None
    watch: ServerWatch | None = None

    @property
    def step(self) -> int | None:
        """The training step that the batch is for."""
        step: int | None = self.prompts.meta_info.get("global_steps")
        return step


class AgentLoopManager(Manager):
    """Generates batches by agent loops on the servers of a worker group.

    A subclass may set ``rollout_replica_class`` and ``agent_loop_workers_class`` (a Ray actor class) before it calls
    this constructor.

    Args: ``config`` is that of the run; ``worker_group`` holds actor and rollout.
    """

    rollout_replica_class: type[RolloutReplica]
    agent_loop_workers_class: Any

    def __init__(
        self, config: DictConfig, worker_group: "RayWorkerGroup", rm_wg: "RayWorkerGroup | None" = None
    ) -> None:
        self.config = config
        self.worker_group = worker_group
        self.rm_wg = rm_wg
        self._attempts: list[AttemptLine] = []
        self._timeline: list[timeline.Part] = []
        self.rollout_config: RolloutConfig = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self._is_hybrid = is_hybrid(config)
        if not hasattr(self, "rollout_replica_class"):
            self.rollout_replica_class = replica_class_of(self.rollout_config, self._is_hybrid)
        if not hasattr(self, "agent_loop_workers_class"):
            # Above Ray's default of 1,000, calls of hold and go_on would wait for responses to end.
            with_more_calls = ray.remote(max_concurrency=MOST_CALLS)  # type: ignore[call-overload] # Ray's omits it
            self.agent_loop_workers_class = with_more_calls(AgentLoopWorker)
        self._init_replicas()
        self._init_agent_loop_workers()

    servers: StandaloneServers | None = None
    """The standalone servers, with ``hybrid_engine=false``."""

    def _init_replicas(self) -> None:
        node = self.config.actor_rollout_ref
        if not self._is_hybrid:
            device = self.config.trainer.device
            self.servers = StandaloneServers(self.rollout_replica_class, self.rollout_config, node.model, device)
            self.rollout_replicas = self.servers.replicas
            self.server_handles = list(self.servers.handles.values())
            return
        size = self.rollout_config.workers_per_engine
        count = self.worker_group.world_size // size
        per_node = self.config.trainer.n_gpus_per_node
        self.rollout_replicas = [
            self.rollout_replica_class(rank, self.rollout_config, node.model, per_node) for rank in range(count)
        ]
        for replica in self.rollout_replicas:
            replica.init_hybrid(self.worker_group)
        self.server_handles = [replica.server_handle for replica in self.rollout_replicas]

    def _init_agent_loop_workers(self) -> None:
        """Start the actors, round robin over the nodes; they load their tokenizer while the models are built."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        on_cpu = self.config.trainer.device == "cpu"  # without spare cores: each may belong to a worker of the trainer
        self.agent_loop_workers: list[Actor] = []
        self._names: list[str] = []
        for index in range(self.rollout_config.agent.num_workers):
            name = f"{self.worker_group.name_prefix}_agent_loop_worker_{index}"
            options = {
                "name": name,
                "num_cpus": 0 if on_cpu else 1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=nodes[index % len(nodes)], soft=True),
            }
            worker = self.agent_loop_workers_class.options(**options).remote(self.config, self.server_handles, None)
            self.agent_loop_workers.append(worker)
            self._names.append(name)
        self._unanswered = [0] * len(self._names)
        self._preparing = [worker.prepare.remote() for worker in self.agent_loop_workers]

    def wait_until_ready(self) -> None:
        """Wait until the workers have read what agent loops need, such as the files of tools; the engines have started.

        Raises: WorkerInputError naming the loop that cannot be built.
        """
        if self.servers is None and self._preparing:
            for replica in self.rollout_replicas:
                replica.engine_started()
        if self._preparing:
            callers = list(zip(self._names, self.agent_loop_workers, strict=True))
            self.worker_group.wait_for_callers(callers, self._preparing, "prepare")
            self._preparing = []

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return a trajectory for each row, in their order; see ``AgentLoopWorkerBase.generate_sequences``.

        The workers share the rows as evenly as they can. The engines have the current weights, and are asleep before
        and afterwards, unless the meta ``stays_awake`` says that the next call is another generation.
        """
        return self.finish(self.begin(prompts))

    def begin(self, prompts: DataProto, trains_meanwhile: bool = False) -> PendingGeneration:
        """Wake the engines with the current weights, and let the workers begin with a batch; ``finish`` waits for it.

        With ``trains_meanwhile`` the trainer goes on until ``finish``, which needs standalone servers. The servers keep
        their weights until then. A server that dies is restarted, and gets weights only if no other server has the old
        ones.
        """
        self.wait_until_ready()
        self.wake_up(prompts.meta_info.get("global_steps"))
        pending = PendingGeneration(_placed(prompts))
        if trains_meanwhile:
            assert self.servers is not None, "only standalone servers generate while the trainer trains"
            pending.planned_version = self.worker_group.trained_version()[0]
        with on_failure(partial(self._keep_account, prompts)):
            self._start_loops(pending)
        if trains_meanwhile and self.servers is not None:
            pending.watch = ServerWatch(self.servers, None)
        return pending

    def finish(self, pending: PendingGeneration) -> DataProto:
        """Return a trajectory for each row of a batch that has begun, in their order.

        Non-tensor ``versions_behind`` says of each row by how many versions the weights that sampled it are older than
        the trainer's, if the trainer went on during the generation; None where no server says.
        """
        prompts = pending.prompts
        with on_failure(partial(self._keep_account, prompts)):
            if pending.watch is not None:
                pending.watch.stop()
                if pending.watch.failures:  # the watch has ended all servers
                    raise pending.watch.failures[0]
            with self._watched(pending.step, keeps_weights=pending.planned_version is not None):
                output = self._wait_for_loops(pending)  # an error ends the workers
        elapsed_s: float = output.meta_info.pop("elapsed_s")
        seconds = time.perf_counter() - pending.started if pending.planned_version is None else elapsed_s
        if not prompts.meta_info.get(STAYS_AWAKE):
            self.sleep()
        return self._completed(output, seconds, pending.planned_version, bool(prompts.meta_info.get("validate", False)))

    def _completed(self, output: DataProto, seconds: float, planned_version: int | None, validate: bool) -> DataProto:
        """Move what the loops report of a batch to timing and metrics, and its attempts to their account."""
        attempts: list[AttemptLine] = output.meta_info.pop("attempts")
        self._attempts += attempts
        replaced = sorted({line["uid"] for line in attempts if line["outcome"] == REPLACED})
        mark_replaced(attempts, replaced)
        if not replaced and not validate:  # validation counts failed trajectories as failures
            _check_any(output, attempts)
        of_loops = _loop_timing(output.meta_info.pop("seconds"))
        report = self._reported(output, seconds, planned_version)
        output.meta_info["timing"] = report.meta_info["timing"] | of_loops
        output.meta_info["metrics"] = (
            report.meta_info["metrics"] | output.meta_info["metrics"] | attempt_metrics(attempts)
        )
        if replaced:
            output.meta_info["replace"] = replaced
        return output

    # ---- groups of responses, each for itself

    def send(self, requests: DataProto) -> PendingGeneration:
        """Let one worker generate these requests, by whatever weights the servers have; ``receive`` takes the answer.

        The worker with the fewest unanswered calls of this method gets them.
        """
        index = min(range(len(self._unanswered)), key=self._unanswered.__getitem__)
        self._unanswered[index] += 1
        part = _placed(requests)
        caller = (self._names[index], self.agent_loop_workers[index])
        ref = self.agent_loop_workers[index].generate_sequences.remote(part)
        return PendingGeneration(part, [part], [caller], [ref])

    def receive(self, pending: PendingGeneration) -> DataProto:
        """Wait for what ``send`` has sent, and return it with the report of its worker, which ``gather`` takes."""
        index = self._names.index(pending.callers[0][0])
        with on_failure(partial(self._keep_account, pending.prompts)):
            outputs = self.worker_group.wait_for_callers(pending.callers, pending.refs, "generate_sequences")
        self._unanswered[index] -= 1
        output: DataProto = outputs[0]
        self._take_spans(pending.callers[0][0], output)
        return output

    def hold(self) -> list[KeptTokens]:
        """Interrupt what ``send`` has sent, and give the devices back to the trainer.

        Responses keep their tokens, and go on after ``go_on``. Returns the tokens of first turns.
        """
        kept = self.interrupt(waits_for_others=True)
        self.sleep()
        return kept

    def go_on(self, step: int | None = None) -> None:
        """Give devices and current weights to the engines, and let what ``send`` has sent go on."""
        self.wake_up(step)
        self.proceed()

    def interrupt(self, waits_for_others: bool = False) -> list[KeptTokens]:
        """Interrupt what ``send`` has sent until ``proceed``; see ``Hold.begin``."""
        kept: list[list[KeptTokens]] = self._tell_loops("hold", waits_for_others)
        return [each for of_worker in kept for each in of_worker]

    def proceed(self) -> None:
        """Let what ``send`` has sent go on."""
        self._tell_loops("go_on")

    def _tell_loops(self, method: str, *arguments: bool) -> list[Any]:
        callers = list(zip(self._names, self.agent_loop_workers, strict=True))
        refs = [getattr(worker, method).remote(*arguments) for worker in self.agent_loop_workers]
        answers: list[Any] = self.worker_group.wait_for_callers(callers, refs, method)
        return answers

    def give_up(self, output: DataProto) -> None:
        """Keep only the account of what ``receive`` has returned."""
        attempts: list[AttemptLine] = output.meta_info["attempts"]
        mark_replaced(attempts, {line["uid"] for line in attempts if line["outcome"] == REPLACED})
        self._attempts += attempts

    def gather(self, outputs: Sequence[DataProto], seconds: float, planned_version: int) -> DataProto:
        """Join what ``receive`` has returned to one batch, as ``finish`` does.

        Args: the seconds since the batch before, and the version of the weights that the servers have.
        """
        whole = joined_answers(outputs)
        whole.meta_info.pop("elapsed_s")
        whole.meta_info["metrics"] = {}
        return self._completed(whole, seconds, planned_version, validate=False)

    def abandon(self, pending: PendingGeneration) -> None:
        """Wait no more for a batch, because the run ends."""
        if pending.watch is not None:
            pending.watch.stop()

    def _reported(self, output: DataProto, seconds: float, planned_version: int | None) -> DataProto:
        """Return what the workers report of a generation, and write to its rows how old their weights are."""
        output.meta_info.pop("sampled_by")
        versions: list[int | None] = output.meta_info.pop("versions")
        oldest = min((version for version in versions if version is not None), default=None)
        if planned_version is not None:
            trained = self.worker_group.trained_version()[0]
            behind = [None if version is None else trained - version for version in versions]
            output.non_tensor_batch[BEHIND_COLUMN] = object_array(behind)
        lengths = tensors_of(output)["attention_mask"].sum(-1).tolist()
        report: DataProto = self.worker_group.generation_report(seconds, lengths, oldest, planned_version)[0]
        return report

    def _keep_account(self, prompts: DataProto, error: BaseException) -> None:
        """Keep the account of the attempts of a batch that an error ends."""
        self._attempts += _account_of(prompts, error)

    def take_attempts(self) -> list[AttemptLine]:
        """Return the account of all attempts since the last call of this method."""
        attempts = self._attempts
        self._attempts = []
        return attempts

    def flush_traces(self) -> None:
        """Wait until the actors have sent their traces to ``rollout.trace.backend``; a trace that fails is lost."""
        if self.rollout_config.trace.backend is None:
            return
        try:
            ray.get([worker.flush_traces.remote() for worker in self.agent_loop_workers], timeout=_FLUSH_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            logger.warning("rollout.trace: some traces were not sent: %s: %s", type(error).__name__, error)

    def take_timeline(self) -> list[timeline.Part]:
        """Return what the actors have recorded since the last call of this method, of batches that asked for it."""
        parts = self._timeline
        self._timeline = []
        return parts

    def _start_loops(self, pending: PendingGeneration) -> None:
        """Let the workers begin, each with a part of the batch."""
        handles = [replica.server_handle for replica in self.rollout_replicas]
        if handles != self.server_handles:  # a replica has replaced its server
            self.server_handles = handles
            ray.get([worker.set_servers.remote(handles) for worker in self.agent_loop_workers])
        prompts = pending.prompts
        first = 0
        for index, size in enumerate(_split(len(prompts), len(self.agent_loop_workers))):
            if size:
                part = prompts[first : first + size]
                pending.parts.append(part)
                pending.refs.append(self.agent_loop_workers[index].generate_sequences.remote(part))
                pending.callers.append((self._names[index], self.agent_loop_workers[index]))
            first += size
        if self.rm_wg is not None and prompts.meta_info.get(SCORED_BY_MODEL):
            pending.scores = ScoresOfParts(self.rm_wg, pending.refs, pending.parts)

    def _wait_for_loops(self, pending: PendingGeneration) -> DataProto:
        callers = pending.callers
        scores = pending.scores
        outputs: list[DataProto] = self.worker_group.wait_for_callers(callers, pending.refs, "generate_sequences")
        metrics = {} if scores is None else scores.add_to(outputs)
        for (name, _), output in zip(callers, outputs, strict=True):
            self._take_spans(name, output)
        whole = joined_answers(outputs)
        whole.meta_info["metrics"] = metrics
        return whole

    def _take_spans(self, name: str, output: DataProto) -> None:
        """Keep what a worker has recorded for the timeline."""
        part = output.meta_info.pop(timeline.RECORDED, None)
        if part is not None:
            self._timeline.append(replace(part, process=f"agent loops {self._names.index(name)}"))

    def sync_weights(self, step: int | None = None) -> None:
        """Give the current weights to standalone servers; dead ones are replaced."""
        if self.servers is not None:
            self.servers.sync(self.sender(step))

    def _watched(self, step: int | None, keeps_weights: bool) -> AbstractContextManager[None]:
        """Replace standalone servers that die inside the context."""
        if self.servers is None:
            return nullcontext()
        return self.servers.watched(self.sender(step), keeps_weights)

    def sender(self, step: int | None) -> Callable[[dict[str, Actor]], dict[str, str]]:
        """Return the function that gives the trainer's weights to servers; see ``StandaloneServers.sync``."""

        def send(handles: dict[str, Actor]) -> dict[str, str]:
            lost: dict[str, str] = self.worker_group.sync_servers(handles, step)[0]
            return lost

        return send

    def wake_up(self, step: int | None = None) -> None:
        """Give devices and current weights to the engines."""
        self.sync_weights(step)
        self.worker_group.wait([worker.wake_up.remote(step) for worker in self._workers()], "wake_up")

    def sleep(self) -> None:
        """Give the devices back to the trainer."""
        self.worker_group.wait([worker.sleep.remote() for worker in self._workers()], "sleep")

    def _workers(self) -> list[Actor]:
        return [worker for replica in self.rollout_replicas for worker in replica.workers]


def joined_answers(outputs: Sequence[DataProto]) -> DataProto:
    """Join the rows of several calls, and what they report of them, as ``AgentLoopWorker.generate_sequences`` does."""
    lists: dict[str, list[Any]] = {"seconds": [], "attempts": [], "versions": [], "sampled_by": []}
    elapsed_s = max((output.meta_info.pop("elapsed_s") for output in outputs), default=0.0)
    for output in outputs:
        for key, values in lists.items():
            values += output.meta_info.pop(key)
    extras = sorted({name for output in outputs for name in output.meta_info.pop("reward_extra_keys", ())})
    whole = joined(outputs)
    if extras:
        whole.meta_info["reward_extra_keys"] = extras
    whole.meta_info |= lists | {"elapsed_s": elapsed_s}
    return whole


def _split(count: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` nearly equal parts of ``count`` rows."""
    return [count // parts + (index < count % parts) for index in range(parts)]


def _placed(prompts: DataProto) -> DataProto:
    """Return the requests with their place in the batch, as ``places_of`` reads it."""
    uids = [str(uid) for uid in prompts.non_tensor_batch.get("uid", range(len(prompts)))]
    placed = prompts.select()
    tensors = tensors_of(placed)
    tensors["row"] = torch.arange(len(prompts))
    if "sample" not in tensors.keys():  # a part of a group knows its places
        tensors["sample"] = torch.tensor(sample_numbers(uids), dtype=torch.int64)
    return placed


def _account_of(prompts: DataProto, error: BaseException) -> list[AttemptLine]:
    """Return the account of a batch that an error ended: the failed worker's lines, and one line for the others.

    The accounts of the other workers ended with their processes.
    """
    lines: list[AttemptLine] = []
    cause: BaseException | None = error
    while cause is not None:
        cause_of_task = getattr(cause, "cause", None)  # the cause of Ray's RayTaskError
        found = cause if isinstance(cause, TrajectoryError) else cause_of_task
        if isinstance(found, TrajectoryError):
            lines = list(found.attempts)
            break
        cause = cause.__cause__
    known = {(line["uid"], line["sample"]) for line in lines}
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    step = prompts.meta_info.get("global_steps") or 0
    for place in places_of(_placed(prompts)):
        if (place.uid, place.sample) not in known:
            attempt = Attempt(f"{step}-unknown-{place.uid}-{place.sample}-0", place.uid, place.sample, "")
            attempt.finish(CANCELLED, f"the run ends: {reason}")
            lines.append(attempt.line())
    return lines


def _check_any(output: DataProto, attempts: Sequence[AttemptLine]) -> None:
    """Raise TrajectoryError with the first reason if no trajectory is left."""
    dropped = output.non_tensor_batch.get(DROPPED_COLUMN)
    if dropped is not None and dropped.all():
        first = next(line for line in attempts if line["outcome"] != OK)
        raise TrajectoryError(
            f"all {len(output)} trajectories of the batch failed, the first in attempt {first['id']}: {first['reason']}"
        )


def _loop_timing(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the least, mean and most seconds that a trajectory spent on each activity."""
    timing: dict[str, float] = {}
    for name in _ACTIVITIES if seconds else ():  # empty if all trajectories failed and were replaced
        values = np.array([each[name] for each in seconds])
        figures = {"min": values.min(), "max": values.max(), "mean": values.mean()}
        timing |= {f"agent_loop/{name}/{kind}": float(value) for kind, value in figures.items()}
    return timing
