"""Measure vLLM and SGLang alternately on CPU: start, weight sync and generation, with one worker and with two.

python benchmarks/engines.py

Each measurement is a set of fresh processes with a training engine (FSDP2), a rollout and the sharding manager between
them, as in a training run. With tensor parallelism 2 two workers share an engine. Ray, which owns the actor of SGLang's
engine, starts before the clock, since it is already there in a training run. The last line printed is JSON.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from countdown import END, PAD, make_inputs
from process_tree import ProcessTree

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
ENGINES = ("vllm", "sglang")
RUN_TIMEOUT_S = 900.0
FIGURES = {
    "engine_s": "engine starts, s",
    "first_answer_s": "until the first answer, s",
    "sync_s": "sync of the weights, s",
    "generation_s": "generation, s",
    "generation_cpu_s": "CPU seconds of a generation",
    "peak_pss_gb": "memory of all processes, GB",
}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2], help="sizes (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turn (default: 3)")
    parser.add_argument("--repeats", type=int, default=7, help="syncs and generations of a run (default: 7)")
    sizes = {"hidden": 256, "layers": 4, "vocab": 1000, "prompts": 16, "samples": 8, "prompt-length": 32, "tokens": 32}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--out", type=Path, help="folder for inputs and logs (default: a temporary one)")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one worker


def run_worker(args: argparse.Namespace) -> None:
    """Start trainer and engine, sync and generate a few times, and write the seconds of each to a file."""
    import torch
    import torch.distributed as dist

    from verl.utils import envs
    from verl.utils.device.gloo import use_one_thread

    world = args.tensor_parallel[0]
    envs.write(
        {"RANK": str(args.rank), "LOCAL_RANK": str(args.rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    )
    torch.set_num_threads(1)
    use_one_thread()
    dist.init_process_group("gloo", init_method=f"file://{args.out}/store", rank=args.rank, world_size=world)
    if args.engine == "sglang" and args.rank == 0:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer, model_config = start_trainer(args)
    dist.barrier()
    from verl.workers.rollout import build_rollout
    from verl.workers.sharding_manager import build_sharding_manager

    started = time.perf_counter()
    rollout = build_rollout(rollout_config(args), model_config, trainer)
    engine_s = time.perf_counter() - started
    manager = build_sharding_manager(trainer, rollout)
    trainer.weights_version += 1
    with manager:
        rollout.generate_sequences(prompts(args, 1, 1, 0))
    lines: list[dict[str, float]] = [{"engine_s": engine_s, "first_answer_s": time.perf_counter() - started}]
    for number in range(args.repeats):
        trainer.weights_version += 1
        dist.barrier()
        before = cpu_seconds()
        with manager:
            synced = cpu_seconds()
            output = rollout.generate_sequences(prompts(args, args.prompts, args.samples, number))
            generated = cpu_seconds()
        assert int(output.batch["response_mask"].sum()) == args.prompts * args.samples * args.tokens
        seconds = {"sync_s": manager.last_sync["seconds"], "generation_s": rollout.last_generation["seconds"]}
        lines.append(seconds | {"sync_cpu_s": synced - before, "generation_cpu_s": generated - synced})
    dist.barrier()
    (args.out / f"{args.rank}.json").write_text(json.dumps(lines), encoding="utf-8")
    if args.engine == "sglang":
        rollout.shutdown()
        if args.rank == 0:
            ray.shutdown()


def start_trainer(args: argparse.Namespace) -> tuple[Any, Any]:
    """Start the training engine; return it with the configuration of its model."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(path=str(args.out.parent / "inputs" / "model"), load_tokenizer=False)
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(strategy="fsdp2"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine, model


def rollout_config(args: argparse.Namespace) -> Any:
    """Return the rollout configuration, which is the same for vLLM and SGLang."""
    from verl.workers.config import RolloutConfig

    return RolloutConfig(
        name=args.engine,
        prompt_length=args.prompt_length,
        response_length=args.tokens,
        dtype="float32",
        ignore_eos=True,
        calculate_log_probs=True,
        tensor_model_parallel_size=args.tensor_parallel[0],
        max_num_seqs=args.prompts * args.samples,
        gpu_memory_utilization=0.2,
    )


def prompts(args: argparse.Namespace, count: int, samples: int, seed: int) -> Any:
    """Return a batch of random prompts, each repeated."""
    import numpy as np
    import torch

    from verl.protocol import DataProto

    draw = np.random.default_rng(seed)
    rows = draw.integers(3, args.vocab, (count, args.prompt_length)).repeat(samples, axis=0)
    raw = np.empty(len(rows), dtype=object)
    raw[:] = rows.tolist()
    ids = torch.from_numpy(rows)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(args.prompt_length).expand_as(ids).contiguous(),
        },
        non_tensors={"raw_prompt_ids": raw},
        meta_info={"eos_token_id": END, "pad_token_id": PAD, "global_steps": seed},
    )


