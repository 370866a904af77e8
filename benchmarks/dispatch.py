"""Cost of moving a batch between the driver and its workers, in multiples of one pass.

A pass is ``torch.addcmul(a, b, c)`` over (1024, 2048) fp32.

python benchmarks/dispatch.py                        a table
python benchmarks/dispatch.py --check                exit 1 where a cost is above its limit
python benchmarks/dispatch.py --only pickle --json
python benchmarks/dispatch.py --against ../earlier   alternate with another checkout, case by case

It measures in one thread. The pass and the measured call alternate in one process, and the medians are divided. Cases
with Ray are measured in wall time, since several processes work at once; the others in CPU time. The process keeps
freed memory, as the trainer does with batches of these sizes; ``--new-memory`` leaves that to the C library. Results:
docs/perf/dispatch.md.
"""

import argparse
import contextlib
import json
import logging
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROWS = 1024
WIDTH = 2048
SAMPLES = 8
WARMUP = 2
FILTER_ROWS = 20_000
OBJECT_STORE_BYTES = 1 << 30
ROUNDS = 3  # with --against: number of processes of each checkout

Clock = Callable[[], float]


class Case(NamedTuple):
    """A measured call, its limit in passes (None: no limit) and its clock."""

    name: str
    run: Callable[[], Any]
    limit: float | None = None
    clock: Clock = time.process_time
    repeats: int | None = None


