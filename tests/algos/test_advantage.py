"""Advantage estimators against hand-computed cases, slow references and invariances."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos import advantage as adv
from verl.trainer.ppo import core_algos

CONFIG = SimpleNamespace(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True)
FLOATS = ("token_level_rewards", "values", "reward_baselines")
GROUPED = sorted(set(core_algos.ADV_ESTIMATOR_REGISTRY) - {"gae", "remax", "reinforce_plus_plus"})


def make_batch(seed=0, uneven=True):
    """Make 7 rows of 6 tokens in uneven groups, with holes in the mask and NaN outside it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(
        [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0] * 6, [1, 1, 1, 1, 0, 0], [1] * 6]
    )
    index = ["a", "b", "a", "b", "a", "a", "b"] if uneven else list("aabbccd")
    return {
        "token_level_rewards": torch.randn(7, 6, generator=generator).double() * mask,
        "values": torch.randn(7, 6, generator=generator).double() * mask,
        "reward_baselines": torch.randn(7, generator=generator).double(),
        "response_mask": mask,
        "index": np.array(index, dtype=object),
    }


def whiten(rows, mask):
    kept = [x for row, m in zip(rows, mask, strict=True) for x, keep in zip(row, m, strict=True) if keep]
    mean, var = np.mean(kept), np.var(kept, ddof=1)
    return [[(x - mean) / np.sqrt(var + 1e-8) * keep for x, keep in zip(row, m, strict=True)]
            for row, m in zip(rows, mask, strict=True)]  # fmt: skip


def slow(name, batch, config):
    """Compute an estimator by loops over samples and tokens: (advantages, returns)."""
    rewards, values = batch["token_level_rewards"].tolist(), batch["values"].tolist()
    mask, baselines = batch["response_mask"].tolist(), batch["reward_baselines"].tolist()
    index, n, width = list(batch["index"]), len(rewards), len(rewards[0])
    scores = [sum(row) for row in rewards]
    group = {b: [scores[i] for i in range(n) if index[i] == index[b]] for b in range(n)}
    tiled = lambda per_row: [[x * m for m in row] for x, row in zip(per_row, mask, strict=True)]  # noqa: E731

    if name == "gae":
        raw = [[0.0] * width for _ in range(n)]
        returns = [[0.0] * width for _ in range(n)]
        for b in range(n):
            next_value = advantage = 0.0
            for t in reversed(range(width)):
                if mask[b][t]:
                    delta = rewards[b][t] + config.gamma * next_value - values[b][t]
                    advantage = delta + config.gamma * config.lam * advantage
                    next_value = values[b][t]
                    raw[b][t], returns[b][t] = advantage, advantage + values[b][t]
        return whiten(raw, mask), returns
    if name == "reinforce_plus_plus":
        returns = [[0.0] * width for _ in range(n)]
        for b in range(n):
            running = 0.0
            for t in reversed(range(width)):
                if mask[b][t]:
                    running = rewards[b][t] + config.gamma * running
                    returns[b][t] = running
        return whiten(returns, mask), returns
    if name == "remax":
        returns = [[sum(row[t:]) * m[t] for t in range(width)] for row, m in zip(rewards, mask, strict=True)]
        return [[(x - base) * k for x, k in zip(row, m, strict=True)]
                for row, base, m in zip(returns, baselines, mask, strict=True)], returns  # fmt: skip

    per_row = []
    for b in range(n):
        peers, score = group[b], scores[b]
        single, mean = len(peers) == 1, 0.0 if len(peers) == 1 else np.mean(peers)
        std = 1.0 if single else np.std(peers, ddof=1)
        if name in ("grpo", "grpo_vectorized"):
            per_row.append((score - mean) / (std + 1e-6))
        elif name == "grpo_passk":
            first, second = sorted(peers, reverse=True)[:2]
            per_row.append((first - second) / (std + 1e-6) if score == first else 0.0)
        elif name in ("rloo", "rloo_vectorized"):
            others = (sum(peers) - score) / (len(peers) - 1) if not single else 0.0
            per_row.append(score - others)
        elif name == "opo":
            rows = [i for i in range(n) if index[i] == index[b]]
            lengths = [sum(mask[i]) for i in rows]
            base = sum(le * scores[i] for le, i in zip(lengths, rows, strict=True)) / max(1, sum(lengths))
            per_row.append(score - (0.0 if single else base))
        elif name == "gpg":
            per_row.append((score - mean) * n / max(1, sum(x != 0 for x in scores)))
        elif name == "reinforce_plus_plus_baseline":
            per_row.append(score - mean)
    rows = tiled(per_row)
    rows = whiten(rows, mask) if name == "reinforce_plus_plus_baseline" else rows
    return rows, rows


