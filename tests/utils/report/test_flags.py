"""Each flag is raised by a record that is broken in its way, at the right step and with a reason, and by no other."""

import math

import pytest

from verl.utils.report.flags import find_flags, smoothed


def test_a_healthy_run_has_no_flag(records):
    assert find_flags(records.healthy()) == []
    assert find_flags(records.healthy(steps=3)) == []
    assert find_flags({}) == [] and find_flags({0: {"data": {}}}) == []


def broken(records, kind):
    score = records.healthy()
    match kind:
        case "reward collapse":  # from step 26 on the score is that of the start
            value = lambda step: 0.15 if step > 25 else score[step]["data"]["critic/score/mean"]  # noqa: E731
            return records.changed("critic/score/mean", value)
        case "entropy collapse":
            return records.changed("actor/entropy", lambda step: 0.9 * math.exp(-step / 8))
        case "stale weights":
            return records.changed("weight_sync/versions_behind", lambda step: 1.0 if step == 12 else None)
        case "rollout mismatch":
            key = "training/rollout_log_prob_diff_mean"
            return records.changed(key, lambda step: 0.05 if step == 17 else None)
        case "length explosion":
            return records.long_responses()
        case "straggler":
            return records.slow_rank()
        case "memory growth":
            return records.leak()
        case "not finite":
            return records.changed("actor/grad_norm", lambda step: math.nan if step == 9 else None)
        case "failed scores":
            return records.changed("reward/failed_ratio", lambda step: 0.25 if step in (5, 6) else None)


@pytest.mark.parametrize(
    ("kind", "first", "reason"),
    [
        ("reward collapse", (26, 28), "is 0.15 at the end"),
        ("entropy collapse", (22, 22), r"0\.\d+ nats"),
        ("stale weights", (12, 12), "step 12 sampled with weights that were one update old"),
        ("rollout mismatch", (17, 17), "step 17 log-probabilities of rollout and trainer differ by up to 0.05"),
        ("length explosion", (18, 22), "of the responses are cut off"),
        (
            "straggler",
            (1, 1),
            "rank 1 of actor_rollout takes 2.0 times as long as the others for generation, and .* in 40 of 40",
        ),
        ("memory growth", (14, 14), r"rank 0 of actor_rollout grew .* 5\d MiB a step|rank 0 .* 4\d MiB a step"),
        ("not finite", (9, 9), "actor/grad_norm is not a finite number in step 9"),
        ("failed scores", (5, 5), "in steps 5, 6 up to 25.0%"),
    ],
)
def test_each_fault_is_flagged_alone(records, kind, first, reason):
    flags = find_flags(broken(records, kind))
    assert [flag.name for flag in flags] == [kind]
    assert first[0] <= flags[0].step <= first[1]
    import re

    assert re.search(reason, flags[0].reason), flags[0].reason


@pytest.mark.parametrize("begin", [[0.43], [0.43, 0.41]])
def test_a_score_that_is_lost_in_the_first_steps(records, begin):
    """Before there is a level of which it could be told."""
    entries = records.changed("critic/score/mean", lambda step: dict(enumerate(begin, 1)).get(step, 0.0))
    (flag,) = find_flags(entries)
    assert flag.name == "reward collapse" and flag.step in (3, 4) and "and is 0 at the end" in flag.reason
    lucky = records.healthy()
    lucky[1]["data"]["critic/score/mean"] = 0.45  # a batch of easy prompts
    assert find_flags(lucky) == []


def test_what_only_looks_like_a_fault(records):
    # a task that is solved needs no entropy
    solved = records.changed("actor/entropy", lambda step: 0.9 * math.exp(-step / 8))
    for entry in solved.values():
        entry["data"]["critic/score/mean"] = 0.99
    assert find_flags(solved) == []
    # one bad step is no collapse, and memory that levels off does not grow
    assert find_flags(records.changed("critic/score/mean", lambda step: 0.0 if step == 30 else None)) == []
    level = records.healthy()
    for step, entry in level.items():
        entry["workers"]["actor_rollout"][0]["memory"]["host_gb"] += min(step, 16) * 0.05
    assert find_flags(level) == []
    # each rank is slow in turn: uneven work, no straggler
    turns = records.healthy()
    for step, entry in turns.items():
        entry["workers"]["actor_rollout"][step % 2]["seconds"]["generation"] *= 2
    assert find_flags(turns) == []


def test_smoothing_is_a_running_median():
    assert smoothed([(1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0)]) == [(3, 2.0), (4, 3.0)]