_TREE = ProcessTree(os.getpid())


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this worker and all processes that it has started."""
    return sum(_TREE.cpu_seconds().values())


# ---- all runs


def measure(engine: str, size: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run an engine once; return its figures, each the median over the run of the slowest worker's seconds."""
    folder.mkdir(parents=True)
    words = [sys.executable, __file__, "--engine", engine, "--tensor-parallel", str(size), "--out", str(folder)]
    for name in ("repeats", "hidden", "layers", "vocab", "prompts", "samples", "prompt_length", "tokens"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{HERE}"}
    deadline = time.monotonic() + RUN_TIMEOUT_S
    tree = ProcessTree(os.getpid())
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        workers = [
            subprocess.Popen([*words, "--rank", str(rank)], env=env, stdout=log, stderr=log) for rank in range(size)
        ]
        try:
            while any(worker.poll() is None for worker in workers):
                if time.monotonic() > deadline or any(worker.poll() for worker in workers):
                    raise RuntimeError(f"a worker has failed, or has not ended; see {folder}/output.log")
                tree.note_memory()
                time.sleep(0.5)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker has failed; see {folder}/output.log")
    of_workers = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    starts = [lines[0] for lines in of_workers]
    repeats = [lines[1:] for lines in of_workers]
    row: dict[str, Any] = {name: max(start[name] for start in starts) for name in starts[0]}
    for name in ("sync_s", "generation_s"):
        row[name] = statistics.median(max(line[name] for line in lines) for lines in zip(*repeats, strict=True))
    for name in ("sync_cpu_s", "generation_cpu_s"):
        row[name] = statistics.median(sum(line[name] for line in lines) for lines in zip(*repeats, strict=True))
    return row | {"engine": engine, "tensor_parallel": size, "peak_pss_gb": tree.peak_pss / 1e9}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the medians with their ranges, and the ratios of the engines, as lines of Markdown."""
    lines = ["| tensor parallel | | " + " | ".join(FIGURES.values()) + " |", "|---" * (len(FIGURES) + 2) + "|"]
    for size in dict.fromkeys(row["tensor_parallel"] for row in rows):
        medians: dict[str, list[float]] = {}
        for engine in ENGINES:
            mine = [row for row in rows if (row["engine"], row["tensor_parallel"]) == (engine, size)]
            values = [[row[name] for row in mine] for name in FIGURES]
            medians[engine] = [statistics.median(each) for each in values]
            cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in values]
            lines.append(f"| {size} | {engine} | " + " | ".join(cells) + " |")
        ratios = [f"{b / a:.1f}" for a, b in zip(*(medians[engine] for engine in ENGINES), strict=True)]
        lines.append(f"| {size} | sglang / vllm | " + " | ".join(ratios) + " |")
    return lines


def say(line: str) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, print the table and the JSON line, or be one worker."""
    args = parse_args()
    if args.rank is not None:
        from verl.utils.distributed import leave_process

        run_worker(args)
        leave_process(0)
    folder = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_"))
    say(f"inputs, logs: {folder}")
    sizes = SimpleNamespace(**vars(args), shortest=args.tokens + 2, longest=args.tokens + 8, limit=args.tokens, seed=1)
    make_inputs(folder / "inputs", sizes, steps=0)
    rows = []
    for number, size in itertools.product(range(args.rounds), args.tensor_parallel):
        for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
            row = measure(engine, size, args, folder / f"{engine}_{size}_{number}")
            rows.append(row)
            say(f"{number} {engine} TP {size}: " + ", ".join(f"{name} {row[name]:.3f}" for name in FIGURES))
    sys.stdout.write("\n".join(["", *table(rows), ""]) + "\n" + json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
