"""Measure attention over shared prompts on a GPU: one layer, forward and backward, in bf16.

Each case is samples of prompts, packed end to end. ``rows`` attends to every row by itself, with flash attention.
``merged`` has each prompt once and merges the calls of flash attention; ``flex`` has it once too and uses
``flex_attention`` with a mask of blocks. Milliseconds are medians of single passes between two events of the device,
and the three take turns.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from verl.models.transformers import forest_attention
from verl.models.transformers.attention import packed_attention
from verl.models.transformers.packed_sequences import PackedSequences

SHAPES = ((14, 2, 64), (32, 8, 128))
CASES = ((32, 8, 256), (256, 8, 256), (1024, 4, 256), (1024, 16, 256), (1024, 16, 1024), (4096, 8, 512))


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


def merged(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Attend by merged calls."""
    return forest_attention.forest_attention(query, key, value, packed)


def flex(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Attend by blocks of a mask."""
    return forest_attention._with_blocks(query, key, value, packed, query.shape[-1] ** -0.5)


def main() -> None:
    """Measure every case and print a table."""
    args = parse_args()
    print("| heads | prompt | samples | response | rows, ms | merged, ms | flex, ms | merged / rows | merged / flex |")
    print("|" + "---|" * 9, flush=True)
    for heads in SHAPES:
        for prompt, samples, response in CASES:
            prompts = max(1, args.tokens // (samples * (prompt + response)))
            plain = PackedSequences([prompt + response] * prompts * samples, "cuda")
            lengths, ends, at = [], [], 0
            for _ in range(prompts):
                lengths += [prompt] + [response] * samples
                ends += [at + prompt + samples * response]
                ends += [at + prompt + (each + 1) * response for each in range(samples)]
                at = ends[-1]
            forest = PackedSequences(lengths, "cuda", ends)
            rows, shared = drawn(sum(plain.lengths), heads), drawn(sum(lengths), heads)
            ways = {
                "rows": (packed_attention, rows, plain),
                "merged": (merged, shared, forest),
                "flex": (flex, shared, forest),
            }
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(args.passes + 3):
                for name, way in ways.items():
                    taken[name].append(milliseconds(*way))
                    if turn < 3:
                        taken[name].clear()
            found = {name: statistics.median(each) for name, each in taken.items()}
            ratios = found["merged"] / found["rows"], found["merged"] / found["flex"]
            cells = [
                f"{heads[0]}, {heads[1]} of {heads[2]}",
                prompt,
                samples,
                response,
                *(f"{v:.2f}" for v in found.values()),
            ]
            print("| " + " | ".join(map(str, [*cells, *(f"{ratio:.2f}" for ratio in ratios)])) + " |", flush=True)


if __name__ == "__main__":
    main()
