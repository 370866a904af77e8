"""Metrics of asynchronous training, by their established names."""

from collections.abc import Iterable, Sequence

import numpy as np

from verl.trainer.asynchronous.kept import Progress
from verl.trainer.asynchronous.scheduler import Group
from verl.trainer.ppo.state import Metrics
from verl.utils.observe.timeline import Span


def group_metrics(taken: Sequence[Group], newest: int, progress: Progress, in_order: bool = False) -> Metrics:
    """Describe the groups of an update, and count them in ``progress``.

    Args: ``newest`` is the version that the servers had when the groups were taken. ``in_order`` leaves out what
        depends on the groups that have ended meanwhile.
    """
    oldest = np.array([first for group in taken for first, _ in group.spans.values()])
    span = np.array([last - first for group in taken for first, last in group.spans.values()])
    stale = oldest < newest
    progress.stale_groups += sum(group.version < newest for group in taken)
    progress.stale_trajectories += int(stale.sum())
    for group in taken:
        if group.output is not None:
            progress.add_trained(group.output)
    last = max((group.number for group in taken), default=-1)
    failed = [number for number in progress.failed if number < last or not in_order]
    metrics = {
        "fully_async/count/stale_samples_processed": float(progress.stale_groups),
        "fully_async/count/stale_trajectory_processed": float(progress.stale_trajectories),
        "fully_async/count/current_param_version": float(newest),
        "fully_async/count/failed_samples": float(len(failed)),
        "fully_async/versions_behind/max": float(newest - oldest.min(initial=newest)),
        "fully_async/versions_behind/mean": float((newest - oldest).mean()) if oldest.size else 0.0,
    }
    if in_order:
        return metrics
    return metrics | {
        **_distributions(progress),
        "fully_async/count/total_generated_samples": float(progress.generated),
        "fully_async/count/dropped_stale_samples": float(progress.dropped),
        "fully_async/count/restarted_samples": float(progress.restarted),
        "fully_async/partial/total_partial_num": float((span > 0).sum()),
        "fully_async/partial/partial_ratio": float((span > 0).mean()) if span.size else 0.0,
        "fully_async/partial/max_partial_span": float(span.max(initial=0)),
    }


def _distributions(progress: Progress) -> Metrics:
    """Return mean length and mean score of the responses that were generated, and of those that were trained."""
    if not progress.generated:  # a replay generates nothing
        return {}
    means = {
        "fully_async/length_generated": progress.tokens_generated / progress.generated,
        "fully_async/length_trained": progress.tokens_trained / progress.trained,
    }
    if progress.score_generated is not None and progress.score_trained is not None:
        means["fully_async/score_generated"] = progress.score_generated / progress.generated
        means["fully_async/score_trained"] = progress.score_trained / progress.trained
    return means


def overlap(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the share of a time, in monotonic seconds, in which at least one span goes on."""
    covered = 0.0
    until = begin
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, min(span.end, end) - max(span.start, until))
        until = max(until, span.end)
    return covered / (end - begin)
