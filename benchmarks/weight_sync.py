"""Measure the memory that a weight sync from FSDP into vLLM takes, on CPU: what is alive and what is resident.

Each line is one process that has run alone: workers, bucket, and the syncs in their order. ``VmHWM`` of the kernel,
reset before each sync, is its highest resident memory, wherever it was allocated. The last line counts what torch's
allocator has given out in one sync more.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

MIB = 1 << 20


MODELS = {
    "wide": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "num_attention_heads": 16},
    "deep": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 21, "num_attention_heads": 8},
}
"""Two of 320 MiB in fp32. The largest tensors have 16 and 8 MiB, the largest layers of vLLM (gate and up) 32 and 8."""


def model_config(name: str) -> Any:
    """Return the configuration of a Qwen2."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=4096,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
        **MODELS[name],
    )


def resident() -> dict[str, int]:
    """Return this process's memory by kind, in bytes, and the highest sum since the last reset."""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words and words[0][:3] in ("VmR", "VmH", "Rss")
    }


def reset_peak() -> None:
    """Let the kernel count the highest resident memory from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


@contextmanager
def allocations() -> Iterator[dict[str, float]]:
    """Fill in the most MiB that torch's allocator has given out since the begin: of the stream and of the engine."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, float] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns())
    found["allocated"] = max(itertools.accumulate(each.nbytes() for each in memory)) / MIB


def start(folder: Path, tensor_parallel: int) -> tuple[Any, Any]:
    """Build the training engine and the rollout around one model; returns engine and sharding manager."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, RolloutConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout import build_rollout
    from verl.workers.sharding_manager import build_sharding_manager

    model = HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=False)
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(strategy="fsdp2", offload_policy=True),  # wrapped where there is one rank, too
        optimizer_config=FSDPOptimizerConfig(lr=1e-5),
        checkpoint_config=None,
    )
    engine.initialize()
    settings = RolloutConfig(
        name="vllm",
        prompt_length=32,
        response_length=16,
        dtype="float32",
        tensor_model_parallel_size=tensor_parallel,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.1,
    )
    return engine, build_sharding_manager(engine, build_rollout(settings, model, engine))


def run_rank(rank: int, world: int, tensor_parallel: int, folder: Path, bucket_mib: int, syncs: int) -> None:
    """Sync a few times and write down what each took."""
    import torch
    import torch.distributed as dist

    from verl.utils import envs
    from verl.utils.device.gloo import use_one_thread

    envs.write({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)})
    torch.set_num_threads(1)
    use_one_thread()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    engine, manager = start(folder, tensor_parallel)
    manager.bucket_bytes = bucket_mib * MIB
    lines = []
    for _ in range(syncs):
        engine.weights_version += 1
        dist.barrier()
        before = resident()
        reset_peak()
        with manager:
            pass
        after = resident()
        lines.append(
            {
                "buckets": int(manager.last_sync["buckets"]),
                "alive": manager.last_sync["peak_bytes"] / MIB,
                "peak": (after["VmHWM"] - before["VmRSS"]) / MIB,
                "kept": (after["VmRSS"] - before["VmRSS"]) / MIB,
                "kept_by_kind": {k: round((after[k] - before[k]) / MIB) for k in after if k.startswith("Rss")},
                "seconds": round(manager.last_sync["seconds"], 2),
            }
        )
    engine.weights_version += 1
    with allocations() as found, manager:
        pass
    lines.append(found)
    (folder / f"{rank}.json").write_text(json.dumps(lines), encoding="utf-8")


def measure(model: str, world: int, tensor_parallel: int, bucket_mib: int, syncs: int) -> list[list[dict[str, Any]]]:
    """Start the ranks and return their lines."""
    import torch
    from transformers import Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        Qwen2ForCausalLM(model_config(model)).save_pretrained(folder)
        words = [sys.executable, __file__, "--folder", name, "--workers", str(world), "--buckets", str(bucket_mib)]
        words += ["--tensor-parallel", str(tensor_parallel), "--syncs", str(syncs)]
        ranks = [subprocess.Popen([*words, "--rank", str(rank)], stdout=sys.stderr) for rank in range(world)]
        if any(process.wait(600) for process in ranks):
            raise SystemExit("a rank has failed, see above")
        return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def main() -> None:
    """Measure every combination, or be one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers")
    parser.add_argument("--tensor-parallel", type=int, nargs="+", help="sizes; by default that of all workers")
    parser.add_argument("--buckets", type=int, nargs="+", default=[32, 16, 8], help="sizes of a bucket, MiB")
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        from verl.utils.distributed import leave_process

        layout = (options.workers[0], options.tensor_parallel[0])
        run_rank(options.rank, *layout, options.folder, options.buckets[0], options.syncs)
        leave_process(0)
    for model, world, bucket in itertools.product(options.models, options.workers, options.buckets):
        for size in options.tensor_parallel or [world]:
            if world % size:
                continue
            for rank, lines in enumerate(measure(model, world, size, bucket, options.syncs)):
                print(f"{model}, workers {world}, tensor parallel {size}, bucket {bucket} MiB, rank {rank}")
                for line in lines:
                    print("  " + ", ".join(f"{key} {shown(value)}" for key, value in line.items()), flush=True)


def shown(value: Any) -> str:
    """Return a figure with one digit behind the point."""
    return str(value if isinstance(value, dict) else round(value, 1))


if __name__ == "__main__":
    main()
