"""Step and validation metrics against hand-computed cases and the definition by loops."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo import metric_utils
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import reduce_metrics


def make_batch():
    """Three rows, prompts of 3 columns, responses of 4; the last response was aborted, the second has a tool token."""
    attention = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    batch = {
        "attention_mask": attention,
        "response_mask": mask,
        "responses": torch.zeros(3, 4, dtype=torch.long),
        "token_level_scores": torch.tensor([[0, 2.0, 0, 0], [0, 0, 0, 1.0], [0, 0, 0, 9.0]]),
        "token_level_rewards": torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 0.5], [0, 0, 0, 9.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 99, 99], [3.0, 99, 4.0, 5.0], [99, 99, 99, 99]]),
        "returns": torch.tensor([[1.0, 2.0, 99, 99], [4.0, 99, 5.0, 8.0], [99, 99, 99, 99]]),
        "values": torch.tensor([[1.0, 1.0, 99, 99], [4.0, 99, 6.0, 8.0], [99, 99, 99, 99]]),
    }
    extras = {
        "__num_turns__": np.array([2, 4, 3]),
        "tool_call_counts": np.array([0, 3, 0]),
        "reward_failure": np.array([None, "raised", "timed out"], dtype=object),
    }
    return DataProto.from_dict(batch, extras, meta_info={"global_token_num": [4, 7, 1]})


def test_data_metrics_by_hand():
    metrics = metric_utils.compute_data_metrics(make_batch(), use_critic=True)
    returns, values = np.array([1, 2, 4, 5, 8.0]), np.array([1, 1, 4, 6, 8.0])
    want = {
        "critic/score/mean": 1.5, "critic/score/max": 2, "critic/score/min": 1,
        "critic/rewards/mean": 0.75, "critic/rewards/max": 1, "critic/rewards/min": 0.5,
        "critic/advantages/mean": 3, "critic/advantages/max": 5, "critic/advantages/min": 1,
        "critic/returns/mean": 4, "critic/returns/max": 8, "critic/returns/min": 1,
        "critic/values/mean": 4, "critic/values/max": 8, "critic/values/min": 1,
        "critic/vf_explained_var": 1 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5),
        "response_length/mean": 2, "response_length/max": 4, "response_length/min": 0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 3, "response_length_non_aborted/max": 4,
        "response_length_non_aborted/min": 2, "response_length_non_aborted/clip_ratio": 1 / 2,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 2, "prompt_length/max": 3, "prompt_length/min": 1, "prompt_length/clip_ratio": 1 / 3,
        "num_turns/mean": 3, "num_turns/max": 4, "num_turns/min": 2,
        "tool_call_counts/mean": 1, "tool_call_counts/max": 3, "tool_call_counts/min": 0,
        "reward/failed": 2, "reward/failed_ratio": 2 / 3,
    }  # fmt: skip
    assert metrics == pytest.approx(want, rel=1e-6)
    without = metric_utils.compute_data_metrics(make_batch(), use_critic=False)
    assert not any("values" in key or "vf_" in key for key in without)


def test_the_same_rows_twice_change_nothing_but_counts():
    once = make_batch()
    twice = DataProto.concat([once, once])
    want = metric_utils.compute_data_metrics(once) | {"reward/failed": 4}
    assert metric_utils.compute_data_metrics(twice) == pytest.approx(want, rel=1e-5)  # 1e-5 is added to a variance


def test_nothing_but_aborted_responses_is_an_error():
    batch = make_batch()
    batch.batch["attention_mask"] = batch.batch["attention_mask"].clone()
    batch.batch["attention_mask"][:, 3:] = 0
    with pytest.raises(ValueError, match="all 3 responses of this step are empty"):
        metric_utils.compute_data_metrics(batch)


def test_timing_and_throughput():
    batch = make_batch()
    timing = {"gen": 1.2, "ref": 2.4, "step": 6.0, "reward": 1.0}
    metrics = metric_utils.compute_timing_metrics(batch, timing)
    assert metrics == pytest.approx(
        {f"timing_s/{k}": v for k, v in timing.items()}
        | {"timing_per_token_ms/gen": 1200 / 6, "timing_per_token_ms/ref": 2400 / 12}
    )
    info = {"prompt_length": torch.tensor([2.0]), "response_length": torch.tensor([4.0])}
    with mock.patch.object(metric_utils, "_compute_response_info", lambda batch: info):
        assert metric_utils.compute_timing_metrics(batch, timing)["timing_per_token_ms/ref"] == 2400 / 6
    for compute in (metric_utils.compute_throughout_metrics, metric_utils.compute_throughput_metrics):
        assert compute(batch, timing, n_gpus=2) == {
            "perf/total_num_tokens": 12,
            "perf/time_per_step": 6.0,
            "perf/throughput": 1.0,
        }


def test_reduce_metrics():
    reduced = reduce_metrics(
        {"loss": [1.0, 3.0], "perf/max_memory": [1, 2], "score/min": [4, 3], "timing_s/gen": [1.0, 2.0],
         "minmax_diff": [1, 5], "actor/minibatch_maxout": [1, 2], "lr": 0.5}
    )  # fmt: skip
    assert reduced == {
        "loss": 2.0, "perf/max_memory": 2, "score/min": 3, "timing_s/gen": 1.5, "minmax_diff": 5,
        "actor/minibatch_maxout": 1.5, "lr": 0.5,
    }  # fmt: skip


def slow_validation(data_sources, uids, infos, seed=42):
    """Compute the metrics by their definition: prompt by prompt, draw by draw."""
    result = {}
    for source in dict.fromkeys(data_sources):
        prompts = dict.fromkeys(u for u, s in zip(uids, data_sources, strict=True) if s == source)
        for name, column in infos.items():
            if isinstance(column[0], str):
                continue
            collected = {}
            for uid in prompts:
                rows = [i for i in range(len(uids)) if uids[i] == uid and data_sources[i] == source]
                values, k = [column[i] for i in rows], len(rows)
                metrics = {f"mean@{k}": np.mean(values)}
                if k > 1:
                    metrics[f"std@{k}"] = np.std(values)
                sizes = [2**e for e in range(1, 10) if 2**e < k] + [k] if k > 1 else []
                for m in sizes:
                    random = np.random.RandomState(seed)
                    best, worst, majority = [], [], []
                    for _ in range(1000):
                        drawn = random.choice(k, size=m, replace=True)
                        best.append(max(values[i] for i in drawn))
                        worst.append(min(values[i] for i in drawn))
                        if "pred" in infos:
                            votes = {}
                            for i in drawn:
                                votes.setdefault(infos["pred"][rows[i]], []).append(values[i])
                            majority.append(max(votes.values(), key=len)[0])
                    for kind, samples in (("best", best), ("worst", worst), ("maj", majority)):
                        if samples:
                            metrics[f"{kind}@{m}/mean"] = np.mean(samples)
                            metrics[f"{kind}@{m}/std"] = np.std(samples)
                for key, value in metrics.items():
                    collected.setdefault(key, []).append(value)
            result.setdefault(source, {})[name] = {key: float(np.mean(v)) for key, v in collected.items()}
    return result


@pytest.mark.parametrize("with_pred", [True, False])
def test_validation_metrics_equal_their_definition(with_pred):
    rng = np.random.default_rng(0)
    sizes = {"p0": 5, "p1": 5, "p2": 1, "p3": 8, "p4": 2}
    uids = [u for u, n in sizes.items() for _ in range(n)]
    order = rng.permutation(len(uids))
    uids = [uids[i] for i in order]
    sources = ["gsm8k" if u in ("p0", "p2", "p3") else "math" for u in uids]
    infos = {"reward": rng.normal(size=len(uids)).tolist(), "acc": rng.integers(0, 2, len(uids)).astype(bool).tolist(),
             "note": ["x"] * len(uids)}  # fmt: skip
    if with_pred:
        infos["pred"] = [str(x) for x in rng.integers(0, 3, len(uids))]
    got = metric_utils.process_validation_metrics(sources, uids, infos)
    want = slow_validation(sources, uids, infos)
    assert got.keys() == want.keys()
    for source in want:
        assert got[source].keys() == want[source].keys()
        for name in want[source]:
            assert got[source][name] == pytest.approx(want[source][name], abs=1e-12), (source, name)


def test_the_helpers_of_forks_give_what_the_trainer_reports():
    rewards, answers = [0.0, 3.0, 1.0, 2.0], ["a", "b", "b", "c"]
    rows = [{"pred": answer, "val": reward} for answer, reward in zip(answers, rewards, strict=True)]
    got = metric_utils.process_validation_metrics(["d"] * 4, ["p"] * 4, {"reward": rewards, "pred": answers})["d"]
    best, worst = metric_utils.bootstrap_metric(rewards, subset_size=2, reduce_fns=[np.max, np.min], seed=42)
    majority = partial(metric_utils.calc_maj_val, vote_key="pred", val_key="val")
    (voted,) = metric_utils.bootstrap_metric(rows, subset_size=4, reduce_fns=[majority])
    for name, found in (("best@2", best), ("worst@2", worst), ("maj@4", voted)):
        assert found == pytest.approx((got["reward"][f"{name}/mean"], got["reward"][f"{name}/std"]), abs=1e-12)
    assert majority(rows) == 3.0
    assert metric_utils.bootstrap_metric(rewards, 2, [np.mean], n_bootstrap=5, seed=1) != [best]


def test_validation_metrics_of_many_responses():
    """More responses than fit a byte, draws of as many, and a value that is not a number."""
    rng, k = np.random.default_rng(0), 300
    infos = {"reward": rng.normal(size=k).tolist(), "pred": rng.integers(0, 200, k).tolist()}
    columns = np.array(infos["reward"])
    drawn = np.random.RandomState(42).choice(k, size=(1000, k), replace=True)
    codes = np.array(infos["pred"])[drawn]
    counts = [Counter(row) for row in codes.tolist()]  # in the order of drawing, and so is the first of the largest
    values = [columns[d[row.index(max(c, key=c.get))]] for d, row, c in zip(drawn, codes.tolist(), counts, strict=True)]
    got = metric_utils.process_validation_metrics(["d"] * k, ["p"] * k, infos)["d"]["reward"]
    assert got["maj@300/mean"] == pytest.approx(np.mean(values)) and got["maj@300/std"] == pytest.approx(np.std(values))
    assert got["best@300/mean"] == pytest.approx(columns[drawn].max(1).mean())
    assert got["worst@300/std"] == pytest.approx(columns[drawn].min(1).std())
    broken = metric_utils.process_validation_metrics(["d"] * 2, ["p"] * 2, {"reward": [float("nan"), 1.0]})
    assert np.isnan(broken["d"]["reward"]["mean@2"]) and np.isnan(broken["d"]["reward"]["best@2/mean"])


def test_debug_metrics():
    rng = torch.Generator().manual_seed(0)
    old = -torch.rand(2, 3, generator=rng)
    rollout = old + 0.1 * torch.rand(2, 3, generator=rng)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    rollout[0, 2] = torch.nan
    data = SimpleNamespace(batch={"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask,
                                  "responses": torch.zeros(2, 3)})  # fmt: skip
    a, b = rollout[mask.bool()].double().exp().numpy(), old[mask.bool()].double().exp().numpy()
    metrics = calculate_debug_metrics(data)
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": abs(a - b).max(),
            "training/rollout_probs_diff_mean": abs(a - b).mean(),
            "training/rollout_probs_diff_std": abs(a - b).std(ddof=1),
            "training/rollout_actor_probs_pearson_corr": np.corrcoef(a, b)[0, 1],
            "training/rollout_log_prob_diff_max": abs(np.log(a) - np.log(b)).max(),
            "training/rollout_log_prob_diff_mean": abs(np.log(a) - np.log(b)).mean(),
        },
        abs=1e-12,
    )
    del data.batch["response_mask"]
    data.batch["attention_mask"] = torch.cat([torch.ones(2, 4), torch.zeros(2, 3)], dim=-1)
    assert calculate_debug_metrics(data) == {"training/rollout_probs_diff_valid": 0}
    data.batch["attention_mask"][0, 4] = 1
    assert "training/rollout_actor_probs_pearson_corr" not in calculate_debug_metrics(data)
    del data.batch["attention_mask"]
    data.batch["loss_mask"] = mask
    assert calculate_debug_metrics(data) == metrics
    del data.batch["loss_mask"]
    rollout[0, 2] = old[0, 2]
    assert calculate_debug_metrics(data)["training/rollout_probs_diff_valid"] == 1


def test_answers_that_cannot_be_hashed_are_counted_by_what_they_say() -> None:
    scores = [1.0, 1.0, 0.0, 1.0]
    lists = {"reward": scores, "pred": [[1, 2], [1, 2], (3, [4]), [1, 2]]}
    texts = {"reward": scores, "pred": ["a", "a", "b", "a"]}
    got, expected = (metric_utils.process_validation_metrics(["d"] * 4, ["p"] * 4, infos) for infos in (lists, texts))
    assert got == expected and "maj@4/mean" in got["d"]["reward"]
