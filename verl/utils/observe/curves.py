"""Draw the curves of a run as one picture: ``python -m verl.utils.observe.curves RUN_DIR``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.observe.console import get_console
from verl.utils.observe.record import read_record, record_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = tuple[list[int], list[float]]
Record = dict[int, dict[str, Any]]

PICTURE_NAME = "curves.png"

KL_METRICS = {
    "actor/kl_loss": "KL to the reference (loss)",
    "actor/reward_kl_penalty": "KL to the reference (reward)",
    "actor/ppo_kl": "KL to the old policy",
}
MISMATCH_METRICS = {
    "training/rollout_log_prob_diff_max": "|log-prob gap| rollout and trainer, max",
    "training/rollout_log_prob_diff_mean": "|log-prob gap| rollout and trainer, mean",
    "training/rollout_probs_diff_max": "|probability gap| rollout and trainer, max",
    "training/rollout_probs_diff_mean": "|probability gap| rollout and trainer, mean",
    "mismatch/mismatch_k3_kl": "KL of rollout and trainer (K3)",
}
STEP_PHASES = (
    "gen",
    "gen_max",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "dump_rollout_generations",
    "train_batch",
    "testing",
    "save_checkpoint",
)


def draw_curves(run_dir: str | Path, picture: str | Path | None = None) -> Path:
    """Draw reward, validation, KL and mismatch, and step time of a run; return the path of the picture.

    Raises: FileNotFoundError if the folder holds no record, ValueError if the record is empty.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    source = record_of(run_dir)
    record = read_record(source)
    if not record:
        raise ValueError(f"{source} holds no step yet")
    target = Path(picture) if picture else Path(run_dir, PICTURE_NAME)
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    panels: list[Callable[[Axes, Record], None]] = [_draw_reward, _draw_validation, _draw_kl, _draw_times]
    for panel, ax in zip(panels, axes.flat, strict=True):
        panel(ax, record)
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def series(record: Record, key: str) -> Series:
    """Return the steps at which a metric was logged, and its values."""
    points = [(step, float(data[key])) for step, data in sorted(record.items()) if data.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_reward(ax: "Axes", record: Record) -> None:
    steps, mean = series(record, "critic/score/mean")
    ax.plot(steps, mean, marker=".", color="tab:blue", label="score, mean")
    if any("critic/rewards/mean" in data and "actor/reward_kl_penalty" in data for data in record.values()):
        ax.plot(*series(record, "critic/rewards/mean"), color="tab:cyan", label="reward after KL, mean")
    low_steps, low = series(record, "critic/score/min")
    high_steps, high = series(record, "critic/score/max")
    if low_steps == steps and high_steps == steps and steps:
        ax.fill_between(steps, low, high, color="tab:blue", alpha=0.12, label="score, lowest to highest")
    _finish(ax, "Training reward", "reward per response")


def _draw_validation(ax: "Axes", record: Record) -> None:
    keys = sorted({key for data in record.values() for key in data if key.startswith("val-core/")})
    for key in keys[:8]:
        steps, values = series(record, key)
        ax.plot(steps, values, marker="o", label=f"{key.removeprefix('val-core/')} (last: {values[-1]:.3g})")
    if keys:
        ax.set_ylim(top=max(1.02, ax.get_ylim()[1]), bottom=min(-0.02, ax.get_ylim()[0]))
    _finish(ax, "Validation", "accuracy or reward, mean over prompts", missing="no validation in this run")


def _draw_kl(ax: "Axes", record: Record) -> None:
    drawn = False
    for metrics, style in ((KL_METRICS, "-"), (MISMATCH_METRICS, "--")):
        for key, label in metrics.items():
            steps, values = series(record, key)
            if steps and any(values):
                ax.plot(steps, [abs(value) for value in values], style, marker=".", markersize=4, label=label)
                drawn = True
    if drawn:
        ax.set_yscale("log")
    _finish(ax, "KL divergence and train/rollout mismatch", "nats per token, or gap (log scale)")


def _draw_times(ax: "Axes", record: Record) -> None:
    steps = [step for step, data in sorted(record.items()) if "timing_s/step" in data]
    names = [name for name in STEP_PHASES if any(f"timing_s/{name}" in record[step] for step in steps)]
    if steps:
        stacks = [[float(record[step].get(f"timing_s/{name}", 0.0)) for step in steps] for name in names]
        inside = [stack for name, stack in zip(names, stacks, strict=True) if name not in _OUTSIDE_STEP]
        named = [sum(parts) for parts in zip(*inside, strict=True)] or [0.0] * len(steps)
        rest = [max(0.0, float(record[step]["timing_s/step"]) - part) for step, part in zip(steps, named, strict=True)]
        edges, heights = as_bars(steps, [*stacks, rest])
        ax.stackplot(edges, *heights, labels=[*names, "other"], alpha=0.85, step="post")
        ax.set_xlim(edges[0], edges[-1])
    _finish(ax, "Step time by phase", "seconds per step")


def as_bars(steps: Sequence[float], heights: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return bar edges half a step around each step, and the heights repeated for the last edge."""
    edges = [step - 0.5 for step in steps]
    return [*edges, steps[-1] + 0.5], [[*each, each[-1]] for each in heights]


_OUTSIDE_STEP = ("testing", "save_checkpoint")
"""Phases that ``timing_s/step`` does not include."""


def _finish(ax: "Axes", title: str, unit: str, missing: str = "the run logged no data for this panel") -> None:
    ax.set_title(title)
    ax.set_ylabel(unit)
    handles, labels = ax.get_legend_handles_labels()
    if not any(len(handle.get_xdata()) > 0 if hasattr(handle, "get_xdata") else True for handle in handles):
        ax.text(0.5, 0.5, missing, ha="center", va="center", transform=ax.transAxes, color="gray")
        return
    ax.legend(handles, labels, fontsize=8, loc="best")


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture of a run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", help="trainer.default_local_dir of the run")
    parser.add_argument("--output", help=f"picture to write (default: RUN_DIR/{PICTURE_NAME})")
    given = parser.parse_args(arguments)
    get_console().info("curves: %s", draw_curves(given.run_dir, given.output))


if __name__ == "__main__":
    main()
