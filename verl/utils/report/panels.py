"""Draw the report's charts from the record of a run, with matplotlib, as inline SVG.

Figures are drawn once, in the light colours. Each colour in the SVG then becomes a CSS variable of the page, so that
the charts follow its light or dark theme.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from verl.utils.report.flags import Entries, Flag, Points, keys_of, memory_of_workers, points_of, seconds_of_workers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---- colours

SERIES = {
    "#2563a8": "#7fb2f0",
    "#c2570c": "#f2a25c",
    "#1b7f4d": "#6fcf97",
    "#7a3fa0": "#c59cf0",
    "#b3261e": "#ff8a80",
    "#0f7c8a": "#5fd0dc",
    "#8a6d00": "#e0c25a",
    "#5f6b7a": "#a9b4c2",
    "#9d2f6b": "#f28cbf",
    "#4a5fc1": "#a3b1ff",
    "#6b8e23": "#b5d56a",
    "#99582a": "#d9a679",
    "#3d405b": "#c3c6e0",
}
"""Light colour -> its counterpart on a dark page."""
HEAT = "#3f9f73"
"""Colour of the length distribution. It is an image, which CSS variables cannot reach, so it must suit both themes."""
INK = "#1c2430"
GRID = "#d5dae1"
MUTED = "#66707d"
_DARK = {INK: "#e6e9ee", GRID: "#3a424e", MUTED: "#9aa5b3"}
COLORS = list(SERIES)
VARIABLES = {light: f"--c{number}" for number, light in enumerate([*SERIES, *_DARK])}

RC = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names come from records
    "svg.hashsalt": "verl",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.7,
    "figure.facecolor": "none",
}


def css_variables(dark: bool) -> str:
    """Return the CSS declarations of all colours."""
    pairs = {**SERIES, **_DARK}
    return "".join(f"{VARIABLES[light]}:{pairs[light] if dark else light};" for light in pairs)


def as_svg(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as an ``svg`` element with CSS variables for colours and with ids prefixed by ``name``."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    text = re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match.group()]})", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


# ---- panels

MAX_POINTS = 400
"""Most points of a line; in a longer run each point is the mean of several steps, drawn with their range."""
WARNING = COLORS[4]
WIDTH_INCHES = 5.2
"""About the width of a panel on the page, so that the browser does not scale the letters."""
PLOT_INCHES = 2.7
LEGEND_ROW_INCHES = 0.22
TWO_COLUMNS = 26
"""Longest label, in characters, that fits a legend of two columns."""
THREE_COLUMNS = 12


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

_LOSS = {"train/loss": "training batch", "val/loss": "validation"}
_CLIPPED = {
    "actor/pg_clipfrac": "policy, ratio clipped",
    "actor/pg_clipfrac_lower": "policy, dual clip",
    "critic/vf_clipfrac": "value",
}
_GRADIENTS = {
    "actor/grad_norm": "actor, before clipping",
    "critic/grad_norm": "critic, before clipping",
    "train/grad_norm": "before clipping",
}
_TRUNCATED = {"response_length/clip_ratio": "truncated at the limit", "response/aborted_ratio": "empty (aborted)"}
_GENERATED = {
    "fully_async/length_generated": "generated so far, mean",
    "fully_async/length_trained": "trained so far, mean",
}
_GENERATED_SCORES = {
    "fully_async/score_generated": "generated so far, mean",
    "fully_async/score_trained": "trained so far, mean",
}
_AGES = {
    "fully_async/versions_behind/mean": "mean",
    "fully_async/versions_behind/max": "most",
}
_THROUGHPUT = {"perf/throughput": "all tokens of a step, per worker"}
_COMPUTED = "perf/computed_tokens/"
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
)
AFTER_STEP = ("testing", "save_checkpoint")
"""Phases that ``timing_s/step`` does not include."""

Draw = Callable[["Axes", Entries], None]


class Panel(NamedTuple):
    """One chart: name, title, unit of its axis, and the function that draws it."""

    name: str
    title: str
    unit: str
    draw: Draw


def draw_panels(entries: Entries, flags: Sequence[Flag]) -> dict[str, str]:
    """Return the name and SVG of every chart that the record has data for, with flags marked in it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = {}
    with rc_context(RC):  # type: ignore[arg-type]
        for panel in PANELS:
            figure = Figure(figsize=(WIDTH_INCHES, PLOT_INCHES), layout="constrained")
            ax = figure.subplots()
            panel.draw(ax, entries)
            if ax.has_data():
                _finish(figure, ax, panel, [flag for flag in flags if flag.panel == panel.name], entries)
                drawn[panel.name] = as_svg(figure, panel.name, panel.title)
    return drawn


