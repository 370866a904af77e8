"""Measure the cost of a training step on the driver, with columns sent through it and with columns by reference.

``measure`` runs steps without models, but with real batches, a real worker group, and the trainer's functions for each
phase. A few actors simulate any number of workers; the driver sends and receives as many messages as with real ones.
Each run appends one JSON line. ``model`` fits a cost model to the lines and predicts other sizes; ``phases`` prints the
seconds and bytes of each phase:

    python benchmarks/driver_scaling.py measure --out runs.jsonl
    python benchmarks/driver_scaling.py model runs.jsonl
    python benchmarks/driver_scaling.py phases runs.jsonl

``measure --large`` runs the largest sizes, to which the model is not fitted: print them with ``phases``.
``measure --work-s`` lets the workers take time for each call; ``model`` compares the wall time of such steps with the
prediction of its queueing model.
"""

import argparse
import gc
import io
import itertools
import json
import os
import pickle
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_speed import SteadyClock

from verl import DataProto
from verl.algos.config import AlgoConfig
from verl.protocol import lazy, tensors_of
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

PHASES = ("generate", "infer", "shape", "update", "finish")
ANSWERS = "answers"
"""Name of the part of the phases in which the driver receives answers of the workers."""
SENDS = "sends"
"""Name of the part of the phases in which the driver sends parts of the batch to the workers."""
PARTS = (*PHASES, ANSWERS, SENDS)
SAMPLES = 8
ROWS_OF_A_BLOCK = 24
"""Number of rows, of 8,192 tokens, in a block of generated columns."""


def working(method: Callable[..., Any]) -> Callable[..., Any]:
    """Delay the answer of a registered method until the simulated work is over.

    Reading the part and storing the columns count as part of the work, since a few actors do this for all simulated
    workers. The work begins at ``sent_at``, the monotonic time at which the driver has sent the part.
    """

    @wraps(method)
    def work(self: "SimulatedWorker", *args: Any, sent_at: float | None = None, **kwargs: Any) -> Any:
        output = method(self, *args, **kwargs)
        if sent_at is not None:
            left = sent_at + self.call_s - time.monotonic()
            self.late += left < 0
            time.sleep(max(0.0, left))
        return output

    return work


class SimulatedWorker(Worker):
    """A worker without a model, whose answers have the sizes of a real worker's.

    ``call_s`` is the simulated duration of a call in seconds; ``late`` counts the answers that took longer.
    """

    call_s = 0.0
    late = 0

    def __init__(self, block_rows: int = ROWS_OF_A_BLOCK) -> None:
        super().__init__()
        self.block_rows = block_rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work_for(self, seconds: float) -> None:
        """Set the simulated duration of the calls that follow."""
        self.call_s = seconds
        self.late = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def late_answers(self) -> int:
        """Return the number of answers that took longer than the simulated work."""
        return self.late

    def _blocks(self, data: DataProto, row_bytes: int) -> None:
        lazy.BLOCK_BYTES = self.block_rows * row_bytes

    @working
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Return responses of the maximum length."""
        tensors = tensors_of(data)
        prompts = tensors["input_ids"]
        rows = len(prompts)
        width = data.meta_info["response_length"]
        responses = torch.full((rows, width), 100_007)
        mask = torch.ones(rows, width, dtype=torch.int64)
        ids = torch.cat([prompts, responses], -1)
        self._blocks(data, 8 * (3 * ids.shape[1] + prompts.shape[1] + 2 * width) + 4 * width)
        return DataProto.from_dict(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": ids,
                "attention_mask": torch.cat([tensors["attention_mask"], mask], -1),
                "position_ids": torch.arange(ids.shape[1]).repeat(rows, 1),
                "response_mask": mask,
                "rollout_log_probs": torch.full((rows, width), -0.5),
            }
        )

    @working
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return log-probabilities and entropies."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 8 * shape[1])
        return DataProto.from_dict({"old_log_probs": torch.full(shape, -0.5), "entropys": torch.full(shape, 0.1)})

    @working
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return log-probabilities of a reference."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 4 * shape[1])
        return DataProto.from_dict({"ref_log_prob": torch.full(shape, -0.6)})

    @working
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        """Return one score for each response, at its last token."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 4 * shape[1])
        scores = torch.zeros(shape)
        scores[:, -1] = torch.arange(shape[0]) % 3
        return DataProto.from_dict({"token_level_scores": scores})

    @working
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Return metrics only."""
        return DataProto(meta_info={"metrics": {"actor/loss": 0.0}})

    execute_func_rank_zero = working(Worker.execute_func_rank_zero)


class InProcess:
    """A worker group without Ray: parts are pickled as by Ray, and copied once as into the object store.

    The CPU seconds of the workers are not counted. Those of Ray itself do not occur: sockets, tasks, references, and
    memory of the store.
    """

    def __init__(self, workers: int, account: "Account") -> None:
        self.world_size = workers
        self.account = account
        self.worker = SimulatedWorker.__new__(SimulatedWorker)
        self.worker.block_rows = ROWS_OF_A_BLOCK
        self.messages: list[tuple[int, int]] = []

    def wait(self, values: Any) -> Any:
        """Return the answers, which are already there."""
        return values

    def execute_func_rank_zero(self, formula: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        """Run a function of the trainer on one worker."""
        return self._call(formula, data, 1)

    def __getattr__(self, name: str) -> Callable[[DataProto], DataProto]:
        method = getattr(SimulatedWorker, name)
        return lambda data: self._call(lambda part: method(self.worker, part), data)

    def _call(
        self, work: Callable[[DataProto], DataProto], data: DataProto, num_workers: int | None = None
    ) -> DataProto:
        parts = data.chunk(num_workers or self.world_size)
        began = time.process_time()
        sent = [pack(part) for part in parts]
        self.account.sends(time.process_time() - began)
        with self.account.paused():
            answers = [pack(self._answer(work, unpack(part))) for part in sent]
        self.messages.append((packed_bytes(sent[0]), packed_bytes(answers[0])))
        began = time.process_time()
        outputs = self.wait([unpack(answer) for answer in answers])
        self.account.answers(time.process_time() - began)
        return DataProto.concat(outputs)

    def _answer(self, work: Callable[[DataProto], DataProto], part: DataProto) -> DataProto:
        output = work(lazy.fetched(part))
        return lazy.by_reference(output, put=Held) if part.meta_info.get(lazy.BY_REFERENCE) else output


class Held(lazy.Block):
    """A block that is not copied into messages: its pickle holds only its number."""

    known: "list[Held]" = []

    def __init__(self, block: lazy.Block) -> None:
        super().__init__({name: (dtype, shape, data.copy()) for name, (dtype, shape, data) in block.items()})
        self.number = len(Held.known)
        Held.known.append(self)

    def __reduce__(self) -> Any:
        return _held, (self.number,)


def _held(number: int) -> Held:
    return Held.known[number]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, lazy.LazyTensor):
            return lazy._column, (lazy._address(value),)
        if type(value).__name__ == "ObjectRef":  # used for sizes only: Ray sends the id, and the owner separately
            return bytes, (value.binary(),)
        return NotImplemented


Packed = tuple[bytes, list[bytearray]]


def pack(data: DataProto) -> Packed:
    """Pickle a batch with out-of-band buffers, and copy the buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(data)
    return stream.getvalue(), [bytearray(buffer.raw()) for buffer in buffers]


