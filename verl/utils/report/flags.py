"""Find problems in the record of a run, each with its reason."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq, itemgetter
from typing import TypeVar

from verl.utils.observe.record import LARGEST, Entry, WorkerReport

T = TypeVar("T")

Entries = Mapping[int, Entry]
Points = list[tuple[int, float]]
"""(step, value), sorted by step."""

MIN_STEPS = 6
"""Trends of shorter runs are not judged."""

NOTHING_TRAINED = "nothing trained"
"""The name of the flag of a run that ends as it began."""
ENOUGH = 3
"""Number of steps, or of validations in a row, in which a fault is no chance."""
SLOW_FACTOR = 1.33
"""A straggler takes this many times as long as the other ranks."""
STRETCHES = 12
"""Number of stretches whose medians are compared to find growth."""


@dataclass(frozen=True)
class Flag:
    """One finding: its name, first step, reason with figures, and the panel that shows it."""

    name: str
    step: int
    reason: str
    panel: str


def find_flags(entries: Entries, course: Entries | None = None) -> list[Flag]:
    """Return all flags, sorted by first step.

    Args: ``course`` is an optional thinned set of entries from which to judge trends, to save time on a long run.
    """
    found = [flag for rule in RULES_OF_COURSE for flag in rule(entries if course is None else course)]
    found += [flag for rule in RULES_OF_STEPS for flag in rule(entries)]
    return sorted(found, key=lambda flag: flag.step)


def points_of(entries: Entries, key: str) -> Points:
    """Return the finite values of a metric."""
    values = ((step, entry["data"].get(key)) for step, entry in sorted(entries.items()))
    return [(step, float(value)) for step, value in values if isinstance(value, int | float) and abs(value) <= LARGEST]


def keys_of(entries: Entries, prefix: str = "") -> list[str]:
    """Return the names of all metrics that begin with ``prefix``."""
    return sorted({key for entry in entries.values() for key in entry["data"] if key.startswith(prefix)})


def smoothed(points: Points) -> Points:
    """Return the running median over a twentieth of the run, at least three steps."""
    width = max(3, len(points) // 20)
    stretches = [points[end - width : end] for end in range(width, len(points) + 1)]
    return [(part[-1][0], statistics.median(value for _, value in part)) for part in stretches]


def _first_for_good(course: Sequence[tuple[int, bool]]) -> int | None:
    """Return the first step from which a condition stays true to the end; None if it is false at the end."""
    true_to_the_end = list(itertools.takewhile(itemgetter(1), reversed(course)))
    return true_to_the_end[-1][0] if true_to_the_end else None


# ---- rules


def _reward_collapse(entries: Entries) -> Iterator[Flag]:
    """Flag a mean score that fell for good.

    The score must lose half of its gain, a quarter of its height above the minimum, a tenth of its range, and more than
    its noise: 2.5 times the usual change of a step, or twice the usual change over a tenth of the run.
    """
    points = points_of(entries, "critic/score/mean")
    if len(points) < MIN_STEPS:
        return
    level = smoothed(points)
    extremes = [value for key in ("max", "min") for _, value in points_of(entries, f"critic/score/{key}")]
    values = [value for _, value in points]
    noise = max(2.5 * _usual_change(values, 1), 2.0 * _usual_change(values, len(values) // 10))
    least = max(0.1 * (max(extremes) - min(extremes)) if extremes else 0.0, noise)
    for course, start in ((level, level[0][1]), ([points[0], *level], min(extremes, default=0.0))):
        peak_step, peak = max(course, key=lambda point: point[1])
        height = peak - min(extremes, default=peak)
        last = course[-1][1]
        drop = max(0.5 * (peak - start), 0.25 * height, least)
        if 0 < drop < peak - last:
            step = _first_for_good([(step, peak - value > drop) for step, value in course if step >= peak_step])
            assert step is not None
            reason = f"the mean score was {peak:.3g} around step {peak_step} and is {last:.3g} at the end"
            yield Flag("reward collapse", step, reason, "reward")
            return


def _usual_change(values: Sequence[float], steps: int) -> float:
    """Return the third quartile of the absolute change over ``steps`` steps."""
    changes = [abs(b - a) for a, b in zip(values, values[max(steps, 1) :], strict=False)]
    return sorted(changes)[len(changes) * 3 // 4]


def _entropy_collapse(entries: Entries) -> Iterator[Flag]:
    """Flag entropy that fell below a tenth of its start and below 0.1 nats while the task is unsolved.

    A task is solved if the mean score is at 95 % of the best score.
    """
    points = points_of(entries, "actor/entropy")
    if len(points) < MIN_STEPS:
        return
    level = smoothed(points)
    start = max(points[0][1], level[0][1])
    last = level[-1][1]
    limit = min(0.1 * start, 0.1)
    if last >= limit:
        return
    scores = smoothed(points_of(entries, "critic/score/mean"))
    best = points_of(entries, "critic/score/max")
    if scores and best and scores[-1][1] >= 0.95 * max(value for _, value in best) > 0:
        return
    step = _first_for_good([(step, value < limit) for step, value in level])
    assert step is not None
    reason = f"the entropy per token fell from {start:.3g} to {last:.3g} nats: the policy hardly explores"
    yield Flag("entropy collapse", step, reason, "entropy")


def _stale_weights(entries: Entries) -> Iterator[Flag]:
    """Flag generation with weights older than planned, or a mismatch that suggests it.

    A run that generates a step ahead says how old they are to be; without such a plan they are the trainer's. The
    mismatch is suspicious above 20 times its median and 0.001 nats.
    """
    planned = dict(points_of(entries, "weight_sync/versions_planned"))
    found = points_of(entries, "weight_sync/versions_behind")
    behind = [(step, value) for step, value in found if value > planned.get(step, 0.0)]
    if behind:
        steps = _listed([step for step, _ in behind])
        most = round(max(value for _, value in behind))
        old = "one update" if most == 1 else f"up to {most} updates"
        plan = round(max(planned.get(step, 0.0) for step, _ in behind))
        instead = f", {plan} planned" if plan else ""
        reason = f"{steps} sampled with weights that were {old} old{instead}: the weight sync was skipped"
        yield Flag("stale weights", behind[0][0], reason, "mismatch")
        return
    points = points_of(entries, "training/rollout_log_prob_diff_mean")
    if len(points) < MIN_STEPS:
        return
    limit = max(1e-3, 20.0 * statistics.median(value for _, value in points))
    high = [point for point in points if point[1] > limit]
    if high:
        largest = max(value for _, value in high)
        reason = (
            f"in {_listed([step for step, _ in high])} log-probabilities of rollout and trainer differ by up to "
            f"{largest:.2g} on average (limit {limit:.2g}): their weights may differ"
        )
        yield Flag("rollout mismatch", high[0][0], reason, "mismatch")


def _other_lengths(entries: Entries) -> Iterator[Flag]:
    """Flag asynchronous training on responses that are longer or shorter than those it generates, to the end.

    The means are of the whole run, so few unfinished groups do not matter; a twentieth is more than the chance of which
    groups wait for their update.
    """
    generated = dict(points_of(entries, "fully_async/length_generated"))
    trained = points_of(entries, "fully_async/length_trained")
    if len(trained) < MIN_STEPS:
        return
    step = _first_for_good(
        [(step, abs(value - generated.get(step, value)) > 0.05 * generated.get(step, value)) for step, value in trained]
    )
    if step is not None:
        at, value = trained[-1]
        reason = (
            f"the responses that were trained have {value:.0f} tokens on average, and those that were generated "
            f"{generated[at]:.0f}: those that were dropped are not like the others"
        )
        yield Flag("other lengths trained", step, reason, "generated")


def _length_explosion(entries: Entries) -> Iterator[Flag]:
    """Flag responses that became twice as long with a fifth truncated, or of which half became truncated.

    The second rule covers runs whose length limit is below twice the initial length. It requires that the truncated
    share has grown by 30 percentage points since the start.
    """
    points = points_of(entries, "response_length/mean")
    cut = points_of(entries, "response_length/clip_ratio")
    if len(points) < MIN_STEPS or len(cut) != len(points):
        return
    level = smoothed(points)
    cut_level = smoothed(cut)
    start = max(min(points[0][1], level[0][1]), 1.0)
    cut_at_start = min(cut[0][1], cut_level[0][1])
    most = max(0.5, cut_at_start + 0.3)
    exploded = []
    for (at, length), (_, share) in zip(level, cut_level, strict=True):
        doubled = length >= 2.0 * start and share >= 0.2
        mostly_cut = length > start and share >= most
        exploded.append((at, doubled or mostly_cut))
    step = _first_for_good(exploded)
    if step is not None:
        reason = (
            f"the mean length rose from {start:.0f} to {level[-1][1]:.0f} tokens, and {cut_level[-1][1]:.0%} of the "
            f"responses are cut off at data.max_response_length, {cut_at_start:.0%} at the start"
        )
        yield Flag("length explosion", step, reason, "lengths")


def _straggler(entries: Entries) -> Iterator[Flag]:
    """Flag ranks that take a third longer than the others, in most steps and beyond chance."""
    for (group, call), steps in seconds_of_workers(entries).items():
        behind = [(step, [_behind(seconds, rank) for rank in range(len(seconds))]) for step, seconds in steps]
        ranks = range(min(len(each) for _, each in behind))
        for part in _ends_of(behind):
            slow = [rank for rank in ranks if _is_slow([each[rank] for _, each in part])]
            if not slow:
                continue
            ratios = [[each[rank][0] for rank in slow] for _, each in part]
            factor = math.exp(statistics.median(ratio for each in ratios for ratio in each))
            when = [step for (step, _), each in zip(part, ratios, strict=True) if max(each) > math.log(SLOW_FACTOR)]
            names = f"rank {slow[0]} of {group} takes" if len(slow) == 1 else f"ranks {_some(slow)} of {group} take"
            among = str(len(part)) if len(part) == len(steps) else f"the last {len(part)}"
            reason = f"{names} {factor:.1f} times as long as the others for {call}, in {len(when)} of {among} steps"
            yield Flag("straggler", when[0], reason, "workers")
            break


def _behind(seconds: Sequence[float], rank: int) -> tuple[float, float]:
    """Return a rank's time relative to the median of the others: log ratio, and difference in seconds."""
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    return math.log(max(seconds[rank], 1e-9) / max(others, 1e-9)), seconds[rank] - others