def _finish(figure: "Figure", ax: "Axes", panel: Panel, flags: Sequence[Flag], entries: Entries) -> None:
    label_axes(ax, panel, entries)
    for flag in flags:
        label = f"{flag.name}, step {flag.step}"
        ax.axvline(flag.step, color=WARNING, linestyle=(0, (4, 2)), linewidth=1.3, label=label)
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        columns = legend_columns(labels)
        figure.set_figheight(PLOT_INCHES + LEGEND_ROW_INCHES * -(-len(handles) // columns))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.2)


def label_axes(ax: "Axes", panel: Panel, entries: Entries) -> None:
    """Name panel and axes, and show every step of the record."""
    from matplotlib.ticker import MaxNLocator

    low = min(entries)
    high = max(entries)
    limits = (low - 0.5, max(high, low + 1) + 0.5)
    ax.set(title=panel.title, xlabel="training step", ylabel=panel.unit, xlim=limits)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def legend_columns(labels: Sequence[str]) -> int:
    """Return the columns of a legend that is as wide as its panel."""
    longest = max(map(len, labels))
    fitting = 1 if longest > TWO_COLUMNS else 2 if longest > THREE_COLUMNS else 3
    return 1 if len(labels) < 3 else min(fitting, 2 if len(labels) < 5 else 3)


def thin(points: Points) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return step, mean, lowest and highest value of at most ``MAX_POINTS`` equal stretches."""
    size = -(-len(points) // MAX_POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    steps = [sum(step for step, _ in part) / len(part) for part in parts]
    means = [sum(value for _, value in part) / len(part) for part in parts]
    lows, highs = ([pick(value for _, value in part) for part in parts] for pick in (min, max))
    return steps, means, lows, highs


def _line(ax: "Axes", points: Points, label: str, color: str, marker: str = ".", markersize: float = 5) -> None:
    if not points:
        return
    steps, means, lows, highs = thin(points)
    shown = marker if marker != "." or len(steps) <= 60 else None
    ax.plot(steps, means, label=label, color=color, marker=shown, markersize=markersize)
    if len(steps) < len(points):
        ax.fill_between(steps, lows, highs, color=color, alpha=0.18, linewidth=0)


def _lines(ax: "Axes", entries: Entries, metrics: Mapping[str, str], absolute: bool = False) -> int:
    """Draw a line for each metric that the run logged, and return their number."""
    drawn = 0
    for key, label in metrics.items():
        points = points_of(entries, key)
        if absolute:
            points = [(step, abs(value)) for step, value in points if value]
        if points:
            _line(ax, points, label, COLORS[drawn % len(COLORS)])
            drawn += 1
    return drawn


def logarithmic(ax: "Axes") -> None:
    values = [float(value) for line in ax.get_lines() for value in line.get_ydata()]  # type: ignore[union-attr, arg-type]
    if values and max(values) > 20 * min(values) > 0:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:.0e}")  # the usual labels are formulas, which RC leaves as they are written
        ax.yaxis.set_minor_formatter("")
    elif values:
        ax.set_ylim(bottom=min(0.0, *values) if len(values) > 1 else None)


def _from_zero(ax: "Axes") -> None:
    """Start the axis at zero, with a constant zero at its bottom."""
    if ax.has_data():
        top = max(ax.dataLim.y1, 0.0)
        ax.set_ylim(0, top * 1.06 if top > 0 else 1.0)


def _band(
    ax: "Axes", low: Points, high: Points, color: str, label: str, alpha: float = 0.14
) -> tuple[list[float], list[float], list[float]]:
    """Fill the range between two lines of the same steps; return steps and both edges as drawn."""
    steps, _, lows, _ = thin(low)
    highs = thin(high)[3]
    ax.fill_between(steps, lows, highs, color=color, alpha=alpha, linewidth=0, label=label)
    return steps, lows, highs


# ---- the charts


def lines_of(metrics: Mapping[str, str], scale: "Callable[[Axes], None] | None" = None, absolute: bool = False) -> Draw:
    """Return the function that draws a line for each of the metrics, given with their labels."""

    def draw(ax: "Axes", entries: Entries) -> None:
        _lines(ax, entries, metrics, absolute)
        if scale is not None:
            scale(ax)

    return draw


def _mean_in_range(ax: "Axes", entries: Entries, metric: str, color: str, label: str, range_label: str) -> Points:
    """Draw the mean of a metric over the range from its lowest to its highest value, and return the mean."""
    mean, low, high = (points_of(entries, f"{metric}/{name}") for name in ("mean", "min", "max"))
    if low and len(mean) == len(low) == len(high):
        _band(ax, low, high, color, range_label)
    _line(ax, mean, label, color)
    return mean


def _reward(ax: "Axes", entries: Entries) -> None:
    mean = _mean_in_range(ax, entries, "critic/score", COLORS[0], "score, mean", "score, lowest to highest")
    rewards = points_of(entries, "critic/rewards/mean")
    if [value for _, value in rewards] != [value for _, value in mean]:
        _line(ax, rewards, "reward after KL, mean", COLORS[1])


def _validation(ax: "Axes", entries: Entries) -> None:
    for number, key in enumerate(keys_of(entries, "val-core/")[:8]):
        points = points_of(entries, key)
        if points:
            label = f"{key.removeprefix('val-core/')} (last: {points[-1][1]:.3g})"
            _line(ax, points, label, COLORS[number], marker="o", markersize=4)


def _lengths(ax: "Axes", entries: Entries) -> None:
    _mean_in_range(ax, entries, "response_length", COLORS[2], "mean", "shortest to longest")
    _from_zero(ax)


def _distribution(ax: "Axes", entries: Entries) -> None:
    """Draw the share of responses by length as the opacity of one colour."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

    kept = [(step, each) for step, entry in sorted(entries.items()) if (each := entry.get("response_length"))]
    shapes = {(each["limit"], len(each["counts"])) for _, each in kept}
    if len(shapes) != 1 or not min(min(shapes)) > 0 or not all(n >= 0 for _, each in kept for n in each["counts"]):
        return
    size = -(-len(kept) // MAX_POINTS)
    parts = [kept[i : i + size] for i in range(0, len(kept), size)]
    counts = np.array([np.sum([each["counts"] for _, each in part], axis=0) for part in parts], dtype=float)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    most = max(float(share.max()), 1e-9)
    # Even the smallest share stays visible on a dark page.
    colors = LinearSegmentedColormap.from_list("share", [to_rgba(HEAT, 0.15), to_rgba(HEAT, 1.0)])
    scale = PowerNorm(0.5, vmin=0, vmax=most)
    extent = (kept[0][0] - 0.5, kept[-1][0] + 0.5, 0, kept[0][1]["limit"])
    image = np.ma.masked_equal(share.T, 0)
    ax.imshow(image, colors, scale, origin="lower", aspect="auto", interpolation="nearest", extent=extent)
    ax.grid(False)
    for part in (most, most / 4, most / 100):
        label = f"{100 * part:.{0 if part > 0.1 else 2}f} %"
        ax.fill_between([], [], facecolor=colors(float(scale(part))), linewidth=0, label=label)


def _times(ax: "Axes", entries: Entries) -> None:
    whole_steps = dict(points_of(entries, "timing_s/step"))
    if not whole_steps:
        return
    steps = list(whole_steps)
    courses: dict[str, list[float]] = {}
    other = list(whole_steps.values())
    for name in (*STEP_PHASES, *AFTER_STEP):
        seconds = dict(points_of(entries, f"timing_s/{name}"))
        course = [seconds.get(step, 0.0) for step in steps]
        if not seconds.keys().isdisjoint(steps):
            courses[name] = course
        if name not in AFTER_STEP:
            other = [whole - part for whole, part in zip(other, course, strict=True)]
    courses["other"] = [max(0.0, rest) for rest in other]
    thinned = [thin(list(zip(steps, course, strict=True))) for course in courses.values()]
    at = thinned[0][0]
    heights = [means for _, means, _, _ in thinned]
    bars = len(at) < 60
    if bars:  # half a step around each step, and the last height once more for the right edge
        at = [*(step - 0.5 for step in at), at[-1] + 0.5]
        heights = [[*each, each[-1]] for each in heights]
    ax.stackplot(at, *heights, labels=list(courses), colors=COLORS, alpha=0.9, step="post" if bars else None)


def _mfu(ax: "Axes", entries: Entries) -> None:
    labels = {key: key.removeprefix("perf/mfu/") for key in keys_of(entries, "perf/mfu/")}
    _lines(ax, entries, labels | {"train/mfu": "training"})
    _from_zero(ax)


def _computed(ax: "Axes", entries: Entries) -> None:
    """Draw the batch's tokens next to the tokens computed with shared prefixes; nothing without them."""
    labels = {key: f"computed: {key.removeprefix(_COMPUTED)}" for key in keys_of(entries, _COMPUTED)}
    labels |= dict.fromkeys(keys_of(entries, "train/computed_tokens"), "computed")
    if labels:
        _lines(ax, entries, {"perf/total_num_tokens": "trained", "train/global_tokens": "trained"} | labels)
        _from_zero(ax)


def _memory(ax: "Axes", entries: Entries) -> None:
    """Draw the highest memory over all ranks, by group and kind."""
    highest: dict[str, dict[int, float]] = {}
    for (group, _, kind), points in memory_of_workers(entries).items():
        course = highest.setdefault(f"{group}: {_MEMORY.get(kind, kind)}, highest rank", {})
        for step, gigabytes in points:
            course[step] = max(course.get(step, 0.0), gigabytes)
    device = {f"perf/max_memory_{name}_gb": f"actor: device, {name}, peak" for name in ("allocated", "reserved")}
    drawn = _lines(ax, entries, device)
    for number, (label, course) in enumerate(highest.items(), start=drawn):
        _line(ax, sorted(course.items()), label, COLORS[number % len(COLORS)])
    _from_zero(ax)


def _memory_by_phase(ax: "Axes", entries: Entries) -> None:
    """Draw the device's peak in each phase, or the process's memory after it if there is no device."""
    keys = keys_of(entries, "perf/memory/")
    of_device = [key for key in keys if key.endswith("/max_allocated_gb")]
    chosen = of_device or [key for key in keys if key.endswith("/max_rss_gb")]
    kind = "device, peak" if of_device else "host, process"
    _lines(ax, entries, {key: f"{key.split('/')[2]} ({kind})" for key in chosen})
    _from_zero(ax)


_MEMORY = {"host_gb": "host memory of the process", "device_gb": "device memory allocated"}


def _workers(ax: "Axes", entries: Entries) -> None:
    """Draw the range from fastest to slowest rank for the five most expensive calls."""
    spread = seconds_of_workers(entries)
    spread = {key: steps for key, steps in spread.items() if key[1] not in ("save_checkpoint", "generate_sequences")}
    cost = {key: sum(max(seconds) for _, seconds in steps) for key, steps in spread.items()}
    for number, key in enumerate(sorted(spread, key=lambda key: -cost[key])[:5]):
        fastest = [(step, min(seconds)) for step, seconds in spread[key]]
        slowest = [(step, max(seconds)) for step, seconds in spread[key]]
        steps, *edges = _band(ax, fastest, slowest, COLORS[number], f"{key[1]} ({key[0]})", alpha=0.3)
        for edge in edges:
            ax.plot(steps, edge, color=COLORS[number], linewidth=1.0)
    _from_zero(ax)


NOTES = {
    "kl": "from the current policy to the reference, and to the policy before the update",
    "mismatch": "log-probabilities of the same tokens; with equal weights they differ by rounding only",
    "distribution": "share of a step's responses by length",
    "workers": "fastest to slowest rank; calls with collectives wait for the slowest rank, generation does not",
}
"""Captions of the charts that need one."""
WHY_ABSENT = {
    "validation": "trainer.test_freq never validates, or the data has no ground truth",
    "kl": "the run has no reference policy and makes one update per batch",
    "mismatch": "set actor_rollout_ref.rollout.calculate_log_probs=true to record it",
    "computed": "no model has use_prefix_sharing=true",
    "difficulty": "the agent loops do not score: the reward function runs in the trainer",
    "workers": "one worker",
}
"""Why a chart of a sound run may be missing."""

_mismatch = lines_of(MISMATCH_METRICS, logarithmic, absolute=True)

PANELS = (
    Panel("loss", "Loss", "nats per trained token", lines_of(_LOSS)),
    Panel("reward", "Training reward", "score per response", _reward),
    Panel("validation", "Validation", "mean over the prompts", _validation),
    Panel("kl", "KL divergence", "nats per token", lines_of(KL_METRICS, logarithmic, absolute=True)),
    Panel("mismatch", "Mismatch of rollout and trainer", "difference (nats, or probability)", _mismatch),
    Panel("clip", "Clipped updates", "share of tokens", lines_of(_CLIPPED, _from_zero)),
    Panel("entropy", "Entropy", "nats per token", lines_of({"actor/entropy": "entropy of the policy"}, _from_zero)),
    Panel("gradient", "Gradient norm", "L2 norm", lines_of(_GRADIENTS, logarithmic)),
    Panel("lengths", "Response length", "tokens", _lengths),
    Panel("distribution", "Distribution of response lengths", "tokens", _distribution),
    Panel("cut", "Truncated responses", "share of responses", lines_of(_TRUNCATED, _from_zero)),
    Panel("generated", "Lengths generated and trained", "tokens", lines_of(_GENERATED, _from_zero)),
    Panel("difficulty", "Scores generated and trained", "score per response", lines_of(_GENERATED_SCORES)),
    Panel("ages", "Age of the trained responses", "versions", lines_of(_AGES, _from_zero)),
    Panel("times", "Step time by phase", "seconds", _times),
    Panel("throughput", "Throughput", "tokens per second and worker", lines_of(_THROUGHPUT, _from_zero)),
    Panel("computed", "Tokens trained and computed (shared prefixes)", "tokens of a step", _computed),
    Panel("mfu", "Model FLOPs utilization", "share of the device's peak", _mfu),
    Panel("memory", "Memory", "GiB", _memory),
    Panel("memory_phases", "Memory by phase, highest rank", "GiB", _memory_by_phase),
    Panel("workers", "Time of calls over the ranks", "seconds", _workers),
)
"""All charts, in their order on the page."""
OF_BOTH = frozenset({"gradient", "times", "throughput", "computed", "mfu", "memory", "workers"})
"""Charts that supervised training shares with RL training; it adds the loss."""
OF_ASYNC = frozenset({"generated", "difficulty", "ages"})
"""Charts of asynchronous training."""


def is_supervised(entries: Entries) -> bool:
    """Return whether the record belongs to supervised training."""
    return any("train/loss" in entry["data"] for entry in entries.values())


def expected_panels(entries: Entries) -> list[Panel]:
    """Return the charts that a run of this kind can have."""
    if is_supervised(entries):
        return [panel for panel in PANELS if panel.name in OF_BOTH | {"loss"}]
    left_out = {"loss"} if keys_of(entries, "fully_async/") else {"loss", *OF_ASYNC}
    return [panel for panel in PANELS if panel.name not in left_out]