def sent_bytes(data: DataProto) -> int:
    """Return the size of a batch as Ray sends it, without copying its buffers."""
    sizes: list[int] = []
    stream = io.BytesIO()

    def count(buffer: pickle.PickleBuffer) -> None:
        sizes.append(buffer.raw().nbytes)

    _Pickler(stream, protocol=5, buffer_callback=count).dump(data)
    return stream.tell() + sum(sizes)


def packed_bytes(packed: Packed) -> int:
    """Return the size of a message."""
    return len(packed[0]) + sum(map(len, packed[1]))


def unpack(packed: Packed) -> DataProto:
    """Unpickle a batch from read-only buffers, as from the object store."""
    data: DataProto = pickle.loads(packed[0], buffers=[memoryview(each).toreadonly() for each in packed[1]])
    return data


class Account:
    """Counts CPU seconds of this process, except those of simulated workers in it and of the clock's probes."""

    def __init__(self, clock: SteadyClock | None = None) -> None:
        self.clock = clock
        self.left_out = 0.0
        self.of_answers = 0.0
        self.of_sends = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the CPU seconds of the block."""
        began = time.process_time()
        yield
        self.left_out += time.process_time() - began

    def answers(self, seconds: float) -> None:
        """Add CPU seconds spent on receiving answers."""
        self.of_answers += seconds

    def sends(self, seconds: float) -> None:
        """Add CPU seconds spent on sending parts."""
        self.of_sends += seconds

    def now(self) -> float:
        """Return the counted CPU seconds so far."""
        return time.process_time() - self.left_out - self.probes()

    def probes(self) -> float:
        """Return the CPU seconds of the probes so far, which run in the main thread."""
        return self.clock.spent if self.clock else 0.0


# ---- one step


def ready_s() -> float:
    """Return the seconds that this thread was runnable but waited for a processor; 0 if the system does not tell."""
    try:
        return (
            int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="utf-8").split()[1])
            / 1e9
        )
    except OSError:
        return 0.0


def dense_bytes(data: DataProto) -> int:
    """Return the bytes of those columns of a batch that this process holds."""
    values = data.batch.values() if data.batch is not None else ()
    return sum(v.numel() * v.element_size() for v in values if not isinstance(v, lazy.LazyTensor) or v.is_known)


def address_bytes(data: DataProto) -> int:
    """Return the bytes of the references to columns that other processes hold."""
    found = 0
    for column in lazy.lazy_columns(data).values():
        places = column.places
        found += (
            places.rows.block.nbytes + places.rows.row.nbytes + (0 if places.digests is None else places.digests.nbytes)
        )
        found += 0 if places.sums is None else places.sums.nbytes
    return found


class Step:
    """One step of a driver, phase by phase.

    With ``weighed``, ``through`` holds the bytes of all messages of a phase, to and from the workers; the seconds of
    such a step are not meaningful, since messages are pickled twice. ``call_s`` is the simulated duration of a call.

    ``wall_s`` is the wall time of the step. Of this, ``last_answers_s`` passed in calls after all workers had ended.
    ``ready_s`` is the time, outside of waiting for answers, in which the main thread waited for a processor, because
    other processes used them. ``thread_seconds`` are CPU seconds of the main thread. If the account has a clock,
    ``steady_seconds`` are CPU seconds scaled to a fixed speed of the core.
    """

    def __init__(
        self,
        group: Any,
        by_reference: bool,
        rows: int,
        tokens: int,
        account: Account | None = None,
        weighed: bool = False,
        call_s: float = 0.0,
    ) -> None:
        from verl.trainer.ppo.records import StepRecord

        self.group = group
        self.weighed = weighed
        self.by_reference = by_reference
        self.rows = rows
        self.tokens = tokens
        self.record = StepRecord(digests=True, num_samples=0)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.thread_seconds = dict.fromkeys(PARTS, 0.0)
        self.steady_seconds = dict.fromkeys(PARTS, 0.0)
        self.calls = 0
        self.call_s = call_s
        self.wall_s = self.ready_s = self.last_answers_s = 0.0
        self._part_s = 0.0
        self._ends = 0.0
        self.account = account or Account()
        self._watch(group)
        self.through = {phase: {"sent": 0, "received": 0} for phase in PHASES}
        self.system = dict.fromkeys(PHASES, 0.0)
        self.faults = dict.fromkeys(PHASES, 0)
        self.held = 0
        self.addresses = 0
        self._phase = "generate"

    def _watch(self, group: Any) -> None:
        """Count the driver's seconds for sending parts and receiving answers, since both overlap with the work."""
        wait = group.wait

        def waiting(*args: Any, **kwargs: Any) -> Any:
            ready = ready_s()
            with self._part(ANSWERS):
                values = wait(*args, **kwargs)
            self.ready_s -= ready_s() - ready
            if self.call_s:
                self.last_answers_s += time.monotonic() - self._ends
            self.calls += 1
            return values

        group.wait = waiting
        if not isinstance(group, InProcess):
            remote = group._remote

            def sending(worker: Any, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
                began = time.monotonic()
                sent_at = began + self._part_s  # assume that sending takes as long as for the previous part
                self._ends = sent_at + self.call_s
                with self._part(SENDS):
                    started = remote(worker, method, args, {**kwargs, "sent_at": sent_at} if self.call_s else kwargs)
                self._part_s = time.monotonic() - began
                return started

            group._remote = sending
        if self.weighed:
            execute = group.execute_func_rank_zero

            def executing(formula: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
                return self._weigh(data, execute(formula, data))

            group.execute_func_rank_zero = executing

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Count CPU seconds within the block: of the process, of this thread, and the scaled ones."""
        account = self.account
        clock = self.account.clock
        began = account.now()
        began_here = time.thread_time() - account.probes()
        steady = clock.now() if clock else 0.0
        yield
        self.seconds[name] += account.now() - began
        self.thread_seconds[name] += time.thread_time() - account.probes() - began_here
        if clock:
            self.steady_seconds[name] += clock.now() - steady

    def _weigh(self, data: DataProto, output: DataProto) -> DataProto:
        """Count the pickled bytes of a call's parts and answers."""
        workers = self.group.world_size
        with self.account.paused():
            through = self.through[self._phase]
            through["sent"] += sum(map(sent_bytes, data.chunk(workers)))
            answers = output.chunk(workers) if len(output) >= workers else [output]
            through["received"] += sum(map(sent_bytes, answers))
        return output

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase within the block."""
        self._phase = name
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        ready = ready_s()
        with self._part(name):
            yield
        self.wall_s += time.monotonic() - began
        self.ready_s += ready_s() - ready
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.system[name] += after.ru_stime - before.ru_stime
        self.faults[name] += after.ru_minflt - before.ru_minflt

    def call(self, method: str, data: DataProto) -> DataProto:
        """Call a method of all workers."""
        output: DataProto = getattr(self.group, method)(data)
        return self._weigh(data, output) if self.weighed else output

    def run(self) -> None:
        """Run the phases in the trainer's order."""
        with self.phase("generate"):
            batch = self.generate()
        with self.phase("infer"):
            batch = self.infer(batch)
        with self.phase("shape"):
            batch = self.shape(batch)
        self.held, self.addresses = dense_bytes(batch), address_bytes(batch)
        with self.phase("update"):
            self.call("update_actor", self.for_model(batch))
        with self.phase("finish"):
            self.finish(batch)

    def for_model(self, batch: DataProto) -> DataProto:
        """Select the columns that a model reads."""
        return batch.select(non_tensor_batch_keys=[])

    def generate(self) -> DataProto:
        """Make the requests, generate, check the responses, balance the batch and digest it."""
        from verl.trainer.ppo.phases import check_rollout

        prompt = self.tokens // 8
        prompts = DataProto.from_dict(
            {
                "input_ids": torch.full((self.rows // SAMPLES, prompt), 100_005),
                "attention_mask": torch.ones(self.rows // SAMPLES, prompt, dtype=torch.int64),
            },
            meta_info={"response_length": self.tokens - prompt},
        )
        uid = np.array([f"prompt {row // SAMPLES}" for row in range(self.rows)], dtype=object)
        if self.by_reference:
            prompts = lazy.by_reference(prompts, put=Held if isinstance(self.group, InProcess) else None)
            prompts.meta_info[lazy.BY_REFERENCE] = True
        requests = prompts.repeat(SAMPLES, interleave=True)
        requests.non_tensor_batch["uid"] = uid
        output = self.call("generate_sequences", self.for_model(requests))
        check_rollout(requests, output, 1, group=self.group)
        output.non_tensor_batch["uid"] = uid
        output.meta_info = {lazy.BY_REFERENCE: True} if self.by_reference else {}
        output.meta_info["global_token_num"] = tensors_of(output)["attention_mask"].sum(-1).tolist()
        # Rows of different lengths would be balanced over the workers, which reorders them.
        order = np.random.default_rng(0).permutation(self.rows)
        output.reorder(torch.from_numpy(order))
        self.row_order = np.argsort(order).tolist()
        self.record.phase("generate", output, self.row_order)
        return output

    def infer(self, batch: DataProto) -> DataProto:
        """Score, and compute log-probabilities and their metrics."""
        from verl.trainer.ppo.metric_utils import log_prob_metrics

        scored = self.call("score", batch.select(["responses", "response_mask"], []))
        output = self.call("compute_log_prob", self.for_model(batch))
        entropies = tensors_of(output).pop("entropys")
        assert isinstance(entropies, torch.Tensor)
        batch = batch.union(output).union(scored)
        log_prob_metrics(batch, entropies, "token-mean", None, self.group)
        batch = batch.union(self.call("compute_ref_log_prob", self.for_model(batch)))
        self.record.phase("infer", batch, self.row_order)
        return batch

    def shape(self, batch: DataProto) -> DataProto:
        """Subtract the KL penalty, compute rollout importance weights and GRPO's advantages."""
        from verl.algos.kl import FixedKLController
        from verl.trainer.ppo import shaping

        algorithm = AlgoConfig(adv_estimator="grpo", rollout_is=True, rollout_is_threshold=2.0)
        algorithm = AlgoConfig(**{**algorithm, "rollout_is_level": "sequence"})
        control = FixedKLController(0.1)
        batch, _ = shaping.apply_kl_penalty(batch, control, "kl", self.group)
        batch, _ = shaping.add_rollout_weights(batch, algorithm, self.group)
        batch = shaping.compute_advantage(batch, "grpo", group=self.group)
        self.record.phase("shape", batch, self.row_order)
        return batch

    def finish(self, batch: DataProto) -> None:
        """Compute the metrics of the step."""
        from verl.trainer.ppo.metric_utils import compute_data_metrics
        from verl.trainer.ppo.records import length_histogram

        compute_data_metrics(batch, use_critic=False, group=self.group)
        length_histogram(batch)


def total(seconds: dict[str, float]) -> float:
    """Return the seconds of all phases."""
    return sum(seconds[phase] for phase in PHASES)


# ---- measure

FITTED = [
    (512, 64, 8),
    (512, 64, 64),
    (512, 1024, 8),
    (512, 1024, 64),
    (2048, 64, 64),
    (2048, 256, 8),
    (2048, 256, 64),
    (8192, 32, 8),
    (8192, 32, 64),
    (8192, 32, 256),
    (1024, 128, 256),
    (512, 4096, 8),
    (1024, 2048, 64),
    (1024, 4096, 16),
    (16384, 32, 8),
    (32768, 16, 32),
    (2048, 4096, 8),
    (4096, 2560, 16),
    (1024, 12288, 32),
    (65536, 16, 512),
]
PREDICTED = [
    (4096, 128, 32),
    (1024, 768, 128),
    (16384, 32, 128),
    (4096, 64, 512),
    (65536, 16, 64),
    (2048, 4096, 32),
    (1024, 8192, 16),
    (2048, 6144, 16),
    (65536, 16, 128),
    (32768, 32, 64),
    (32768, 16, 256),
    (8192, 128, 128),
    (4096, 512, 64),
    (1024, 1024, 16),
    (3072, 1536, 48),
    (12288, 64, 96),
    (1536, 512, 24),
    (6144, 256, 192),
]
"""Sizes of steps: number of responses, tokens per response, workers. The model is fitted to the first list only."""
LARGE = [(4096, 8192, 8), (4096, 8192, 64), (4096, 8192, 512), (2048, 8192, 64)]
"""Sizes of ``--large``, to which the model is not fitted either; 4,096 x 8,192 takes about 8 GB of memory."""


def measure(arguments: argparse.Namespace) -> None:
    """Run all cases in several rounds; each case runs in a new driver process, which no other size has used."""
    cases = cases_of(arguments)
    if len(cases) > 1:
        order = random.Random(0)  # random, since the machine may be slower towards the end of a round
        for _, *size in [case for _ in range(arguments.rounds) for case in order.sample(cases, len(cases))]:
            own = [
                "--cases",
                "x".join(map(str, size)),
                "--rounds",
                "1",
            ]  # argparse takes the last value of a repeated option
            subprocess.run([sys.executable, *sys.argv, *own], check=True)
        return
    if arguments.keep_memory:
        keep_memory()
    if arguments.without_ray:
        if arguments.work_s:
            raise SystemExit("--work-s needs Ray: without it, workers do not run beside the driver")
        torch.set_num_threads(1)
        run_cases(arguments, cases, InProcess, lambda: 0, lambda seconds: 0)
        return
    import ray

    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.run.launch import LOCAL_SYSTEM_CONFIG

    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    ray.init(
        address="local",
        num_cpus=arguments.actors,
        include_dashboard=False,
        object_store_memory=arguments.store_mb << 20,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config=LOCAL_SYSTEM_CONFIG,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}},
    )
    torch.set_num_threads(1)
    cls = ray.remote(SimulatedWorker)
    actor = RayClassWithInitArgs(cls)
    if arguments.work_s:  # threads, so that the workers that one actor simulates work concurrently
        actor.update_options({"max_concurrency": -(-max(workers for *_, workers in cases) // arguments.actors)})
    pool = RayResourcePool([arguments.actors], max_colocate_count=1, name_prefix="simulated")
    actors = RayWorkerGroup(pool, actor, device_name="cpu")

    def group_of(workers: int, account: Account) -> Any:
        handles = [actors.workers[number % arguments.actors] for number in range(workers)]
        names = [f"simulated:{number}" for number in range(workers)]
        return RayWorkerGroup.from_detached(
            worker_names=names, worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls)
        )

    def work_for(seconds: float) -> int:
        if not arguments.work_s:
            return 0
        late = sum(actors.late_answers())
        actors.work_for(seconds)
        return late

    try:
        run_cases(arguments, cases, group_of, spilled_bytes, work_for)
    finally:
        ray.shutdown()


def keep_memory() -> None:
    """Let this process keep freed memory, as the trainer does with large batches."""
    from verl.utils.memory_utils import keep_freed_host_memory

    if not keep_freed_host_memory():
        raise SystemExit("--keep-memory needs glibc")


def spilled_bytes() -> int:
    """Return the bytes that the local object store has spilled to disk so far."""
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    return int(stats.spilled_bytes_total + stats.object_store_bytes_fallback)


Case = tuple[str, int, int, int]


def size_of(text: str) -> tuple[int, int, int]:
    """Parse a size given on the command line."""
    try:
        rows, tokens, workers = (int(number) for number in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write ROWSxTOKENSxWORKERS, as 4096x8192x64") from None
    return rows, tokens, workers


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases to run: whether the model is fitted to it, responses, tokens per response and workers."""
    sizes = arguments.cases or (LARGE if arguments.large else [*FITTED, *PREDICTED])
    return [("fit" if size in FITTED else "large" if size in LARGE else "predict", *size) for size in sizes]


def run_cases(
    arguments: argparse.Namespace,
    cases: Sequence[Case],
    group_of: Callable[[int, Account], Any],
    spilled: Callable[[], int],
    work_for: Callable[[float], int],
) -> None:
    """Run the cases in turn and append a line for each; stop if the object store is too small for a case.

    Args: ``work_for`` sets the duration of the workers' following calls, and returns how many answers since its last
        call took longer than the duration then set.
    """
    calls: dict[bool, int] = {}
    weights: dict[tuple[Any, ...], dict[str, dict[str, int]]] = {}
    with Path(arguments.out).open("a", encoding="utf-8") as file:
        for kind, rows, tokens, workers in list(cases) * (arguments.rounds * arguments.steps):
            for by_reference in [mode == "reference" for mode in arguments.columns]:
                # The first step of a size allocates its memory, which the later steps of a run reuse.
                case = (by_reference, rows, tokens, workers)
                first = case not in weights
                for weighed in [True] * first + [False] * (not first and not by_reference) + [False]:
                    # Through the driver, copies of large memory dominate; the steady clock's scale is wrong for them.
                    clock = SteadyClock() if by_reference and not arguments.without_ray else None
                    account = Account(clock)
                    Held.known.clear()
                    call_s = 0.0 if weighed else arguments.work_s / calls[by_reference]
                    work_for(call_s)
                    step = Step(group_of(workers, account), by_reference, rows, tokens, account, weighed, call_s)
                    gc.collect()
                    with clock or nullcontext():
                        step.run()
                    if weighed:
                        weights[case], calls[by_reference] = step.through, step.calls
                late = work_for(0.0)
                step.seconds[ANSWERS] += account.of_answers
                step.seconds[SENDS] += account.of_sends
                if lost := spilled():
                    raise SystemExit(
                        f"{rows} x {tokens}, {workers} workers: the object store has put {lost} bytes on the disk; "
                        f"--store-mb={arguments.store_mb} is too little"
                    )
                line = {
                    "kind": kind,
                    "by_reference": by_reference,
                    "rows": rows,
                    "tokens": tokens,
                    "workers": workers,
                    "work_s": arguments.work_s,
                    "wall_s": step.wall_s,
                    "ready_s": step.ready_s,
                    "last_answers_s": step.last_answers_s,
                    "late_answers": late,
                    "seconds": step.seconds,
                    "thread_seconds": step.thread_seconds,
                    "calls": step.calls,
                    "through_bytes": weights[case],
                    "system_seconds": step.system,
                    "page_faults": step.faults,
                    "held_bytes": step.held,
                    "address_bytes": step.addresses,
                    "with_ray": not arguments.without_ray,
                    "keeps_memory": arguments.keep_memory,
                }
                if clock:
                    line["steady_seconds"] = step.steady_seconds
                file.write(json.dumps(line) + "\n")
                file.flush()
                sys.stderr.write(f"{kind} {rows} x {tokens}, {workers} workers, by reference {by_reference}: ")
                steady = f", {total(step.steady_seconds):.2f} steady ones" if clock else ""
                sys.stderr.write(f"{total(step.seconds):.2f} CPU s{steady}, {total(step.system):.2f} in the kernel, ")
                sys.stderr.write(f"{step.wall_s:.2f} s with {arguments.work_s:g} s of work\n")
                del step


# ---- model


INLINE_BYTES = 100 << 10
"""Ray sends a message of at most this size within the call, and a larger one through the object store."""
MAPPED_BYTES = 32 << 20
"""glibc gets each allocation of this size from the kernel, which clears it page by page; it reuses smaller memory."""
CALLS = {"generate": 1, "infer": 3, "shape": 0, "update": 1, "finish": 0}
"""The calls of the workers in a step whose columns go through the driver, in order."""


@cache
def messages(rows: int, tokens: int, workers: int) -> list[tuple[int, int]]:
    """Return for each call the bytes of a part and of its answer.

    They are measured in a small step and scaled in proportion to its size. The parts of all calls but the first, which
    generates, also hold the token counts of all rows.
    """
    of_a_part = -(-rows // workers)
    of_others = len(pickle.dumps([tokens] * rows, protocol=5)) - len(pickle.dumps([tokens] * of_a_part, protocol=5))
    counts = [0] + [of_others] * (sum(CALLS.values()) - 1)
    small = part_messages(of_a_part, tokens)
    return [(sent + more, answer) for (sent, answer), more in zip(small, counts, strict=True)]


@cache
def part_messages(rows_of_a_part: int, tokens: int) -> list[tuple[int, int]]:
    """Return for each call the bytes of a part that holds all rows, and of its answer."""
    rows = min(max(SAMPLES, rows_of_a_part // SAMPLES * SAMPLES), max(SAMPLES, (1 << 21) // tokens))
    group = InProcess(1, Account())
    Step(group, False, rows // SAMPLES * SAMPLES, tokens).run()
    scale = rows_of_a_part / (rows // SAMPLES * SAMPLES)
    return [(round(sent * scale), round(answer * scale)) for sent, answer in group.messages]


def features(phase: str, by_reference: bool, rows: int, tokens: int, workers: int) -> list[float]:
    """Return the terms of the linear cost model of a phase.

    Through the driver: a constant, calls of a worker, messages through the object store, rows, megabytes sent and
    received, tokens, megabytes of columns so large that their memory is newly allocated each time, and rows times
    workers, because each worker gets the token counts of all rows.

    By reference: a constant, workers, rows, blocks, references, and rows times workers. After reordering, a part of a
    batch has rows of many blocks, and holds a reference to each of these blocks.
    """
    of_a_worker = -(-rows // workers)
    if by_reference:
        whole, rest = divmod(of_a_worker, ROWS_OF_A_BLOCK)
        sizes = [ROWS_OF_A_BLOCK] * whole + [rest] * (rest > 0)
        pairs = workers * workers * sum(1 - (1 - size / rows) ** of_a_worker for size in sizes)
        return [1.0, workers, rows, workers * len(sizes), pairs, workers * rows]
    first = {"generate": 0, "infer": 1, "update": 4}.get(phase, 0)
    calls = messages(rows, tokens, workers)
    calls = calls if phase in (ANSWERS, SENDS) else calls[first : first + CALLS[phase]]
    stored = sum((sent > INLINE_BYTES) + (answer > INLINE_BYTES) for sent, answer in calls)
    moved = sum(map(sum, calls))
    new = sum(size * rows * tokens for size in (4, 8) if size * rows * tokens >= MAPPED_BYTES)
    return [
        1.0,
        workers * len(calls),
        workers * stored,
        rows,
        workers * moved / 1e6,
        rows * tokens / 1e6,
        new / 1e6,
        workers * rows,
    ]


NAMES = {
    False: (
        "step",
        "call of a worker",
        "message in the store",
        "row",
        "MB moved",
        "million tokens",
        "MB of new memory",
        "row x worker",
    ),
    True: ("step", "worker", "row", "block", "reference", "row x worker"),
}


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares coefficients: the best solution over all subsets of columns."""
    scale = np.linalg.norm(matrix, axis=0)
    weighted = matrix / scale
    best = np.zeros(matrix.shape[1])
    least = float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(matrix.shape[1]), size)):
            values = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)[0]
            error = float(np.sum((weighted[:, chosen] @ values - target) ** 2))
            if (values >= 0).all() and error < least:
                best = np.zeros(matrix.shape[1])
                least = error
                best[chosen] = values / scale[chosen]
    return best


Lines = Sequence[dict[str, Any]]
WALL = ("wall_s", "ready_s", "last_answers_s", "late_answers")
"""The keys of a line that hold parts of the wall time of its step."""


def summaries(lines: Lines) -> list[dict[str, Any]]:
    """Merge the steps of each case into one line.

    The seconds of a phase are the median of the scaled CPU seconds, if the steps have these; else the minimum of the
    CPU seconds, because other work on the machine only adds to them. Steps with simulated work are compared with wall
    time, so their seconds are never scaled; ``slowness`` is their ratio to the scaled ones. The wall time and its parts
    are those of the shortest step.
    """
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line.get(name) for name in ("kind", "by_reference", "rows", "tokens", "workers", "keeps_memory"))
        cases.setdefault((*key, worked(line)), []).append(line)
    found = []
    for rounds in cases.values():
        of_step = min(rounds, key=lambda line: line.get("wall_s", float("inf")))
        one = {**rounds[0], **{name: of_step[name] for name in WALL if name in of_step}}
        one["thread_seconds"] = _each([line.get("thread_seconds", {}) for line in rounds], min)
        if steady := [line["steady_seconds"] for line in rounds if "steady_seconds" in line]:
            one["slowness"] = statistics.median(total(line["seconds"]) for line in rounds) / statistics.median(
                map(total, steady)
            )
        if steady and not worked(one):
            one["seconds"] = _each(steady, statistics.median)
        else:
            one["seconds"] = _each([line["seconds"] for line in rounds], min)
        found.append(one)
    return found


def _each(steps: Sequence[dict[str, float]], summary: Callable[[list[float]], float]) -> dict[str, float]:
    """Return a number for each phase and part, computed from its values in the steps."""
    counted = {part: [step[part] for step in steps if part in step] for part in PARTS}
    return {part: summary(seconds) for part, seconds in counted.items() if seconds}


def worked(line: dict[str, Any]) -> float:
    """Return the seconds of simulated work in the step of a line."""
    return float(line.get("work_s", 0.0))


def fit(lines: Lines, by_reference: bool) -> dict[str, np.ndarray]:
    """Fit the coefficients of each phase to the lines that are meant for fitting and have seconds of this phase."""
    for_fit = [line for line in lines if line["kind"] == "fit" and not worked(line)]
    found = {}
    for phase in PARTS:
        used = [line for line in for_fit if line["by_reference"] == by_reference and phase in line["seconds"]]
        if not used:
            continue
        matrix = np.array([_features(phase, line) for line in used])
        keep = matrix.any(axis=0)
        # Errors are relative to the phase, but a phase below a tenth of the step counts less.
        target = np.array([line["seconds"][phase] for line in used])
        weight = np.array([max(line["seconds"][phase], 0.1 * total(line["seconds"])) for line in used])
        found[phase] = np.zeros(matrix.shape[1])
        found[phase][keep] = non_negative(matrix[:, keep] / weight[:, None], target / weight)
    return found


def _features(phase: str, line: dict[str, Any]) -> list[float]:
    return features(phase, line["by_reference"], line["rows"], line["tokens"], line["workers"])


def predicted(models: dict[bool, dict[str, np.ndarray]], case: dict[str, Any]) -> dict[str, float]:
    """Predict the CPU seconds of a step on the driver."""
    model = models[case["by_reference"]]
    return {phase: float(np.dot(_features(phase, case), values)) for phase, values in model.items()}


def step_s(seconds: dict[str, float], calls: int, work_s: float, workers: int) -> float:
    """Predict the wall time of a step, given the driver's CPU seconds by part and ``work_s``, the work of each worker.

    The driver's work between calls adds to the time; sending and receiving overlap with the workers. If the seconds of
    sending were not measured, all of the driver's time except receiving counts as sending.
    """
    all_s = total(seconds)
    answers = min(seconds[ANSWERS], all_s)
    sends = min(seconds.get(SENDS, all_s), all_s - answers)
    of_calls = calls * queue(sends / calls, answers / calls, work_s / calls, workers)
    return all_s - answers - sends + of_calls


def queue(sends_s: float, answers_s: float, work_s: float, workers: int) -> float:
    """Predict the wall time of a call by a queueing model, in which the driver is the only server.

    The driver sends the parts one after the other. Each worker begins when it has its part, and takes ``work_s``. The
    driver receives the answers in the order of their arrival, after it has sent the last part.
    """
    now = sends_s
    for number in range(workers):
        arrival = (number + 1) * sends_s / workers + work_s
        now = max(now, arrival) + answers_s / workers
    return now


def phases(arguments: argparse.Namespace) -> None:
    """Print the seconds and the bytes of each phase."""
    read = [json.loads(line) for path in arguments.runs for line in Path(path).read_text(encoding="utf-8").splitlines()]
    sys.stdout.write("| responses | tokens | workers | columns | phase | CPU s | MB to workers | MB from workers |\n")
    sys.stdout.write("| --- " * 8 + "|\n")
    for line in summaries([line for line in read if not worked(line)]):
        named = [line["rows"], line["tokens"], line["workers"], "reference" if line["by_reference"] else "driver"]
        moved = line["through_bytes"]
        rows = [(phase, line["seconds"][phase], *moved[phase].values()) for phase in PHASES]
        rows += [("all", total(line["seconds"]), *(sum(moved[p][way] for p in PHASES) for way in ("sent", "received")))]
        for phase, seconds, sent, received in rows:
            cells = [*named, phase, f"{seconds:.3f}", f"{sent / 1e6:.2f}", f"{received / 1e6:.2f}"]
            sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")


def compare_waiting(lines: Lines, models: dict[bool, dict[str, np.ndarray]], say: Callable[[str], Any]) -> None:
    """Print the wall time of steps with simulated work next to three predictions of the queueing model.

    Its input is first the predicted CPU seconds, at the core's speed in the run; then the CPU seconds of the run; then
    those of the run's main thread.
    """
    if not lines:
        return
    names = "rows | tokens | workers | columns | work s | late answers | wall s | predicted s | error | added s"
    names += " | without a processor s | last answers s | predicted added s | by its CPU s | by its main thread"
    say(f"\n| {names} |")
    say("| --- " * (names.count("|") + 1) + "|")
    for line in lines:
        work = worked(line)
        expected = {part: seconds * line.get("slowness", 1.0) for part, seconds in predicted(models, line).items()}
        sources = (expected, line["seconds"], line["thread_seconds"])
        steps = [step_s(seconds, line["calls"], work, line["workers"]) for seconds in sources]
        cells = [line["rows"], line["tokens"], line["workers"], "reference" if line["by_reference"] else "driver"]
        cells += [f"{work:g}", line["late_answers"], f"{line['wall_s']:.2f}", f"{steps[0]:.2f}"]
        cells += [f"{steps[0] / line['wall_s'] - 1:+.1%}", f"{line['wall_s'] - work:.2f}"]
        cells += [f"{line[name]:.2f}" for name in ("ready_s", "last_answers_s")]
        cells += [f"{step - work:.2f}" for step in steps]
        say(f"| {' | '.join(map(str, cells))} |")


def model(arguments: argparse.Namespace) -> None:
    """Print the coefficients, predictions next to measurements, and predictions of sizes too large to measure."""
    read = [json.loads(line) for path in arguments.runs for line in Path(path).read_text(encoding="utf-8").splitlines()]
    lines = summaries([line for line in read if not worked(line)])
    if len({line.get("keeps_memory", False) for line in lines if not line["by_reference"]}) > 1:
        raise SystemExit("the runs mix --keep-memory and its absence: pass runs of one kind")
    if len({"slowness" in line for line in lines if line["by_reference"]}) > 1:
        raise SystemExit("the runs by reference mix steady and other CPU seconds: pass runs of one kind")
    say: Callable[[str], Any] = lambda text: sys.stdout.write(text + "\n")  # noqa: E731
    models = {by_reference: fit(lines, by_reference) for by_reference in (False, True)}
    if not all(models.values()):
        raise SystemExit(
            "the model is fitted to columns through the driver and by reference, of the sizes that `measure` runs "
            "without --large and --cases: add such runs, or print these with `phases`"
        )
    for by_reference, phases in models.items():
        say(f"\n{'by reference' if by_reference else 'through the driver'}, CPU microseconds:")
        say(f"| phase | {' | '.join(NAMES[by_reference])} |")
        say("| --- " * (1 + len(NAMES[by_reference])) + "|")
        for name, values in phases.items():
            say(f"| {name} | {' | '.join(f'{value * 1e6:.4g}' for value in values)} |")
    say("\n| kind | by reference | rows | tokens | workers | measured s | predicted s | error |")
    say("| --- " * 8 + "|")
    for line in lines:
        expected = total(predicted(models, line))
        measured = total(line["seconds"])
        cells = [line["kind"], line["by_reference"], line["rows"], line["tokens"], line["workers"]]
        cells += [f"{measured:.2f}", f"{expected:.2f}", f"{expected / measured - 1:+.1%}"]
        say(f"| {' | '.join(map(str, cells))} |")
    compare_waiting(summaries([line for line in read if worked(line)]), models, say)
    say(
        "\n| rows | workers | mode | "
        + " | ".join(PHASES)
        + " | sum s | added to a step s | columns held GB | through GB |"
    )
    say("| --- " * (7 + len(PHASES)) + "|")
    for rows in (4096, 16384, 65536):
        for workers in (8, 64, 512):
            for by_reference in (False, True):
                case = {"by_reference": by_reference, "rows": rows, "tokens": 8192, "workers": workers}
                seconds = predicted(models, case)
                like = next(line for line in lines if line["by_reference"] == by_reference and line["tokens"] >= 256)
                scale = rows * 8192 / (like["rows"] * like["tokens"])
                held = rows * like["address_bytes"] / like["rows"] if by_reference else like["held_bytes"] * scale
                of_calls = [] if by_reference else messages(rows, 8192, workers)
                cells = [str(rows), str(workers), "reference" if by_reference else "driver"]
                step = step_s(seconds, like["calls"], arguments.work_s, workers)
                cells += [f"{seconds[phase]:.1f}" for phase in PHASES]
                cells += [f"{total(seconds):.1f}", f"{step - arguments.work_s:.1f}"]
                through = workers * sum(map(sum, of_calls))
                say(f"| {' | '.join([*cells, f'{held / 1e9:.2f}', f'{through / 1e9:.1f}'])} |")


def main() -> None:
    """Run the chosen command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", default="driver_scaling.jsonl")
    measuring.add_argument("--actors", type=int, default=2, help="number of actors that simulate the workers")
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--steps", type=int, default=1, help="counted steps per size and round (default: 1)")
    measuring.add_argument("--store-mb", type=int, default=6000, help="size of the object store")
    measuring.add_argument(
        "--cases", nargs="+", type=size_of, metavar="ROWSxTOKENSxWORKERS", help="only these sizes, such as 4096x8192x64"
    )
    measuring.add_argument("--columns", nargs="+", choices=("driver", "reference"), default=("driver", "reference"))
    measuring.add_argument(
        "--large", action="store_true", help="only the largest sizes, to which the model is not fitted"
    )
    measuring.add_argument("--keep-memory", action="store_true", help="let the driver keep freed memory")
    measuring.add_argument(
        "--work-s", type=float, default=0.0, help="simulated seconds of work of each worker in a step"
    )
    measuring.add_argument("--without-ray", action="store_true", help="run without Ray and its costs")
    measuring.set_defaults(run=measure)
    modelling = commands.add_parser("model", help="needs runs of measure without --large")
    modelling.add_argument("runs", nargs="+")
    modelling.add_argument("--work-s", type=float, default=300.0, help="seconds of work of each worker in a step")
    modelling.set_defaults(run=model)
    showing = commands.add_parser("phases")
    showing.add_argument("runs", nargs="+")
    showing.set_defaults(run=phases)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
