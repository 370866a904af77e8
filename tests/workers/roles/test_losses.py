"""Losses of the roles: however a mini-batch is split, they add up to their definition on the whole."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from verl.algos.aggregate import SHARE_COLUMN, UNITS, Extreme, agg_loss, count_units
from verl.algos.names import POLICY_LOSSES
from verl.algos.policy_loss import POLICY_LOSS_REGISTRY
from verl.protocol import DataProto
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, PolicyLossConfig
from verl.workers.roles.losses import SELECTION, ppo_loss, sft_loss, value_loss

ROWS, WIDTH = 6, 5
LENGTHS = [5, 1, 3, 0, 4, 2]
SEQUENCES = 5
"""Rows with a token; the other one only fills the batch."""
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[3, 1], [5, 0, 4], [2]]]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    log_probs = normal(0.5, -2.0)
    return {
        "log_probs": log_probs,
        "entropy": normal(0.3, 2.0).abs(),
        "old_log_probs": log_probs + normal(0.4),
        "ref_log_prob": log_probs + normal(0.4),
        "rollout_log_probs": log_probs + normal(0.01),
        "rollout_is_weights": normal(0.2).exp(),
        "advantages": normal(),
        "values": normal(),
        "vpreds": normal(),
        "returns": normal(),
        "response_mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)).long(),
    }


OUTPUTS = {"log_probs": "log_probs", "entropy": "entropy", "values": "vpreds"}


def run(
    loss_fn: Any,
    config: Any,
    split: list[list[int]],
    names: list[str],
    outputs: list[str],
    data: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Do what an engine does: add the sums of the parts, and divide by the units of the whole."""
    data = numbers() if data is None else data
    leaves = {name: data[OUTPUTS[name]].clone().requires_grad_() for name in outputs}
    counts = count_units(data["response_mask"], data.get(SHARE_COLUMN))
    units = dict(zip(UNITS, counts.clamp(min=1).tolist(), strict=True))
    loss, metrics, counted = torch.zeros((), dtype=torch.float64), {}, set()
    for rows in split:
        part = DataProto.from_dict(tensors={name: data[name][rows] for name in ["response_mask", *names]})
        terms, values = loss_fn(config, {name: leaf[rows] for name, leaf in leaves.items()}, part)
        loss = loss + sum(term.total / units[term.unit] for term in terms)
        for name, value in values.items():
            if isinstance(value, Extreme):
                metrics[name] = max(metrics.get(name, -math.inf), value.value.item())
            else:
                metrics[name] = metrics.get(name, 0.0) + value.total.item() / units[value.unit]
            counted.add(name)
    loss.backward()
    gradients = {name: leaf.grad if leaf.grad is not None else torch.zeros(()) for name, leaf in leaves.items()}
    return {"loss": loss.item(), "metrics": metrics, "gradients": gradients}


def aggregate(matrix: list[list[float]], mode: str) -> float:
    rows = [row[:length] for row, length in zip(matrix, LENGTHS, strict=True)]
    total = sum(map(sum, rows))
    return {
        "token-mean": total / sum(LENGTHS),
        "seq-mean-token-sum": total / SEQUENCES,
        "seq-mean-token-mean": sum(sum(row) / max(len(row), 1) for row in rows) / SEQUENCES,
        "seq-mean-token-sum-norm": total / WIDTH / SEQUENCES,
    }[mode]


def each(function: Any, *names: str) -> list[list[float]]:
    """Apply a function to the numbers of every token."""
    data = numbers()
    columns = [data[name].tolist() for name in names]
    return [[function(*(c[b][t] for c in columns)) for t in range(WIDTH)] for b in range(ROWS)]


def clipped(new: float, old: float, advantage: float, weight: float = 1.0) -> float:
    ratio = math.exp(new - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    return weight * (min(loss, -3.0 * advantage) if advantage < 0 else loss)


def actor(**changes: Any) -> FSDPActorConfig:
    return FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, **changes)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", MODES)