def _ends_of(spread: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the whole run, its last half, its last quarter and so on, down to a tenth."""
    length = len(spread)
    while length >= max(MIN_STEPS, len(spread) // 10):
        yield spread[-length:]
        length //= 2


def _is_slow(of_rank: Sequence[tuple[float, float]]) -> bool:
    """Return whether a rank is slower in 80 % of the steps, by 50 ms as well, and by six standard errors."""
    ratios = [ratio for ratio, _ in of_rank]
    excess = [seconds for _, seconds in of_rank]
    if sum(seconds > 0 for seconds in excess) < 0.8 * len(excess):
        return False
    if statistics.median(ratios) <= math.log(SLOW_FACTOR) or statistics.median(excess) <= 0.05:
        return False
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.mean(ratios) > 6.0 * error


def seconds_of_workers(entries: Entries) -> dict[tuple[str, str], list[tuple[int, list[float]]]]:
    """Return (group, call) -> [(step, seconds of every rank)] for groups of several workers."""
    found: dict[tuple[str, str], list[tuple[int, list[float]]]] = defaultdict(list)
    for step, group, reports in _reports(entries):
        calls = set.intersection(*(set(report["seconds"]) for report in reports)) if len(reports) > 1 else set()
        for call in sorted(calls):
            seconds = [report["seconds"][call] for report in reports]
            if all(map(math.isfinite, seconds)):
                found[group, call].append((step, seconds))
    return found


def memory_of_workers(entries: Entries) -> dict[tuple[str, int | str, str], Points]:
    """Return (group, rank, kind of memory) -> GiB by step."""
    found: dict[tuple[str, int | str, str], Points] = defaultdict(list)
    for step, group, reports in _reports(entries):
        for report in reports:
            for kind, gigabytes in report["memory"].items():
                if math.isfinite(gigabytes):
                    found[group, report["rank"], kind].append((step, gigabytes))
    return found


def _reports(entries: Entries) -> Iterator[tuple[int, str, list[WorkerReport]]]:
    """Yield step, group and reports of its ranks."""
    for step, entry in sorted(entries.items()):
        for group, reports in (entry.get("workers") or {}).items():
            yield step, group, reports


def _memory_growth(entries: Entries) -> Iterator[Flag]:
    """Flag the worker whose memory grows most after the first third of the run, if it keeps growing.

    Memory must grow by a tenth and by 0.1 GiB, steadily (rank correlation above 0.9), and a fifth of the growth must
    come late.
    """
    largest = 0.0
    flags: list[Flag] = []
    for (group, rank, kind), points in memory_of_workers(entries).items():
        course = points[len(points) // 3 :]
        if len(course) < MIN_STEPS:
            continue
        values = _medians([value for _, value in course])
        growth = values[-1] - values[0]
        late = values[-1] - values[len(values) * 2 // 3]
        grows = growth > max(0.1 * values[0], 0.1) and late > 0.2 * growth
        if grows and growth > largest and _order(values) > 0.9:
            where = {"host_gb": "the host memory", "device_gb": "the device memory"}.get(kind, kind)
            start, first = course[0]
            end, last = course[-1]
            reason = (
                f"{where} of rank {rank} of {group} grew from {first:.2f} to {last:.2f} GiB in {end - start} steps, "
                f"{(last - first) * 1024 / (end - start):.0f} MiB a step, and is still growing"
            )
            largest = growth
            flags = [Flag("memory growth", start, reason, "memory")]
    yield from flags


def _medians(values: Sequence[float]) -> list[float]:
    """Return the medians of a few stretches, because fluctuation within a stretch is no leak."""
    bounds = [len(values) * i // STRETCHES for i in range(STRETCHES + 1)]
    return [statistics.median(values[a:b]) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def _order(values: Sequence[float]) -> float:
    """Return how steadily the values rise: the share of ordered pairs minus that of inverted ones (Kendall's tau)."""
    pairs = [(b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :]]
    return sum(pairs) / len(pairs)


def _not_finite(entries: Entries) -> Iterator[Flag]:
    """Flag losses, gradients, scores and entropies that are NaN or infinite."""
    for panel, keys in _FINITE.items():
        for key in keys:
            values = ((step, entry["data"].get(key)) for step, entry in sorted(entries.items()))
            steps = [step for step, value in values if isinstance(value, float) and not abs(value) <= LARGEST]
            if steps:
                yield Flag("not finite", steps[0], f"{key} is not a finite number in {_listed(steps)}", panel)


_FINITE = {
    "gradient": ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"),
    "clip": ("actor/pg_loss", "critic/vf_loss"),
    "loss": ("train/loss", "val/loss"),
    "kl": ("actor/kl_loss",),
    "entropy": ("actor/entropy",),
    "reward": ("critic/score/mean",),
}
"""Panel -> the metrics that it shows and that are finite in a sound run."""


def _unscored(entries: Entries) -> Iterator[Flag]:
    """Flag responses that could not be scored."""
    validation = ("val-aux/reward", "validation responses", "validation")
    for key, what, panel in (("reward", "responses", "reward"), validation):
        failed = [(step, share) for step, share in points_of(entries, f"{key}/failed_ratio") if share > 0]
        if failed:
            most = max(share for _, share in failed)
            reason = f"in {_listed([step for step, _ in failed])} up to {most:.1%} of the {what} could not be scored"
            yield Flag("failed scores", failed[0][0], reason, panel)


def _nothing_trained(entries: Entries) -> Iterator[Flag]:
    """Flag a run in which no step could train the policy, or the model of a supervised run."""
    steps = [step for step, entry in entries.items() if entry["data"].keys() & {"training/global_step", "train/loss"}]
    if not steps:
        return
    how_many = "its only step" if len(steps) == 1 else f"each of its {len(steps)} steps"

    def always_zero(*keys: str) -> bool:
        values = [value for key in keys for step, value in points_of(entries, key) if step in steps]
        return len(values) == len(keys) * len(steps) and not any(values)

    scores = [points_of(entries, f"critic/score/{key}") for key in ("max", "min")]
    levels = {value for points in scores for step, value in points if step in steps}
    reason = ""
    panel = "gradient"
    if points_of(entries, "timing_s/update_critic") and not points_of(entries, "timing_s/update_actor"):
        reason = f"{how_many} updated the critic only: trainer.critic_warmup covers the run"
    elif always_zero("critic/advantages/max", "critic/advantages/min"):
        reason = f"all advantages are 0 in {how_many}: the responses to a prompt have equal scores"
        panel = "reward"
    elif len(levels) == 1 and len(scores[0]) >= len(steps):
        reason = f"all scores are {levels.pop():g} in {how_many}: no response is better than another"
        panel = "reward"
    elif len(steps) > 1 and (always_zero("actor/lr") or always_zero("train/lr")):
        reason = f"the learning rate is 0 in {how_many}: see optim.lr and the warm-up"
    elif always_zero("actor/grad_norm") or always_zero("train/grad_norm"):
        reason = f"the gradient is 0 in {how_many}"
    if reason:
        yield Flag(NOTHING_TRAINED, min(steps), reason, panel)


def _truncated(entries: Entries) -> Iterator[Flag]:
    """Flag responses nearly all of which are cut off."""
    cut = [(step, share) for step, share in points_of(entries, "response_length/clip_ratio") if share > 0.9]
    if len(cut) >= ENOUGH:
        shares = " to ".join(dict.fromkeys(f"{pick(share for _, share in cut):.0%}" for pick in (min, max)))
        steps = _listed([step for step, _ in cut])
        reason = f"in {steps} {shares} of the responses are cut off at data.max_response_length"
        yield Flag("truncated responses", cut[0][0], reason, "cut")


def _constant_validation(entries: Entries) -> Iterator[Flag]:
    """Flag metrics whose last validations are all equal and below the highest score."""
    best = max((value for _, value in points_of(entries, "critic/score/max")), default=0.0)
    constant: dict[str, Points] = {}
    for key in keys_of(entries, "val-core/"):
        points = points_of(entries, key)
        values = [value for _, value in points]
        equal = len(list(itertools.takewhile(partial(eq, values[-1]), reversed(values)))) if values else 0
        highest = max([1.0 if "/acc/" in key else best, *values])
        if equal >= ENOUGH and values[-1] < highest and not key.endswith("/std"):
            constant[key] = points[-equal:]
    if constant:
        first = min(points[0][0] for points in constant.values())
        listed = [f"{key} is {points[0][1]:.3g} in the last {len(points)}" for key, points in constant.items()]
        more = f", and {len(listed) - 3} more" if len(listed) > 3 else ""
        yield Flag("constant validation", first, f"{', '.join(listed[:3])}{more} validations", "validation")


def _no_advantages(entries: Entries) -> Iterator[Flag]:
    """Flag steps without any advantage; a run of nothing else has trained nothing."""
    highest, lowest = (dict(points_of(entries, f"critic/advantages/{key}")) for key in ("max", "min"))
    empty = [step for step, value in highest.items() if value == lowest.get(step) == 0]
    if ENOUGH <= len(empty) < len(highest):
        reason = f"all advantages are 0 in {_listed(empty)}: the responses to a prompt have equal scores"
        yield Flag("no advantages", empty[0], reason, "reward")


def _listed(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {_some(steps)}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


RULES_OF_COURSE = (_reward_collapse, _entropy_collapse, _length_explosion, _straggler, _memory_growth)
RULES_OF_STEPS = (
    _stale_weights,
    _other_lengths,
    _not_finite,
    _unscored,
    _nothing_trained,
    _truncated,
    _constant_validation,
    _no_advantages,
)