def make_batch(megabytes: int, rows: int = ROWS) -> Any:
    """Make a batch as after generation: token ids and masks, a column of numbers per token, and objects per row."""
    from verl import DataProto

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(WIDTH) < lengths).long()
    ids: dict[str, Tensor] = {
        "input_ids": torch.randint(0, 150_000, (rows, WIDTH), generator=generator) * mask,
        "attention_mask": mask,
        "position_ids": mask.cumsum(dim=-1),
    }
    tensors = {name: ids[name] for name in list(ids)[: 2 if megabytes < 96 else 3]}
    per_token = rows * WIDTH * 4
    floats = (megabytes * 2**20 - sum(value.nbytes for value in tensors.values())) // per_token
    names = ("old_log_probs", "ref_log_prob", "values", "token_level_scores", "advantages", "returns")
    for name in names[: max(1, floats)]:
        tensors[name] = torch.randn(rows, WIDTH, generator=generator)
    uids = [str(uuid.UUID(int=i // SAMPLES)) for i in range(rows)]
    return DataProto.from_dict(tensors, {"uid": uids, "data_source": ["math"] * rows}, {"temperature": 1.0})


def touched(data: Any) -> float:
    """Read every number of a batch, as a worker that computes with it does."""
    return sum(float(value.sum()) for value in data.batch.values())


# ---- in one process


def pickle_cases() -> Iterator[Case]:
    """Yield pickling and loading of 96 MB: as one byte string, through a file, and with out-of-band buffers."""
    from verl import DataProto

    data = make_batch(96)
    folder = tempfile.mkdtemp(prefix="bench_dispatch_", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    path = Path(folder, "batch.pkl")

    def in_band() -> None:
        loaded = pickle.loads(pickle.dumps(data, protocol=5))
        assert loaded.batch.batch_size == data.batch.batch_size

    def on_disk() -> None:
        data.save_to_disk(path)
        DataProto.load_from_disk(path).batch  # noqa: B018
        path.unlink()

    def out_of_band() -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        # Ray also gives read-only buffers.
        pickle.loads(text, buffers=[memoryview(buffer).toreadonly() for buffer in buffers]).batch  # noqa: B018

    yield Case("pickle and load, 96 MB", in_band, 40.0)
    yield Case("save and load a file, 96 MB", on_disk)
    yield Case("load from read-only buffers, 96 MB", out_of_band)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        os.rmdir(folder)


def row_cases() -> Iterator[Case]:
    """Yield padding to a divisor, reordering and concatenation of 96 MB."""
    from verl.protocol import pad_dataproto_to_divisor

    uneven = make_batch(96)[: ROWS - 3]
    data = make_batch(96)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    yield Case("pad to a divisor, 96 MB", lambda: pad_dataproto_to_divisor(uneven, 64))
    yield Case("reorder, 96 MB", lambda: data.reorder(order))
    halves = [make_batch(96)[: ROWS // 2], make_batch(96)[ROWS // 2 :]]
    yield Case("concat of two halves, 96 MB", lambda: type(data).concat(halves))


def filter_cases() -> Iterator[Case]:
    """Yield the filter of overlong prompts over 20,000 rows, with a BPE tokenizer and a chat template."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf

    from verl.utils.dataset.rl_dataset import RLHFDataset

    logging.getLogger("verl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choice(words, rng.integers(5, 60))) for _ in range(FILTER_ROWS)]
    tokenizer = _tokenizer(texts[:2000])
    with tempfile.TemporaryDirectory(prefix="bench_dispatch_") as folder:
        path = str(Path(folder, "prompts.parquet"))
        columns = {
            "prompt": [[{"role": "user", "content": text}] for text in texts],
            "data_source": ["math"] * FILTER_ROWS,
            "reward_model": [{"style": "rule", "ground_truth": "2"}] * FILTER_ROWS,
        }
        pq.write_table(pa.table(columns), path)
        for limit, name in ((1024, "far below the limit"), (100, "around the limit")):
            options = {"max_prompt_length": limit, "filter_overlong_prompts_workers": 1}
            node = OmegaConf.create({**options, "filter_overlong_prompts": False})
            rows = RLHFDataset(path, tokenizer, node).dataframe
            dataset = RLHFDataset(path, tokenizer, OmegaConf.create({**options, "filter_overlong_prompts": True}))

            def run(dataset: Any = dataset, rows: Any = rows) -> None:
                assert len(dataset.maybe_filter_out_long_prompts(rows)) == len(dataset)

            yield Case(f"20,000 prompts {name}", run, 1000.0 if limit < 1000 else 600.0, repeats=3)


def _tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|end|>", eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
        "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    return tokenizer


# ---- with Ray


def ray_cases() -> Iterator[Case]:
    """Yield transfers through the object store, and calls of two workers."""
    import ray

    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.run.launch import LOCAL_SYSTEM_CONFIG

    class EchoWorker(Worker):
        """A worker that returns its input, with or without reading it."""

        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info("all", dp_rank=self.rank, is_collect=True)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="all"))
        def read_and_return(self, data: DataProto) -> DataProto:
            touched(data)
            return data

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def pass_on(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def ready(self) -> int:
            torch.set_num_threads(1)
            return self.rank

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, logging_level=logging.ERROR,
        _system_config=LOCAL_SYSTEM_CONFIG,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}},
    )  # fmt: skip
    try:
        data = make_batch(96)

        def put_and_get(use: Callable[[DataProto], Any]) -> None:
            use(ray.get(ray.put(data)))

        wall = time.perf_counter
        yield Case("put and get, 96 MB", lambda: put_and_get(lambda got: got.batch), 30.0, wall)
        yield Case("put, get and read, 96 MB", lambda: put_and_get(touched), None, wall)
        small = make_batch(64)
        pool = RayResourcePool([2], max_colocate_count=1, name_prefix="bench")
        group = RayWorkerGroup(
            pool, RayClassWithInitArgs(ray.remote(EchoWorker)), device_name="cpu", call_timeout_s=300
        )
        group.ready()
        yield Case("two workers and back, read, 64 MB", lambda: touched(group.read_and_return(small)), 90.0, wall)
        yield Case("two workers and back, 64 MB", lambda: group.pass_on(small).batch, 90.0, wall)
        group.kill()
    finally:
        ray.shutdown()


# ---- measuring


def seconds(run: Callable[[], Any], clock: Clock) -> float:
    """Return the time of one call."""
    start = clock()
    run()
    return clock() - start


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Alternate the case and the pass, and divide the medians; also report the time of the first call."""
    a, b, c = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3))
    one_pass = lambda: torch.addcmul(a, b, c)  # noqa: E731
    count = min(repeats, case.repeats or repeats)
    seconds(one_pass, case.clock)
    pairs = [(seconds(one_pass, case.clock), seconds(case.run, case.clock)) for _ in range(WARMUP + count)]
    pass_s, case_s = (statistics.median(times) for times in zip(*pairs[WARMUP:], strict=True))
    cost = case_s / pass_s
    over = case.limit is not None and cost > case.limit
    return {"name": case.name, "passes": round(cost, 2), "limit": case.limit, "ms": round(case_s * 1e3, 2),
            "pass_ms": round(pass_s * 1e3, 3), "first_ms": round(pairs[0][1] * 1e3, 2), "over": over}  # fmt: skip


GENERATORS = {"pickle": pickle_cases, "rows": row_cases, "filter": filter_cases, "ray": ray_cases}


def run_here(parts: list[str], only: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure the cases of some parts in this process."""
    for part in parts:
        for case in GENERATORS[part]():
            if only in case.name:
                yield measure(case, repeats)


def keep_memory() -> None:
    """Keep freed memory, as the trainer does with these batches; a checkout may be too old to have the function."""
    with contextlib.suppress(ImportError):
        from verl.utils.memory_utils import keep_freed_host_memory

        keep_freed_host_memory()


def run_in(checkout: Path, part: str, only: str, repeats: int, new_memory: bool) -> list[dict[str, Any]]:
    """Measure the cases of a part in a new process that imports ``verl`` from a checkout."""
    command = [sys.executable, __file__, "--json", "--parts", part, "--only", only, "--repeats", str(repeats)]
    command += ["--new-memory"] if new_memory else []
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=checkout, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(other: Path, parts: list[str], only: str, repeats: int, new_memory: bool) -> None:
    """Alternate processes of another checkout and this one, and print the medians of both."""
    here = Path(__file__).resolve().parents[1]
    print(f"{'':38}{'before':>18}{'after':>18}{'ratio':>7}{'limit':>7}")
    for part in parts:
        found: dict[str, dict[Path, list[dict[str, Any]]]] = {}
        for round_ in range(ROUNDS):
            for checkout in (other, here) if round_ % 2 == 0 else (here, other):
                for row in run_in(checkout, part, only, repeats, new_memory):
                    found.setdefault(row["name"], {}).setdefault(checkout, []).append(row)
        for name, sides in found.items():
            middle = {
                side: sorted(rows, key=lambda row: float(row["passes"]))[len(rows) // 2] for side, rows in sides.items()
            }
            before = middle[other]
            after = middle[here]
            texts = [f"{row['passes']:.1f} ({row['ms']:.0f} ms)" for row in (before, after)]
            ratio = after["passes"] / before["passes"]
            limit = "" if after["limit"] is None else f"{after['limit']:g}"
            print(f"{name:38}{texts[0]:>18}{texts[1]:>18}{ratio:7.2f}{limit:>7}", flush=True)


def main() -> int:
    """Measure and report; return 1 if ``--check`` finds a cost above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure only cases whose name contains this text")
    parser.add_argument("--parts", nargs="+", choices=GENERATORS, default=list(GENERATORS), help="default: all")
    parser.add_argument("--repeats", type=int, default=9, help="measured calls of each case (default: 9)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a cost is above its limit")
    parser.add_argument("--json", action="store_true", help="one JSON line per case instead of the table")
    parser.add_argument("--new-memory", action="store_true", help="return freed memory to the system, as in small runs")
    parser.add_argument("--against", type=Path, help="another checkout, measured alternately with this one")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if args.against is not None:
        if not (args.against / "verl").is_dir():
            parser.error(f"--against must be a checkout of this project, {args.against} has no folder verl")
        compare(args.against.resolve(), args.parts, args.only, args.repeats, args.new_memory)
        return 0
    torch.set_num_threads(1)
    if not args.new_memory:
        keep_memory()
    if not args.json:
        print(f"{'':38}{'passes':>8}{'limit':>7}{'ms':>9}{'first ms':>9}{'pass ms':>9}")
    results = []
    for row in run_here(args.parts, args.only, args.repeats):
        results.append(row)
        limit = "" if row["limit"] is None else f"{row['limit']:g}"
        times = f"{row['ms']:9.2f}{row['first_ms']:9.2f}{row['pass_ms']:9.2f}"
        line = f"{row['name']:38}{row['passes']:8.2f}{limit:>7}{times}"
        print(json.dumps(row) if args.json else line + ("  OVER" if row["over"] else ""), flush=True)
    if not results:
        parser.error(f"no case has {args.only!r} in its name")
    return int(args.check and any(row["over"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