@pytest.mark.parametrize("uneven", [True, False], ids=["uneven groups", "a group of one"])
@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_equals_slow_reference(name, uneven):
    batch = make_batch(uneven=uneven)
    estimate = core_algos.get_adv_estimator_fn(name)
    if name == "grpo_passk" and not uneven:
        with pytest.raises(ValueError, match=r"rollout\.n to 2"):
            estimate(**batch, config=CONFIG)
        return
    advantages, returns = estimate(**batch, config=CONFIG)
    want_advantages, want_returns = slow(name, batch, CONFIG)
    torch.testing.assert_close(advantages, torch.tensor(want_advantages, dtype=torch.float64), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(returns, torch.tensor(want_returns, dtype=torch.float64), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_without_config_and_with_nan_outside_the_mask(name):
    batch = make_batch()
    estimate = core_algos.get_adv_estimator_fn(name)
    plain = SimpleNamespace(gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=True)
    clean = estimate(**batch, config=plain)
    outside = batch["response_mask"] == 0
    dirty = {k: v.masked_fill(outside, torch.nan) if k in ("token_level_rewards", "values") else v
             for k, v in batch.items()}  # fmt: skip
    for got, want in zip(estimate(**dirty), clean, strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0)
        assert not got[outside].any()
    inside = dict(batch, token_level_rewards=batch["token_level_rewards"].clone())
    inside["token_level_rewards"][0, 0] = torch.nan
    assert estimate(**inside)[0].isnan().any(), "NaN inside the mask must not be hidden"


@pytest.mark.parametrize("name", GROUPED)
def test_group_shift_changes_nothing(name):
    """A constant added to every score of a group is no news; scores stand on the last sampled token."""
    batch = make_batch()
    mask = batch["response_mask"].clone()
    mask[4, 0] = 1
    scores = torch.zeros(7, 6).double()
    last = mask.double().mul(torch.arange(1, 7)).argmax(-1)
    scores[torch.arange(7), last] = torch.randn(7, generator=torch.Generator().manual_seed(3)).double() + 5
    shift = torch.tensor([{"a": 2.0, "b": -3.0}[g] for g in batch["index"]]).double()
    shifted = scores.clone()
    shifted[torch.arange(7), last] += shift
    estimate = core_algos.get_adv_estimator_fn(name)
    kwargs = {"response_mask": mask, "index": batch["index"]}
    torch.testing.assert_close(
        estimate(token_level_rewards=scores, **kwargs)[0],
        estimate(token_level_rewards=shifted, **kwargs)[0],
        atol=1e-9,
        rtol=1e-9,
    )


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_a_constant_on_every_score_changes_nothing(name):
    """Undiscounted: whitening takes it out of every token, and for ReMax the greedy response has it too."""
    batch = make_batch()
    mask = torch.arange(6) < torch.tensor([6, 3, 4, 1, 2, 4, 6]).unsqueeze(-1)
    last = mask.double().mul(torch.arange(1, 7)).argmax(-1)
    batch["response_mask"] = mask.long()
    shifted = {key: value.clone() if key in FLOATS else value for key, value in batch.items()}
    shifted["token_level_rewards"][torch.arange(7), last] += 3.0
    shifted["reward_baselines"] += 3.0
    one, other = (core_algos.estimate_advantages(name, **each, gamma=1.0, lam=1.0)[0] for each in (batch, shifted))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    shifted["token_level_rewards"][0, last[0]] += 3.0
    assert not torch.allclose(one, core_algos.estimate_advantages(name, **shifted, gamma=1.0, lam=1.0)[0])


def by_hand(name):
    """Return what an estimator gives for scores 1, 3 | 0, 4 of two groups; the first response has a single token."""
    half, seven = 0.5**0.5, (22 / 7) ** 0.5
    centred = [[-1, 0], [1, 1], [-2, -2], [2, 2]]
    returns = [[1, 0], [1.5, 3], [0, 0], [2, 4]]  # half of what comes is lost from token to token
    tokens = np.array([1, 1.5, 3, 0, 0, 2, 4])
    return {
        "grpo": [[-half, 0], [half, half], [-half, -half], [half, half]],  # deviations 2 ** 0.5 and 8 ** 0.5
        "grpo_passk": [[0, 0], [2 / 2**0.5] * 2, [0, 0], [4 / 8**0.5] * 2],
        "rloo": [[1 - 3, 0], [3 - 1] * 2, [0 - 4] * 2, [4 - 0] * 2],
        "opo": [[1 - 7 / 3, 0], [3 - 7 / 3] * 2, [0 - 2] * 2, [4 - 2] * 2],  # (1 * 1 + 2 * 3) / 3 and 2
        "gpg": [[4 / 3 * x for x in row] for row in centred],  # three of four scores are not zero
        "remax": [[1 - 1, 0], [3 - 1] * 2, [0 - 1] * 2, [4 - 1] * 2],
        # of seven tokens: mean 1 / 7, squares 19 - 1 / 7, variance a sixth of that
        "reinforce_plus_plus_baseline": [[(x - 1 / 7) / seven if x else 0 for x in row] for row in centred],
        "reinforce_plus_plus": [
            [(x - tokens.mean()) / tokens.std(ddof=1) * m for x, m in zip(row, mask, strict=True)]
            for row, mask in zip(returns, [[1, 0], [1, 1], [1, 1], [1, 1]], strict=True)
        ],
    }[name.removesuffix("_vectorized")]


@pytest.mark.parametrize("name", sorted(set(core_algos.ADV_ESTIMATOR_REGISTRY) - {"gae"}))
def test_by_hand(name):
    advantages, _ = core_algos.estimate_advantages(
        name,
        token_level_rewards=torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 0.0], [0.0, 4.0]]),
        response_mask=torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]]),
        index=list("aabb"),
        reward_baselines=torch.ones(4),
        gamma=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor(by_hand(name)).float(), atol=1e-5, rtol=1e-5)


