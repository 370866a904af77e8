"""Compare scorers in a process (``reward_model.scoring.isolate``) with the same scorers in the trainer, in turn."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.tiny_model import byte_tokenizer
from verl.utils.observe.console import get_console
from verl.workers.rewards.loading import load_reward_manager
from verl.workers.rewards.managers import AbstractRewardManager
from verl.workers.rewards.scoring import Sample

SCORERS = """
import time
from verl.utils.reward_score import gsm8k as gsm8k_scorer, math_reward

def gsm8k(data_source, solution_str, ground_truth, extra_info):
    return gsm8k_scorer.compute_score(solution_str, ground_truth)

def math(data_source, solution_str, ground_truth, extra_info):
    return {"score": math_reward.compute_score(solution_str, ground_truth), "acc": 1.0, "pred": solution_str[-20:]}

def one_ms(data_source, solution_str, ground_truth, extra_info):
    end = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        pass
    return 1.0
"""
WORDS = "So the sum of the parts is forty-two, and twice that is eighty-four. "
MANAGERS = ("in process", "in trainer")


def samples(num_rows: int, num_chars: int) -> list[Sample]:
    """Return responses with an answer that both scorers of mathematics read."""
    thought = (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]
    extra: dict[str, Any] = {"split": "train", "num_turns": 2, "rollout_reward_scores": {}}
    return [
        Sample(
            index=row,
            data_source="openai/gsm8k",
            prompt="",
            response=f"{thought} \\boxed{{{row}}}\n#### {row}",
            ground_truth=str(row),
            extra_info={**extra, "index": row},
            length=num_chars,
        )
        for row in range(num_rows)
    ]


def managers(path: Path, name: str) -> Mapping[str, AbstractRewardManager]:
    """Return the manager ``naive`` with the scorer in its process, and with the scorer here."""
    return {
        kind: load_reward_manager(
            {
                "data": {"reward_fn_key": "data_source"},
                "custom_reward_function": {"path": str(path), "name": name},
                "reward_model": {"reward_manager": "naive", "scoring": {"isolate": kind == MANAGERS[0]}},
            },
            byte_tokenizer(),
            num_examine=0,
        )
        for kind in MANAGERS
    }


def measure(path: Path, name: str, num_rows: int, num_chars: int, rounds: int) -> str:
    """Score one batch alternately by both; return the microseconds per response and the ratio of the medians."""
    both = managers(path, name)
    batch = samples(num_rows, num_chars)
    seconds: dict[str, list[float]] = {kind: [] for kind in MANAGERS}
    for turn in range(rounds + 1):
        for kind in MANAGERS if turn % 2 else MANAGERS[::-1]:
            start = time.perf_counter()
            scores = both[kind].score(batch)
            assert all(score.value == 1.0 for score in scores), f"{name} does not score the benchmark's responses"
            if turn:  # the first warms up
                seconds[kind].append(time.perf_counter() - start)
    apart, here = (statistics.median(seconds[kind]) / num_rows * 1e6 for kind in MANAGERS)
    return f"| `{name}` | {num_chars} | {here:.0f} us | {apart:.0f} us | {here / apart:.2f} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    lines = ["| scorer | characters | in the trainer | in a process | throughput |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "scorers.py")
        path.write_text(SCORERS, encoding="utf-8")
        for name in ("gsm8k", "math", "one_ms"):
            lines += [measure(path, name, given.rows, num_chars, given.rounds) for num_chars in (400, 8000)]
    get_console().info("%s", "\n".join(lines))


if __name__ == "__main__":
    main()
