"""Measure the cost of a training step on the driver, with columns sent through it and with columns by reference.

``measure`` runs steps without models, but with real batches, a real worker group, and the trainer's functions for each
phase. A few actors simulate any number of workers; the driver sends and receives as many messages as with real ones.
Each run appends one JSON line. ``phases`` prints the seconds and bytes of each phase:

    python benchmarks/driver_scaling.py measure --out runs.jsonl
    python benchmarks/driver_scaling.py phases runs.jsonl
"""

import argparse
import gc
import io
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl import DataProto
from verl.algos.config import AlgoConfig
from verl.protocol import lazy, tensors_of
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

PHASES = ("generate", "infer", "shape", "update", "finish")
SAMPLES = 8
ROWS_OF_A_BLOCK = 24
"""Number of rows, of 8,192 tokens, in a block of generated columns."""


class SimulatedWorker(Worker):
    """A worker without a model, whose answers have the sizes of a real worker's."""

    def __init__(self, block_rows: int = ROWS_OF_A_BLOCK) -> None:
        super().__init__()
        self.block_rows = block_rows

    def _blocks(self, data: DataProto, row_bytes: int) -> None:
        lazy.BLOCK_BYTES = self.block_rows * row_bytes

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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return log-probabilities and entropies."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 8 * shape[1])
        return DataProto.from_dict({"old_log_probs": torch.full(shape, -0.5), "entropys": torch.full(shape, 0.1)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return log-probabilities of a reference."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 4 * shape[1])
        return DataProto.from_dict({"ref_log_prob": torch.full(shape, -0.6)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        """Return one score for each response, at its last token."""
        shape = tensors_of(data)["response_mask"].shape
        self._blocks(data, 4 * shape[1])
        scores = torch.zeros(shape)
        scores[:, -1] = torch.arange(shape[0]) % 3
        return DataProto.from_dict({"token_level_scores": scores})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Return metrics only."""
        return DataProto(meta_info={"metrics": {"actor/loss": 0.0}})


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
        sent = [pack(part) for part in parts]
        with self.account.paused():
            answers = [pack(self._answer(work, unpack(part))) for part in sent]
        self.messages.append((packed_bytes(sent[0]), packed_bytes(answers[0])))
        return DataProto.concat([unpack(answer) for answer in answers])

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
    """Counts CPU seconds of this process, except those of simulated workers in it."""

    def __init__(self) -> None:
        self.left_out = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the CPU seconds of the block."""
        began = time.process_time()
        yield
        self.left_out += time.process_time() - began

    def now(self) -> float:
        """Return the counted CPU seconds so far."""
        return time.process_time() - self.left_out


# ---- one step


class Step:
    """One step of a driver, phase by phase.

    With ``weighed``, ``through`` holds the bytes of all messages of a phase, to and from the workers; the seconds of
    such a step are not meaningful, since messages are pickled twice.
    """

    def __init__(
        self,
        group: Any,
        by_reference: bool,
        rows: int,
        tokens: int,
        account: Account | None = None,
        weighed: bool = False,
    ) -> None:
        from verl.trainer.ppo.records import StepRecord

        self.group = group
        self.weighed = weighed
        self.by_reference = by_reference
        self.rows = rows
        self.tokens = tokens
        self.record = StepRecord(digests=True, num_samples=0)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.account = account or Account()
        self.through = {phase: {"sent": 0, "received": 0} for phase in PHASES}
        self.system = dict.fromkeys(PHASES, 0.0)
        self.faults = dict.fromkeys(PHASES, 0)
        self._phase = "generate"
        if weighed:
            execute = group.execute_func_rank_zero

            def executing(formula: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
                return self._weigh(data, execute(formula, data))

            group.execute_func_rank_zero = executing

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
        began = self.account.now()
        yield
        self.seconds[name] += self.account.now() - began
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

SIZES = [(4096, 8192, 8), (4096, 8192, 64), (4096, 8192, 512), (2048, 8192, 64)]
"""Sizes of steps: number of responses, tokens per response, workers; 4,096 x 8,192 takes about 8 GB of memory."""


def measure(arguments: argparse.Namespace) -> None:
    """Run all cases in several rounds; each case runs in a new driver process, which no other size has used."""
    cases = arguments.cases or SIZES
    if len(cases) > 1:
        order = random.Random(0)  # random, since the machine may be slower towards the end of a round
        for size in [case for _ in range(arguments.rounds) for case in order.sample(cases, len(cases))]:
            own = ["--cases", "x".join(map(str, size)), "--rounds", "1"]  # argparse takes the last value of an option
            subprocess.run([sys.executable, *sys.argv, *own], check=True)
        return
    if arguments.keep_memory:
        keep_memory()
    if arguments.without_ray:
        torch.set_num_threads(1)
        run_cases(arguments, cases, InProcess, lambda: 0)
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
    pool = RayResourcePool([arguments.actors], max_colocate_count=1, name_prefix="simulated")
    actors = RayWorkerGroup(pool, actor, device_name="cpu")

    def group_of(workers: int, account: Account) -> Any:
        handles = [actors.workers[number % arguments.actors] for number in range(workers)]
        names = [f"simulated:{number}" for number in range(workers)]
        return RayWorkerGroup.from_detached(
            worker_names=names, worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls)
        )

    try:
        run_cases(arguments, cases, group_of, spilled_bytes)
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


Case = tuple[int, int, int]


def size_of(text: str) -> Case:
    """Parse a size given on the command line."""
    try:
        rows, tokens, workers = (int(number) for number in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write ROWSxTOKENSxWORKERS, as 4096x8192x64") from None
    return rows, tokens, workers


def run_cases(
    arguments: argparse.Namespace,
    cases: Sequence[Case],
    group_of: Callable[[int, Account], Any],
    spilled: Callable[[], int],
) -> None:
    """Run the cases in turn and append a line for each; stop if the object store is too small for a case."""
    weights: dict[tuple[Any, ...], dict[str, dict[str, int]]] = {}
    with Path(arguments.out).open("a", encoding="utf-8") as file:
        for rows, tokens, workers in list(cases) * (arguments.rounds * arguments.steps):
            for by_reference in [mode == "reference" for mode in arguments.columns]:
                # The first step of a size allocates its memory, which the later steps of a run reuse.
                case = (by_reference, rows, tokens, workers)
                first = case not in weights
                for weighed in [True] * first + [False] * (not first and not by_reference) + [False]:
                    account = Account()
                    Held.known.clear()
                    step = Step(group_of(workers, account), by_reference, rows, tokens, account, weighed)
                    gc.collect()
                    step.run()
                    if weighed:
                        weights[case] = step.through
                if lost := spilled():
                    raise SystemExit(
                        f"{rows} x {tokens}, {workers} workers: the object store has put {lost} bytes on the disk; "
                        f"--store-mb={arguments.store_mb} is too little"
                    )
                line = {
                    "by_reference": by_reference,
                    "rows": rows,
                    "tokens": tokens,
                    "workers": workers,
                    "seconds": step.seconds,
                    "through_bytes": weights[case],
                    "system_seconds": step.system,
                    "page_faults": step.faults,
                    "with_ray": not arguments.without_ray,
                    "keeps_memory": arguments.keep_memory,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
                sys.stderr.write(f"{rows} x {tokens}, {workers} workers, by reference {by_reference}: ")
                sys.stderr.write(f"{total(step.seconds):.2f} CPU s, {total(step.system):.2f} in the kernel\n")
                del step


# ---- phases


def summaries(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the steps of each case into one line with the least CPU seconds, to which other work only adds."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("by_reference", "rows", "tokens", "workers", "keeps_memory"))
        cases.setdefault(key, []).append(line)
    return [
        {**steps[0], "seconds": {phase: min(step["seconds"][phase] for step in steps) for phase in PHASES}}
        for steps in cases.values()
    ]


def phases(arguments: argparse.Namespace) -> None:
    """Print the seconds and the bytes of each phase."""
    read = [json.loads(line) for path in arguments.runs for line in Path(path).read_text(encoding="utf-8").splitlines()]
    sys.stdout.write("| responses | tokens | workers | columns | phase | CPU s | MB to workers | MB from workers |\n")
    sys.stdout.write("| --- " * 8 + "|\n")
    for line in summaries(read):
        named = [line["rows"], line["tokens"], line["workers"], "reference" if line["by_reference"] else "driver"]
        moved = line["through_bytes"]
        rows = [(phase, line["seconds"][phase], *moved[phase].values()) for phase in PHASES]
        rows += [("all", total(line["seconds"]), *(sum(moved[p][way] for p in PHASES) for way in ("sent", "received")))]
        for phase, seconds, sent, received in rows:
            cells = [*named, phase, f"{seconds:.3f}", f"{sent / 1e6:.2f}", f"{received / 1e6:.2f}"]
            sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")


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
    measuring.add_argument("--keep-memory", action="store_true", help="let the driver keep freed memory")
    measuring.add_argument("--without-ray", action="store_true", help="run without Ray and its costs")
    measuring.set_defaults(run=measure)
    showing = commands.add_parser("phases")
    showing.add_argument("runs", nargs="+")
    showing.set_defaults(run=phases)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