def test_ppo_loss_is_policy_minus_entropy_plus_kl(mode: str, split: list[list[int]]) -> None:
    config = actor(loss_agg_mode=mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3")
    names = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights"]
    got = run(ppo_loss, config, split, names, ["log_probs", "entropy"])
    policy = aggregate(each(clipped, "log_probs", "old_log_probs", "advantages", "rollout_is_weights"), mode)
    entropy = aggregate(numbers()["entropy"].tolist(), mode)
    kl = aggregate(each(lambda new, ref: math.exp(ref - new) - (ref - new) - 1, "log_probs", "ref_log_prob"), mode)
    assert got["loss"] == pytest.approx(policy - 0.3 * entropy + 0.2 * kl, rel=1e-6)
    ratios = each(lambda new, old: old - new, "log_probs", "old_log_probs")
    wanted = {
        "actor/pg_loss": policy,
        "actor/kl_loss": kl,
        "actor/kl_coef": 0.2,
        "actor/ppo_kl": aggregate(ratios, "token-mean"),
        "actor/pg_clipfrac": aggregate(
            each(lambda n, o, a: float((n - o > math.log(1.2) and a > 0) or (n - o < math.log(0.8) and a < 0)),
                 "log_probs", "old_log_probs", "advantages"),
            "token-mean",
        ),
        "actor/pg_clipfrac_lower": 0.0,
    }  # fmt: skip
    assert got["metrics"] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    unit = aggregate([[1.0] * WIDTH] * ROWS, mode)
    assert got["gradients"]["entropy"].sum().item() == pytest.approx(-0.3 * unit, rel=1e-6)
    outside = numbers()["response_mask"] == 0
    assert not got["gradients"]["log_probs"][outside].any()


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "gpg", "geo_mean", "cispo", "sapo"])
@pytest.mark.parametrize("mode", MODES)
def test_no_split_changes_a_policy_loss(loss_mode: str, mode: str) -> None:
    config = actor(loss_agg_mode=mode, policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    whole, *others = [
        run(ppo_loss, config, split, ["old_log_probs", "advantages"], ["log_probs", "entropy"]) for split in SPLITS
    ]
    assert whole["loss"] != 0 and whole["gradients"]["log_probs"].abs().sum() > 0
    for other in others:
        assert other["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert other["metrics"] == pytest.approx(whole["metrics"], rel=1e-6, abs=1e-9)
        torch.testing.assert_close(other["gradients"], whole["gradients"])


@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_rows_twice_change_nothing(loss_mode: str, mode: str) -> None:
    """Policy, entropy, KL and value, with their metrics: a batch twice as large has the same loss, in any split.

    Selected tokens are copied: the losses that select choose over the whole mini-batch, before.
    """
    rows = numbers() | {SELECTION: numbers()["advantages"] > 0.5}
    data = {name: torch.cat([value, value]) for name, value in rows.items()}
    again = [part + [row + ROWS for row in part] for part in SPLITS[2]]
    options = {"entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.2, "loss_scale_factor": 3}
    config = actor(loss_agg_mode=mode, policy_loss=PolicyLossConfig(loss_mode=loss_mode), **options)
    critic = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, loss_scale_factor=3)
    names = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", SELECTION]
    for loss_fn, node, read, outputs in (
        (ppo_loss, config, names, ["log_probs", "entropy"]),
        (value_loss, critic, ["values", "returns"], ["values"]),
    ):
        once, more = run(loss_fn, node, SPLITS[0], read, outputs, rows), run(loss_fn, node, again, read, outputs, data)
        assert once["loss"] != 0 and more["loss"] == pytest.approx(once["loss"], rel=1e-6)
        assert more["metrics"] == pytest.approx(once["metrics"], rel=1e-6, abs=1e-9)
        for name, gradient in once["gradients"].items():
            torch.testing.assert_close(more["gradients"][name], torch.cat([gradient, gradient]) / 2)


@pytest.mark.parametrize("split", SPLITS)
def test_a_single_update_needs_no_old_log_probs(split: list[list[int]]) -> None:
    """The current ones, detached, stand for them: a ratio of one, and the gradient of the policy gradient."""
    got = run(ppo_loss, actor(), split, ["advantages"], ["log_probs", "entropy"])
    data = numbers()
    mean = aggregate(data["advantages"].tolist(), "token-mean")
    assert got["loss"] == pytest.approx(-mean, rel=1e-6)
    expected = -data["advantages"] * data["response_mask"] / sum(LENGTHS)
    torch.testing.assert_close(got["gradients"]["log_probs"], expected)
    assert got["metrics"]["actor/ppo_kl"] == 0 and got["metrics"]["actor/pg_clipfrac"] == 0
    assert got["metrics"]["actor/entropy"] == pytest.approx(aggregate(data["entropy"].tolist(), "token-mean"))
    assert not got["gradients"]["entropy"].any()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", MODES)
def test_value_loss_by_its_definition(mode: str, split: list[list[int]]) -> None:
    config = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, cliprange_value=0.5)
    got = run(value_loss, config, split, ["values", "returns"], ["values"])

    def errors(predicted: float, old: float, target: float) -> tuple[float, float]:
        return (predicted - target) ** 2, (min(max(predicted, old - 0.5), old + 0.5) - target) ** 2

    names = ("vpreds", "values", "returns")
    loss = aggregate(each(lambda *token: 0.5 * max(errors(*token)), *names), mode)
    share = aggregate(each(lambda *token: float(errors(*token)[1] > errors(*token)[0]), *names), "token-mean")
    wanted = {
        "critic/vf_loss": loss,
        "critic/vf_clipfrac": share,
        "critic/vpred_mean": aggregate(numbers()["vpreds"].tolist(), "token-mean"),
    }
    assert got["loss"] == pytest.approx(loss, rel=1e-6)
    assert got["metrics"] == pytest.approx(wanted, rel=1e-6)
    outside = numbers()["response_mask"] == 0
    assert not got["gradients"]["values"][outside].any()


@pytest.mark.parametrize("split", SPLITS)
def test_sft_loss_is_the_mean_over_trained_tokens(split: list[list[int]]) -> None:
    got = run(sft_loss, None, split, [], ["log_probs"])
    wanted = -aggregate(numbers()["log_probs"].tolist(), "token-mean")
    assert got["loss"] == pytest.approx(wanted) and got["metrics"] == pytest.approx({"loss": wanted})


def half_of_the_width(loss_fn: Any, config: Any, names: list[str], outputs: list[str]) -> tuple[float, float]:
    """Return the loss divided by the width of the tensors, and by twice as much."""
    losses = [
        run(loss_fn, dataclasses.replace(config, loss_scale_factor=length), SPLITS[1], names, outputs)["loss"]
        for length in (None, WIDTH, 2 * WIDTH)
    ]
    assert losses[0] == pytest.approx(losses[1])
    return losses[1], losses[2]


@pytest.mark.parametrize("loss_mode", ["vanilla", "gpg", "of the user"])
def test_the_configured_length_divides(loss_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every term of the actor and of the critic, also where a loss of the user's divided by the width."""
    mode = "seq-mean-token-sum-norm"

    def of_the_user(old: Any, new: Tensor, advantages: Any, mask: Tensor, agg: str, *_: Any) -> Any:
        return agg_loss(-new, mask, agg), *torch.zeros(3)

    def positional(**given: Any) -> Any:
        return of_the_user(*given.values())

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "of the user", positional)
    policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    config = actor(loss_agg_mode=mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.2, policy_loss=policy_loss)
    names = ["old_log_probs", "advantages", "ref_log_prob"]
    whole, half = half_of_the_width(ppo_loss, config, names, ["log_probs", "entropy"])
    assert half == pytest.approx(whole / 2) and whole != 0
    critic = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    whole, half = half_of_the_width(value_loss, critic, ["values", "returns"], ["values"])
    assert half == pytest.approx(whole / 2) and whole != 0


def test_what_was_not_selected_over_the_mini_batch_is_refused() -> None:
    config = actor(policy_loss=PolicyLossConfig(loss_mode="clip_cov"))
    with pytest.raises(ValueError, match="'clip_cov' selects tokens over the whole mini-batch"):
        run(ppo_loss, config, SPLITS[0], ["old_log_probs", "advantages"], ["log_probs"])


@pytest.mark.parametrize("loss_type", ["k1", "abs", "k2", "k3", "k1+", "abs+", "mse+", "low_var_kl+"])
def test_the_kl_term_with_nan_outside_the_mask(loss_type: str) -> None:
    """Forms with a ``+`` have the value of the estimator and the gradient of k2."""
    config = actor(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=loss_type)
    data = numbers()
    mask = data["response_mask"].bool()
    leaf = torch.where(mask, data["log_probs"], 0.0).requires_grad_()
    part = DataProto.from_dict(
        tensors={
            "response_mask": data["response_mask"],
            "old_log_probs": leaf.detach(),
            "advantages": torch.zeros(ROWS, WIDTH),
            "ref_log_prob": data["ref_log_prob"].masked_fill(~mask, torch.nan),
        }
    )
    terms, metrics = ppo_loss(config, {"log_probs": leaf}, part)
    sum(term.total for term in terms).backward()
    d = (data["log_probs"] - data["ref_log_prob"])[mask]
    value = {
        "k1": d,
        "abs": d.abs(),
        "k2": d**2 / 2,
        "mse": d**2 / 2,
        "k3": torch.exp(-d) + d - 1,
        "low_var_kl": torch.exp(-d) + d - 1,
    }[loss_type.removesuffix("+")]
    slope = {"k1": torch.ones_like(d), "abs": d.sign(), "k2": d, "k3": 1 - torch.exp(-d)}.get(loss_type, d)
    assert metrics["actor/kl_loss"].total.item() == pytest.approx(value.sum().item())
    torch.testing.assert_close(leaf.grad[mask], slope)
    assert not leaf.grad[~mask].any()


PIECES = [(0, 0, 2), (0, 2, 5), (1, 0, 1), (2, 0, 3), (3, 0, 0), (4, 0, 1), (4, 1, 2), (4, 2, 4), (5, 0, 2)]
"""(row, first, last) of the tokens of each segment: two trajectories have several."""


def in_segments() -> dict[str, Tensor]:
    """Return the numbers with each segment in a row of its own."""
    cut = {}
    for name, column in numbers().items():
        cut[name] = torch.full((len(PIECES), WIDTH), math.nan if column.is_floating_point() else 0, dtype=column.dtype)
        for row, (source, first, last) in enumerate(PIECES):
            cut[name][row, : last - first] = column[source, first:last]
    return cut | {SHARE_COLUMN: torch.tensor([(end - at) / max(LENGTHS[row], 1) for row, at, end in PIECES])}


@pytest.mark.parametrize("split", [[list(range(9))], [[4], [0, 7, 2], [1, 3], [8, 5, 6]]])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_mode", ["vanilla", "sapo", "of the user", "value"])
def test_a_trajectory_of_several_rows_gives_what_it_gives_in_one(
    loss_mode: str, mode: str, split: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, metrics and the gradient of each token; losses whose ratio is that of a sequence take each row as one."""

    def of_the_user(old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor, agg: str, *_: Any) -> Any:
        return agg_loss(-new * advantages.exp(), mask, agg), *torch.zeros(3)

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "of the user", lambda **given: of_the_user(*given.values()))
    config: Any = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    loss_fn, names, outputs = value_loss, ["values", "returns"], ["values"]
    if loss_mode != "value":
        options = {"entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
        config = actor(loss_agg_mode=mode, policy_loss=PolicyLossConfig(loss_mode=loss_mode), **options)
        loss_fn, outputs = ppo_loss, ["log_probs", "entropy"]
        names = ["old_log_probs", "advantages", "ref_log_prob"]
    whole = run(loss_fn, config, SPLITS[0], names, outputs)
    found = run(loss_fn, config, split, [*names, SHARE_COLUMN], outputs, in_segments())
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)  # shares are fp32 here
    assert found["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
    for name in outputs:
        for row, (source, first, last) in enumerate(PIECES):
            gradient = found["gradients"][name][row, : last - first]
            torch.testing.assert_close(gradient, whole["gradients"][name][source, first:last], rtol=1e-6, atol=1e-9)


def test_rows_without_shares_are_counted_as_before() -> None:
    """Shares of 1 change no bit."""
    names = ["old_log_probs", "advantages"]
    shares = {SHARE_COLUMN: torch.ones(ROWS, dtype=torch.float64)}
    for loss_mode in ("vanilla", "gspo", "geo_mean"):
        config = actor(loss_agg_mode="seq-mean-token-mean", policy_loss=PolicyLossConfig(loss_mode=loss_mode))
        plain = run(ppo_loss, config, SPLITS[2], names, ["log_probs"])
        found = run(ppo_loss, config, SPLITS[2], [*names, SHARE_COLUMN], ["log_probs"], numbers() | shares)
        assert found["loss"] == plain["loss"]
        assert torch.equal(found["gradients"]["log_probs"], plain["gradients"]["log_probs"])


def test_log_probs_of_the_rollout_bring_the_metrics_of_the_pass_that_no_longer_runs() -> None:
    data = numbers()
    part = DataProto.from_dict(
        tensors={
            "response_mask": data["response_mask"],
            "old_log_probs": data["log_probs"].clone(),
            "rollout_log_probs": data["log_probs"].clone(),
            "advantages": torch.ones(ROWS, WIDTH),
        }
    )
    output = {"log_probs": data["log_probs"], "entropy": torch.ones(ROWS, WIDTH)}
    found = [set(ppo_loss(actor(use_rollout_log_probs=bypass), output, part)[1]) for bypass in (False, True)]
    assert "actor/entropy" not in found[0] and "actor/entropy" in found[1] and found[0] < found[1]
