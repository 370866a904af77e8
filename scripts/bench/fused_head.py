"""Measure what a fused head saves, on this machine: peak memory and time of one update, beside the plain head.

Each line is one process that has run alone: a Qwen2 of two layers with a large vocabulary takes updates on the same
rows with ``use_fused_kernels`` off or on. On CPU the peak is ``VmHWM`` of the kernel, reset before the updates; on
CUDA that of the allocator. What was resident before (weights, optimizer state) is taken off.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


def write_model(folder: Path, vocabulary: int, hidden: int) -> None:
    """Write a Qwen2 with a head of its own."""
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

    count, prompt, response = max(1, tokens // 256), 16, min(tokens, 256)
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
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Take updates; return the highest memory above that before them, and the median seconds."""
    import torch

    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    kernels = {"use_fused_kernels": options.head != "plain", "use_remove_padding": True, "load_tokenizer": False}
    backend = options.head if options.head != "plain" else "torch"
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=str(folder), fused_kernel_options={"impl_backend": backend}, **kernels),
        engine_config=FSDPEngineConfig(strategy="fsdp2"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        checkpoint_config=None,
    )
    engine.initialize()
    data, seconds, on_cuda = rows(options.tokens, options.vocabulary, options.entropy), [], torch.cuda.is_available()
    with engine.train_mode():
        engine.train_batch(rows(16, options.vocabulary, False), loss)  # makes the state of the optimizer
        before = torch.cuda.memory_allocated() if on_cuda else status("VmRSS")
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        for _ in range(options.steps):
            start = time.perf_counter()
            metrics = engine.train_batch(data, loss)
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() if on_cuda else status("VmHWM")) - before
    return {"peak_mib": peak // MIB, "seconds": sorted(seconds)[len(seconds) // 2], "loss": metrics["loss"]}


def main() -> None:
    """Run every head in a process of its own and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="response tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--entropy", action="store_true", help="with a loss of entropy")
    parser.add_argument("--heads", default="plain,torch", help="of plain, torch, triton (CUDA)")
    parser.add_argument("--head", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.head:
        print(json.dumps({"head": options.head} | measure(options.folder, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.vocabulary, options.hidden)
        for head in options.heads.split(","):
            command = [sys.executable, __file__, *sys.argv[1:], "--head", head, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            print(done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
