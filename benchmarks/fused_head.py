"""Measure what a fused head saves, on this machine: peak memory and time of one update, compared with the plain head.

Each line is one process that has run alone: a Qwen2 of two layers with a large vocabulary takes updates on the same
rows with ``use_fused_kernels`` off or on. With ``--tp`` above 1 so many processes share it, on Megatron-Core with
sequence parallelism; the line is that of the one that took most memory. On CPU the peak is ``VmHWM`` of the kernel,
reset before the updates; on CUDA that of the allocator. What was resident before (weights, optimizer state) is taken
off.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


def write_model(folder: Path, vocabulary: int, hidden: int) -> None:
    """Write a Qwen2 with an untied head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(folder)


def rows(tokens: int, vocabulary: int, with_entropy: bool) -> Any:
    """Return one micro-batch of ``tokens`` response tokens in rows of 256."""
    import torch

    from verl.protocol import DataProto

    count = max(1, tokens // 256)
    prompt = 16
    response = min(tokens, 256)
    ids = torch.randint(0, vocabulary, (count, prompt + response), generator=torch.Generator().manual_seed(1))
    ones = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
    tensors |= {"responses": ids[:, prompt:], "response_mask": ones[:, prompt:]}
    data = DataProto.from_dict(tensors=tensors)
    data.meta_info.update(temperature=1.0, calculate_entropy=with_entropy, micro_batch_size_per_gpu=count)
    return data


def loss(output: Any, data: Any) -> Any:
    """Return minus the log-probability, and minus the entropy where there is one, by token."""
    from verl.algos.aggregate import agg_sum

    value = -output["log_probs"] - (0.01 * output["entropy"] if "entropy" in output else 0.0)
    total = agg_sum(value, data.batch["response_mask"], "token-mean")
    return [total], {"loss": total}


def status(name: str) -> int:
    """Return a line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def engine_of(tp: int) -> tuple[str, Any, Any]:
    """Return the strategy and its configurations, once this process is in the group of those that share the model."""
    import torch
    import torch.distributed as dist

    from verl.utils.device.gloo import use_one_thread
    from verl.workers import config

    if tp == 1:
        return "fsdp2", config.FSDPEngineConfig(strategy="fsdp2"), config.FSDPOptimizerConfig(lr=1e-6)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    use_one_thread()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    engine_config = config.McoreEngineConfig(tensor_model_parallel_size=tp, dtype="fp32")
    return "megatron", engine_config, config.McoreOptimizerConfig(lr=1e-6)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Take updates; return the highest memory above that before them, and the median seconds."""
    import torch

    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry

    kernels = {"use_fused_kernels": options.head != "plain", "use_remove_padding": True, "load_tokenizer": False}
    backend = options.head if options.head != "plain" else "torch"
    strategy, engine_config, optimizer_config = engine_of(options.tp)
    engine = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=HFModelConfig(path=str(folder), fused_kernel_options={"impl_backend": backend}, **kernels),
        engine_config=engine_config,
        optimizer_config=optimizer_config,
        checkpoint_config=None,
    )
    engine.initialize()
    data = rows(options.tokens, options.vocabulary, options.entropy)
    seconds = []
    on_cuda = torch.cuda.is_available()
    with engine.train_mode():
        engine.train_batch(rows(16, options.vocabulary, False), loss)  # makes the state of the optimizer
        before = torch.cuda.memory_allocated() if on_cuda else status("VmRSS")
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        for _ in range(options.steps):
            start = time.perf_counter()
            metrics = engine.train_batch(data, loss)
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() if on_cuda else status("VmHWM")) - before
    return {"peak_mib": peak // MIB, "seconds": sorted(seconds)[len(seconds) // 2], "loss": metrics["loss"]}


def main() -> None:
    """Run every head in a separate process and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="response tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--entropy", action="store_true", help="with a loss of entropy")
    parser.add_argument("--heads", default="plain,torch", help="of plain, torch, triton (CUDA)")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the model, on Megatron-Core")
    parser.add_argument("--head", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head:
        print(json.dumps({"head": options.head} | measure(options.folder, options)), flush=True)
        if options.tp > 1:
            from verl.utils.distributed import leave_process

            leave_process(0)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.vocabulary, options.hidden)
        for head in options.heads.split(","):
            several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.tp}"]
            start = several if options.tp > 1 else []
            command = [sys.executable, *start, __file__, *sys.argv[1:], "--head", head, "--folder", folder]
            done = subprocess.run(command, capture_output=True, timeout=900, check=False, encoding="utf-8")
            if done.returncode:
                print(done.stderr[-2000:], flush=True)
                continue
            found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print(json.dumps(max(found, key=lambda each: each["peak_mib"])), flush=True)


if __name__ == "__main__":
    main()
