"""Measure generation by vLLM on CPU alone: CPU seconds of a batch, in the process of a worker.

python scripts/bench/generation.py --trees path/to/other/checkout .

Each checkout (default: this one) runs in turn in a fresh process, with the same model, prompts and seeds, and the
responses of all are compared bit for bit. The model is that of ``trl.py``; the weights do not change. With
``--mode async`` the samples come as single requests, as agent loops send them. The last line printed is JSON.
"""

import argparse
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

from verl.utils.loading import load_tensors

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUN_TIMEOUT_S = 900.0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], help="checkouts to compare (default: this)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each, in turn (default: 3)")
    parser.add_argument("--repeats", type=int, default=7, help="batches of a process (default: 7)")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    sizes = {"hidden": 256, "layers": 4, "vocab": 1000, "prompts": 16, "samples": 8, "prompt-length": 32, "tokens": 32}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="fields of RolloutConfig")
    parser.add_argument("--out", type=Path, help="folder for inputs and logs (default: a temporary one)")
    parser.add_argument("--profile", type=Path, help="with one tree: write cProfile's figures of the last batch")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one process


def run_worker(args: argparse.Namespace) -> None:
    """Generate a few batches; write down the CPU seconds of each and the responses of all."""
    import torch

    from verl.workers.config import HFModelConfig
    from verl.workers.rollout import build_rollout

    model = HFModelConfig(path=str(args.out / "inputs" / "model"), load_tokenizer=False)
    rollout = build_rollout(rollout_config(args), model, SimpleNamespace())
    generate(rollout, args, 0)
    lines = []
    for number in range(args.repeats):
        start, wall = time.process_time(), time.perf_counter()
        log_probs, tokens = generate(rollout, args, number)
        lines.append({"cpu_s": time.process_time() - start, "wall_s": time.perf_counter() - wall})
        lines[-1] |= {"tokens": tokens, "log_probs": log_probs}
    if args.profile is not None:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(generate, rollout, args, args.repeats)
        profiler.dump_stats(args.profile)
    torch.save(lines, args.worker)


def rollout_config(args: argparse.Namespace) -> Any:
    """Return the configuration of the engine."""
    from verl.workers.config import RolloutConfig

    settings: dict[str, Any] = {
        "name": "vllm",
        "mode": args.mode,
        "prompt_length": args.prompt_length,
        "response_length": args.tokens,
        "dtype": "float32",
        "load_format": "safetensors",
        "ignore_eos": True,
        "calculate_log_probs": True,
        "tensor_model_parallel_size": 1,
        "max_num_seqs": args.prompts * args.samples,
        "gpu_memory_utilization": 0.2,
    }
    given = dict(word.split("=", 1) for word in args.set)
    return RolloutConfig(**settings | {name: json.loads(value) for name, value in given.items()})


def generate(rollout: Any, args: argparse.Namespace, seed: int) -> tuple[Any, Any]:
    """Return the log-probabilities and tokens of a batch."""
    import numpy as np
    import torch

    from verl.protocol import DataProto

    draw = np.random.default_rng(seed)
    rows = draw.integers(3, args.vocab, (args.prompts, args.prompt_length)).repeat(args.samples, axis=0)
    if args.mode == "async":
        return ask_all(rollout, args, rows.tolist(), seed)
    raw = np.empty(len(rows), dtype=object)
    raw[:] = rows.tolist()
    ids = torch.from_numpy(rows)
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(args.prompt_length).expand_as(ids).contiguous(),
        },
        non_tensors={"raw_prompt_ids": raw, "sampling_seed": np.arange(len(rows)) + 1000 * seed},
        meta_info={"eos_token_id": END, "pad_token_id": PAD, "global_steps": seed},
    )
    output = rollout.generate_sequences(batch).batch
    return output["rollout_log_probs"], output["responses"]


def ask_all(rollout: Any, args: argparse.Namespace, rows: list[list[int]], seed: int) -> tuple[Any, Any]:
    """Return the log-probabilities and tokens of requests that come at once."""
    import asyncio

    import torch

    async def ask() -> list[Any]:
        params = [
            {"max_tokens": args.tokens, "seed": 1000 * seed + row, "ignore_eos": True} for row in range(len(rows))
        ]
        return await asyncio.gather(
            *(
                rollout.generate(row, each, f"{number}")
                for number, (row, each) in enumerate(zip(rows, params, strict=True))
            )
        )

    asyncio.run(rollout.resume(["weights", "kv_cache"]))
    outputs = asyncio.run(ask())
    return torch.tensor([each.log_probs for each in outputs]), torch.tensor([each.token_ids for each in outputs])


# ---- all runs


def measure(tree: Path, args: argparse.Namespace, folder: Path, name: str) -> list[dict[str, Any]]:
    """Run a checkout once and return its batches."""

    result = folder / f"{name}.pt"
    words = [sys.executable, __file__, "--worker", str(result), "--out", str(folder), *sys.argv[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tree.resolve()}:{HERE}"}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(words, env=env, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S, check=False, cwd=tree)
    if not result.exists():
        raise RuntimeError(f"{tree}: exit status {done.returncode}, see {folder}/{name}.log")
    return list(load_tensors(result))


def main() -> None:
    """Measure, print the table and the JSON line, or be one process."""
    args = parse_args()
    if args.worker is not None:
        from verl.utils.distributed import leave_process

        run_worker(args)
        leave_process(0)
    folder = args.out or Path(tempfile.mkdtemp(prefix="verl_bench_"))
    sizes = SimpleNamespace(**vars(args), shortest=args.tokens + 2, longest=args.tokens + 8, limit=args.tokens, seed=1)
    make_inputs(folder / "inputs", sizes, steps=0)
    found: dict[Path, list[list[dict[str, Any]]]] = {tree: [] for tree in args.trees}
    for number in range(args.rounds):
        for place, tree in enumerate(args.trees if number % 2 == 0 else reversed(args.trees)):
            found[tree].append(measure(tree, args, folder, f"{number}_{place}"))
    first = found[args.trees[0]][0]
    rows = []
    for tree, runs in found.items():
        same = all(
            mine["tokens"].equal(theirs["tokens"]) and mine["log_probs"].equal(theirs["log_probs"])
            for run in runs
            for mine, theirs in zip(run, first, strict=True)
        )
        cpu = [statistics.median(line["cpu_s"] for line in run) for run in runs]
        wall = [statistics.median(line["wall_s"] for line in run) for run in runs]
        rows.append({"tree": str(tree), "cpu_s": cpu, "wall_s": wall, "same_bits_as_first": same})
        sys.stdout.write(
            f"{tree}: {statistics.median(cpu):.3f} CPU s a batch ({min(cpu):.3f} to {max(cpu):.3f}), "
            f"wall {statistics.median(wall):.3f}; responses bit for bit those of the first: {same}\n"
        )
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