def seen_rows(name, batch):
    """Return the rows with a token, without those that are the last of several samples of their prompt."""
    mask, index = batch["response_mask"], list(batch["index"])
    with_token = mask.any(-1).tolist()
    left = Counter(index[i] for i in range(len(index)) if with_token[i])
    compares = name in GROUPED
    alone = [compares and index.count(label) > 1 and left[label] == 1 for label in index]
    return [i for i, kept in enumerate(with_token) if kept and not alone[i]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(core_algos.ADV_ESTIMATOR_REGISTRY)))
def test_any_batch_equals_the_slow_reference(data, name):
    rows, width = data.draw(st.integers(2, 9)), data.draw(st.sampled_from([1, 4, 37]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    mask = (torch.rand(rows, width, generator=generator) < 0.8).long()
    mask[:2, 0] = 1
    index = torch.randint(0, max(1, rows // 2), (rows,), generator=generator)
    if name == "grpo_passk":
        index %= max(1, int(index.bincount().ne(1).all()) * rows)  # one group where a group of one came out
    batch = {
        "token_level_rewards": torch.randint(-2, 3, (rows, width), generator=generator).double() * mask,
        "values": torch.randn(rows, width, generator=generator).double() * mask,
        "reward_baselines": torch.randn(rows, generator=generator).double(),
        "response_mask": mask,
        "index": index.numpy(),
    }
    got = core_algos.estimate_advantages(name, **batch, config=CONFIG)
    used = seen_rows(name, batch)
    part = {key: value[used] for key, value in batch.items()}
    for one, other in zip(got, slow(name, part, CONFIG), strict=True):
        want = torch.zeros_like(one)
        want[used] = torch.tensor(other, dtype=torch.float64)
        torch.testing.assert_close(one, want, atol=1e-7, rtol=1e-6)
    fp32 = {key: value.float() if key in FLOATS else value for key, value in batch.items()}
    for one, other in zip(core_algos.estimate_advantages(name, **fp32, config=CONFIG), got, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_order_of_rows_and_padding_change_nothing(name):
    batch = make_batch()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(5))
    moved = {key: value[order.numpy() if key == "index" else order] for key, value in batch.items()}
    wider = {
        key: torch.nn.functional.pad(value, (0, 35)) if getattr(value, "ndim", 1) == 2 else value
        for key, value in batch.items()
    }
    for i, want in enumerate(core_algos.estimate_advantages(name, **batch, config=CONFIG)):
        got = core_algos.estimate_advantages(name, **moved, config=CONFIG)[i]
        torch.testing.assert_close(got, want[order], atol=1e-12, rtol=1e-12)
        got = core_algos.estimate_advantages(name, **wider, config=CONFIG)[i]
        torch.testing.assert_close(got, torch.nn.functional.pad(want, (0, 35)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "remax"])
def test_groups_do_not_touch_each_other(name):
    """What one group gets is the same without the others; whitening and the scale of gpg are over the batch."""
    batch = make_batch()
    rows = torch.tensor([i for i, label in enumerate(batch["index"]) if label == "b"])
    alone = {key: value[rows.numpy() if key == "index" else rows] for key, value in batch.items()}
    whole = core_algos.estimate_advantages(name, **batch, config=CONFIG)[0]
    torch.testing.assert_close(core_algos.estimate_advantages(name, **alone)[0], whole[rows], atol=1e-12, rtol=1e-12)


def test_grpo_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    advantages, returns = core_algos.compute_grpo_outcome_advantage(rewards, mask, np.array([7, 7, 8]))
    one = 0.5 / (0.5**0.5 + 1e-6)  # scores 1 and 0: mean 0.5, deviation sqrt(0.5)
    torch.testing.assert_close(advantages, torch.tensor([[one, one], [-one, 0], [5 / (1 + 1e-6)] * 2]))
    assert returns is advantages
    centered, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, mask, np.array([7, 7, 8]), norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(centered, torch.tensor([[0.5, 0.5], [-0.5, 0], [5.0, 5.0]]))
    off = SimpleNamespace(gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=False)
    for name in ("grpo", "grpo_vectorized"):
        by_config = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=[7, 7, 8], config=off
        )
        torch.testing.assert_close(by_config[0], centered)


def by_group(name, scores, mask, index):
    """Return the advantage of each response, whose score is on its first token."""
    mask = torch.tensor(mask)
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.tensor(scores)
    found = core_algos.estimate_advantages(
        name, token_level_rewards=rewards, response_mask=mask, index=np.array(index, dtype=object), config=None
    )[0]
    assert torch.equal(found != 0, (found[:, :1] != 0) & mask.bool())
    return [round(value, 4) for value in found[:, 0].tolist()]


def test_groups_that_have_shrunk_by_hand():
    """Of prompt a the third sample is missing, of b two of three, c is whole; the missing ones have a score of 9."""
    index = ["a", "a", "a", "b", "b", "b", "c", "c"]
    mask = [[1, 1], [1, 1], [0, 0], [1, 0], [0, 0], [0, 0], [1, 1], [1, 0]]
    scores = [1.0, 0.0, 9.0, 1.0, 9.0, 9.0, 3.0, 1.0]
    # a: mean 1/2, deviation sqrt(1/2); b has nothing to compare with; c: mean 2, deviation sqrt(2)
    half = 0.7071
    assert by_group("grpo", scores, mask, index) == [half, -half, 0, 0, 0, 0, half, -half]
    assert by_group("rloo", scores, mask, index) == [1, -1, 0, 0, 0, 0, 2, -2]
    assert by_group("opo", scores, mask, index) == [0.5, -0.5, 0, 0, 0, 0, 0.6667, -1.3333]  # c: (2 * 3 + 1) / 3
    # four responses are left, three with a score other than 0
    assert by_group("gpg", scores, mask, index) == [0.6667, -0.6667, 0, 0, 0, 0, 1.3333, -1.3333]
    assert by_group("grpo_passk", scores, mask, index) == [1.4142, 0, 0, 0, 0, 0, 1.4142, 0]
    # a prompt that never had another sample keeps its score, as without groups
    assert by_group("rloo", [2.0, 5.0], [[1], [0]], ["a", "b"]) == [2.0, 0]
    # whitened over the batch: only the rows that are seen
    whole = by_group(
        "reinforce_plus_plus_baseline", [1.0, 0.0, 3.0, 1.0], [mask[i] for i in (0, 1, 6, 7)], list("aacc")
    )
    assert by_group("reinforce_plus_plus_baseline", scores, mask, index) == [*whole[:2], 0, 0, 0, 0, *whole[2:]]


@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_rows_that_fill_a_batch_change_nothing(name):
    """With and without them the others have the same advantages and returns, bit for bit; theirs are zero."""
    batch = make_batch()
    kept = batch["response_mask"].any(-1)
    part = {key: value[kept.numpy()] if key == "index" else value[kept] for key, value in batch.items()}
    without = core_algos.estimate_advantages(name, **part, config=CONFIG)
    for found, want in zip(core_algos.estimate_advantages(name, **batch, config=CONFIG), without, strict=True):
        assert torch.equal(found[kept], want) and not found[~kept].any()
    nothing = dict(batch, response_mask=torch.zeros_like(batch["response_mask"]))
    assert not any(part.any() for part in core_algos.estimate_advantages(name, **nothing, config=CONFIG))


def test_equal_scores_give_exactly_zero():
    rewards = torch.full((8, 1), 0.1)
    mask, index = torch.ones(8, 1), ["x"] * 8
    for name in ("grpo", "grpo_vectorized", "rloo", "gpg"):
        advantages, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=index
        )
        assert not advantages.any(), name


def test_gae_by_hand_steps_over_masked_tokens():
    """With a tool's token in the middle: the same as without that token."""
    rewards = torch.tensor([[0.0, 9.0, 1.0]])
    values = torch.tensor([[0.5, 9.0, 0.25]])
    mask = torch.tensor([[1, 0, 1]])
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma=0.5, lam=0.5)
    last = 1.0 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.5 * 0.5 * last
    half = 0.5**0.5  # of two numbers that differ, whitened
    torch.testing.assert_close(advantages, torch.tensor([[-half, 0.0, half]]))
    torch.testing.assert_close(returns, torch.tensor([[first + 0.5, 0.0, last + 0.25]]))


def test_score_on_a_masked_token_counts():
    """A multi-turn answer may end in a tool's token, where the score stands."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 0], [1, 0]])
    advantages, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, ["a", "a"])
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_nothing_to_whiten(name):
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    with pytest.raises(ValueError, match="at least 2 elements"):
        core_algos.get_adv_estimator_fn(name)(**batch)


@pytest.mark.parametrize("name", [*sorted(set(GROUPED) - {"reinforce_plus_plus_baseline"}), "remax"])
def test_all_zero_mask_gives_zeros(name):
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    advantages, _ = core_algos.get_adv_estimator_fn(name)(**batch)
    assert not advantages.any()


@pytest.mark.parametrize("name", GROUPED)
def test_refuses_inputs_that_disagree(name):
    batch = make_batch()
    estimate = core_algos.get_adv_estimator_fn(name)
    with pytest.raises(ValueError, match="pass index"):
        estimate(**{k: v for k, v in batch.items() if k != "index"})
    with pytest.raises(ValueError, match="index has 6 rows"):
        estimate(**dict(batch, index=batch["index"][:6]))
    with pytest.raises(ValueError, match="must both be"):
        estimate(**dict(batch, response_mask=batch["response_mask"][:, :5]))


def test_one_call_for_all_estimators():
    """Functions of users take fewer keywords; what an estimator needs and the batch lacks is named."""

    def few(token_level_rewards, response_mask, gamma):
        return token_level_rewards * gamma, response_mask

    def many(token_level_rewards, response_mask, **kwargs):
        return token_level_rewards, torch.tensor(sorted(kwargs) == sorted(rest))

    batch = {name: value[:4] for name, value in make_batch().items()}
    rest = {"index": batch["index"], "gamma": 0.5, "lam": 0.5, "config": None}
    try:
        core_algos.register_adv_est("few")(few)
        core_algos.register_adv_est("many")(many)
        advantages, returns = core_algos.estimate_advantages(
            "few", token_level_rewards=batch["token_level_rewards"], response_mask=batch["response_mask"], **rest
        )
        torch.testing.assert_close(advantages, 0.5 * batch["token_level_rewards"])
        assert returns is batch["response_mask"]
        inputs = {"token_level_rewards": advantages, "response_mask": returns}
        assert core_algos.estimate_advantages("many", **inputs, **rest)[1]
    finally:
        del adv.ADV_ESTIMATOR_REGISTRY["few"], adv.ADV_ESTIMATOR_REGISTRY["many"]
    for name, lacking in (("remax", "reward_baselines"), ("gae", "values")):
        with pytest.raises(ValueError, match=f"adv_estimator={name} needs {lacking}, this batch has only .*index"):
            core_algos.estimate_advantages(name, **inputs, **rest)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_discounts_come_from_the_argument_then_the_config(name):
    batch = make_batch()
    estimate = core_algos.get_adv_estimator_fn(name)
    by_config = estimate(**batch, config=CONFIG)[1]
    torch.testing.assert_close(estimate(**batch, gamma=0.9, lam=0.8)[1], by_config, atol=0, rtol=0)
    torch.testing.assert_close(estimate(**batch, config={"gamma": 0.9, "lam": 0.8})[1], by_config, atol=0, rtol=0)
    other = SimpleNamespace(gamma=0.1, lam=0.1)
    torch.testing.assert_close(estimate(**batch, gamma=0.9, lam=0.8, config=other)[1], by_config, atol=0, rtol=0)
    assert not torch.equal(estimate(**batch)[1], by_config)


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_the_vectorized_names_are_the_same(name):
    """Uneven groups, tiny deviations and groups of one included; a group of one keeps its score."""
    scores = torch.tensor([1.0, 1.0 + 1e-5, 3.0, 3.0, 3.0, 7.0]).unsqueeze(-1)
    inputs = {"token_level_rewards": scores, "response_mask": torch.ones(6, 1), "index": list("aabbbc")}
    one, other = (core_algos.get_adv_estimator_fn(n)(**inputs)[0] for n in (name, f"{name}_vectorized"))
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert one[5].item() == pytest.approx(7.0, rel=2e-6)
    assert one[2:5].eq(0).all() and one[1] > 0 > one[0]


def test_a_registry_replaced_at_the_established_path_is_the_one_that_is_read(monkeypatch):
    own = core_algos.ADV_ESTIMATOR_REGISTRY
    with mock.patch("verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY", {"gae": lambda x: 2 * x}) as registry:
        assert core_algos.get_adv_estimator_fn("gae")(5) == 10
        core_algos.register_adv_est("mine")(len)
        assert set(registry) == {"gae", "mine"}
    assert core_algos.ADV_ESTIMATOR_REGISTRY is adv.ADV_ESTIMATOR_REGISTRY is own and "mine" not in own
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {"mine": len})
    assert core_algos.get_policy_loss_fn("mine") is len
    with pytest.raises(ValueError, match=r"^Unsupported loss mode: vanilla"):
        core_algos.get_policy_loss_fn("vanilla")


def test_registry():
    with pytest.raises(ValueError, match=r"^Unknown advantage estimator simply: nope.* one of .*'gae'.* got 'nope'"):
        core_algos.get_adv_estimator_fn("nope")
    assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GAE) is core_algos.get_adv_estimator_fn("gae")
    assert {e.value for e in core_algos.AdvantageEstimator} == set(core_algos.ADV_ESTIMATOR_REGISTRY)

    def mine(**kwargs):
        return kwargs

    try:
        assert core_algos.register_adv_est("mine")(mine) is mine
        core_algos.register_adv_est("mine")(mine)
        with pytest.raises(ValueError, match="already registered"):
            core_algos.register_adv_est("mine")(lambda: None)
    finally:
        del adv.ADV_ESTIMATOR_REGISTRY["mine"]
