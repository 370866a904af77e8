"""Measure attention over shared prompts on a GPU: one layer, forward and backward, in bf16.

Each case is samples of prompts, packed end to end. ``rows`` attends to every row by itself, with flash attention. The
others have each prompt once: ``by depth`` merges calls of flash attention, ``by path`` makes one call with copies of
keys and values, ``flex`` uses ``flex_attention`` with a mask of blocks. ``chosen`` is the time of the
one that verl takes of the first two, as a ratio to the fastest of the three. Milliseconds are medians of single passes
between two events of the device, and the ways take turns. MiB are those that a pass takes at most.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.models.transformers import forest_attention
from verl.models.transformers.attention import packed_attention
from verl.models.transformers.packed_sequences import PackedSequences

SHAPES = ((14, 2, 64), (32, 8, 128), (16, 16, 128))
CASES = (
    (32, 8, 256),
    (256, 4, 256),
    (256, 8, 256),
    (1024, 4, 256),
    (1024, 16, 256),
    (1024, 16, 1024),
    (4096, 8, 512),
    (8192, 8, 1024),
)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the rows, about (default: 32768)")
    parser.add_argument("--passes", type=int, default=15, help="measured passes of each (default: 15)")
    return parser.parse_args()


def drawn(tokens: int, heads: tuple[int, int, int]) -> list[Tensor]:
    """Return query, key and value."""
    queries, keys, width = heads
    sizes = ((queries, width), (keys, width), (keys, width))
    return [torch.randn(tokens, *size, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]


def milliseconds(attend: Callable[..., Tensor], given: list[Tensor], packed: PackedSequences) -> float:
    """Run forward and backward once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    out = attend(*given, packed)
    torch.autograd.grad(out, given, torch.ones_like(out))
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def by(kernel: forest_attention._Kernel) -> Callable[..., Tensor]:
    """Return attention with the calls of a kernel."""

    def attend(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        out: Tensor = forest_attention._Merged.apply(query, key, value, packed, query.shape[-1] ** -0.5, kernel)
        return out

    return attend


def flex(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Attend by blocks of a mask."""
    return forest_attention._with_blocks(query, key, value, packed, query.shape[-1] ** -0.5)


def forest_of(prompt: int, samples: int, response: int, prompts: int) -> PackedSequences:
    """Return prompts with the responses below them."""
    lengths = []
    ends = []
    at = 0
    for _ in range(prompts):
        lengths += [prompt] + [response] * samples
        ends += [at + prompt + samples * response]
        ends += [at + prompt + (each + 1) * response for each in range(samples)]
        at = ends[-1]
    return PackedSequences(lengths, "cuda", ends)


def measured(ways: dict[str, tuple[Any, ...]], passes: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return milliseconds and MiB of each way."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    memory = {}
    for turn in range(passes + 3):
        for name, way in ways.items():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            taken[name].append(milliseconds(*way))
            memory[name] = (torch.cuda.max_memory_allocated() - before) >> 20
            if turn < 3:  # kernels are compiled
                taken[name].clear()
    return {name: statistics.median(each) for name, each in taken.items()}, memory


def main() -> None:
    """Measure every case and print a table."""
    args = parse_args()
    names = ("rows", "by depth", "by path", "flex")
    print("| heads | prompt | samples | response | " + " | ".join(f"{name}, ms" for name in names), end=" | chosen | ")
    print(" | ".join(f"{name}, MiB" for name in names) + " |")
    print("|" + "---|" * 13, flush=True)
    for heads in SHAPES:
        for prompt, samples, response in CASES:
            prompts = max(1, args.tokens // (samples * (prompt + response)))
            plain = PackedSequences([prompt + response] * prompts * samples, "cuda")
            forest = forest_of(prompt, samples, response, prompts)
            rows = drawn(sum(plain.lengths), heads)
            shared = drawn(sum(forest.lengths), heads)
            kernels = {"by depth": forest_attention._ByDepth(), "by path": forest_attention._ByPath()}
            ways: dict[str, tuple[Any, ...]] = {"rows": (packed_attention, rows, plain)}
            ways |= {name: (by(kernel), shared, forest) for name, kernel in kernels.items()}
            ways["flex"] = (flex, shared, forest)
            found, memory = measured(ways, args.passes)
            choice = type(forest_attention._kernel_for(*shared[:2], forest))
            chosen = next(found[name] for name, kernel in kernels.items() if type(kernel) is choice)
            ratio = chosen / min(found[name] for name in names[1:])
            cells = (f"{heads[0]}, {heads[1]} of {heads[2]}", prompt, samples, response)
            times = [f"{found[name]:.2f}" for name in names]
            print("| " + " | ".join(map(str, (*cells, *times, f"{ratio:.2f}", *memory.values()))) + " |", flush=True)


if __name__ == "__main__":
    main()
