"""Measure the time and the memory that shared prefixes save in an update on this machine.

Each figure comes from processes that run alone, in the order without, with, with, without ``use_prefix_sharing``. The
rows are samples of random prompts, with responses of one length. The share of FLOPs is the ratio of times that pure
arithmetic would give: matrix products count distinct tokens, the head counts response tokens, attention counts the
pairs under the causal mask. Peak memory is the kernel's ``VmHWM`` during the updates, minus the memory resident before.

On a GPU one process holds both engines and runs the updates of each case in the same order, in bf16. Seconds are
measured between two points at which the device is idle, and peak memory is that of the allocator. A further column is
the utilization: the needed FLOPs per second as a share of the device's peak.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
WARM_UP_ON_GPU = 2  # uncounted updates of each case
PROMPTS = (32, 256, 1024)
SAMPLES = (4, 8, 16)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="prompt lengths, in tokens")
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES, help="numbers of responses per prompt")
    parser.add_argument("--rows", type=int, default=32, help="number of rows in an update (default: 32)")
    parser.add_argument("--response", type=int, default=64, help="response length, in tokens (default: 64)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="its layers (default: 4)")
    parser.add_argument("--heads", type=int, nargs=2, help="query heads, key and value heads (default: of 64, 2 to 1)")
    parser.add_argument("--intermediate", type=int, help="width of the MLP (default: 4 x the model's)")
    parser.add_argument("--vocab", type=int, default=1000, help="size of the vocabulary (default: 1000)")
    parser.add_argument("--tied", action="store_true", help="tie the weights of head and embedding")
    parser.add_argument(
        "--fused-head", choices=("torch", "triton"), help="compute the head without materializing the logits"
    )
    parser.add_argument("--liger", action="store_true", help="kernels of liger-kernel; needs a GPU")
    parser.add_argument("--keep-gathered", action="store_true", help="reshard_after_forward=false of FSDP")
    parser.add_argument("--updates", type=int, default=5, help="measured updates per process (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="token budget of a forward pass (default: 8192)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Write a Qwen2 with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": args.vocab}
    sizes["intermediate_size"] = args.intermediate or 4 * args.hidden
    queries, keys = args.heads or (args.hidden // 64, max(1, args.hidden // 128))
    heads = {"num_attention_heads": queries, "num_key_value_heads": keys}
    Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=args.tied, **sizes, **heads)).save_pretrained(folder)


def rows_of(prompt: int, samples: int, args: argparse.Namespace) -> Any:
    """Return a mini-batch of random prompts and responses."""
    import torch

    from verl.protocol import DataProto

    generator = torch.Generator().manual_seed(1)
    asked = torch.randint(3, args.vocab, (args.rows // samples, prompt), generator=generator)
    answers = torch.randint(3, args.vocab, (args.rows, args.response), generator=generator)
    ids = torch.cat([asked.repeat_interleave(samples, dim=0), answers], dim=1)
    ones = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
    tensors |= {"responses": answers, "response_mask": ones[:, prompt:]}
    data = DataProto.from_dict(tensors=tensors)
    data.meta_info.update(temperature=1.0, use_dynamic_bsz=True, max_token_len_per_gpu=args.max_tokens)
    return data


def loss(output: Any, data: Any) -> Any:
    """Return the negative log-likelihood, averaged over tokens."""
    from verl.algos.aggregate import agg_sum

    total = agg_sum(-output["log_probs"], data.batch["response_mask"], "token-mean")
    return [total], {"loss": total}


def status(name: str) -> int:
    """Return an entry of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def engine_of(folder: str, shares: bool, args: argparse.Namespace, bf16: bool = False) -> Any:
    """Build an engine that is ready to train."""
    from verl.workers import config
    from verl.workers.engine import EngineRegistry

    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": args.fused_head}}
    model = config.HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=True,
        use_prefix_sharing=shares,
        use_liger=args.liger,
        enable_gradient_checkpointing=False,
        **(fused if args.fused_head else {}),
    )
    precision = {"param_dtype": "bf16", "reduce_dtype": "fp32"} if bf16 else None
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=config.FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=precision, reshard_after_forward=not args.keep_gathered
        ),
        optimizer_config=config.FSDPOptimizerConfig(lr=1e-6),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def child(given: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Run updates in this process, and measure them."""
    import torch

    torch.set_num_threads(1)
    engine = engine_of(given["model"], given["shares"], args)
    data = rows_of(given["prompt"], given["samples"], args)
    seconds = []
    with engine.train_mode():
        for at in range(args.updates + 1):
            if at == 0:
                before = status("VmRSS")
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            started = time.process_time()
            engine.train_batch(data, loss)
            seconds.append(time.process_time() - started)
    return {"seconds": statistics.median(seconds[1:]), "peak": (status("VmHWM") - before) / MIB}


class OnGpu:
    """Both engines, with and without shared prefixes, on the GPU of this process."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        self.args = args
        self.engines = {shares: engine_of(folder, shares, args, bf16=True) for shares in (False, True)}

    def __call__(self, given: dict[str, Any]) -> dict[str, float]:
        """Run updates, and measure them."""
        import torch

        engine = self.engines[given["shares"]]
        data = rows_of(given["prompt"], given["samples"], self.args)
        seconds = []
        with engine.train_mode():
            for at in range(WARM_UP_ON_GPU + self.args.updates):
                if at == WARM_UP_ON_GPU:  # from here on kernels are compiled and the optimizer's state exists
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                started = time.perf_counter()
                engine.train_batch(data, loss)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() - before
        return {"seconds": statistics.median(seconds[WARM_UP_ON_GPU:]), "peak": peak / MIB}


def needed(prompt: int, samples: int, args: argparse.Namespace, shares: bool, folder: str) -> float:
    """Return the number of floating-point operations that an update needs."""
    from transformers import AutoConfig

    from verl.utils.flops_counter import FlopsCounter

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    length = prompt + args.response
    lengths = [length] * args.rows
    shared = [prompt if shares and row % samples else 0 for row in range(args.rows)]
    counter = FlopsCounter(config, num_outputs=1)
    tokens = sum(lengths) - sum(shared)
    matrices = counter.estimate_flops([1] * tokens, 1.0)[0]
    pairs = counter.estimate_flops(lengths, 1.0, shared=shared)[0] - matrices
    head = 6 * config.hidden_size * config.vocab_size * args.rows * args.response / 1e12
    return matrices + pairs / 2 + head


def run(given: dict[str, Any]) -> dict[str, float]:
    """Measure in a new process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure every case and print a table."""
    args = parse_args()
    if args.child:
        print(json.dumps(child(json.loads(args.child), args)))
        return
    import torch

    from verl.utils.flops_counter import get_device_flops

    on_gpu = torch.cuda.is_available()
    columns = (
        "prompt",
        "samples",
        "distinct tokens",
        "s",
        "s shared",
        "time",
        "FLOPs",
        "time / FLOPs",
        "memory",
        *(("MFU", "MFU shared") if on_gpu else ()),
    )
    if not args.json:
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args)
        measured = OnGpu(folder, args) if on_gpu else run
        for prompt in args.prompts:
            for samples in args.samples:
                made: dict[bool, list[dict[str, float]]] = {False: [], True: []}
                for shares in (False, True, True, False):
                    case = {"model": folder, "prompt": prompt, "samples": samples, "shares": shares}
                    made[shares].append(measured(case))
                plain, shared = (
                    {name: statistics.mean(each[name] for each in made[shares]) for name in ("seconds", "peak")}
                    for shares in (False, True)
                )
                of_shared, of_rows = (needed(prompt, samples, args, shares, folder) for shares in (True, False))
                flops = of_shared / of_rows
                ratio = shared["seconds"] / plain["seconds"]
                distinct = args.rows * args.response + args.rows // samples * prompt
                row = {
                    "prompt": prompt,
                    "samples": samples,
                    "distinct": distinct / (args.rows * (prompt + args.response)),
                    "seconds": plain["seconds"],
                    "seconds_shared": shared["seconds"],
                    "time": ratio,
                    "flops": flops,
                    "time_per_flops": ratio / flops,
                    "memory": shared["peak"] / plain["peak"],
                }
                if on_gpu:
                    peak = get_device_flops()
                    row["mfu"], row["mfu_shared"] = (
                        total / each["seconds"] / peak for total, each in ((of_rows, plain), (of_shared, shared))
                    )
                shown = [f"{prompt}", f"{samples}", *(f"{value:.2f}" for value in list(row.values())[2:])]
                print(json.dumps(row) if args.json else "| " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
