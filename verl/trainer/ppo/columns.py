"""Formulas over rows that run where the columns lie: on the workers (``trainer.lazy_columns``), or in the driver.

A *program* is a function over some rows, with the columns that it names. Workers run it on their part of the rows: what
it returns of one number per row comes to the driver, and its columns stay in the object store. What joins the rows
(means, deviations, group statistics, percentiles) is computed from their scalars, in the order of the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos import advantage, mismatch
from verl.algos.aggregate import SHARE_COLUMN, agg_unit, row_weights, unit_count
from verl.algos.config import AlgoConfig
from verl.algos.names import AdvantageEstimator
from verl.protocol import DataProto, pad_dataproto_to_divisor, tensors_of, unpad_dataproto
from verl.protocol.lazy import BY_REFERENCE, is_lazy
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo import phases
from verl.trainer.ppo.lengths import PROMPT_LENGTH, RESPONSE_LENGTH
from verl.trainer.ppo.phases import RolloutInvariantError, rollout_faults
from verl.trainer.ppo.segments import SEGMENTS_COLUMN

SAMPLED = "__sampled_tokens__"
"""Array (B,) of a batch by reference: tokens that the model sampled."""
VETOED = "__vetoed__"
"""Array (B,) of a batch by reference: whether a token vetoes the response."""

Program = Callable[[Worker | None, DataProto], DataProto]
_OPTIONS = "options"
_OWN = "__own__"
_CLEARED = "__cleared__"


def stays_with_workers(batch: DataProto) -> bool:
    """Whether the step is computed from scalars of the rows: columns by reference, one row for each trajectory."""
    return (
        RESPONSE_LENGTH in batch.non_tensor_batch and is_lazy(batch) and SEGMENTS_COLUMN not in batch.non_tensor_batch
    )


def _numbers(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def run(group: RayWorkerGroup, program: Program, batch: DataProto, columns: Sequence[str], **options: Any) -> DataProto:
    """Run a program on all rows; return its scalars, and its columns by reference."""
    padded, added = pad_dataproto_to_divisor(_part(batch, columns, options), group.world_size)
    output: DataProto = group.execute_with_func_generator(program, padded)
    return unpad_dataproto(output, added)


def run_where_it_lies(
    group: RayWorkerGroup | None, program: Program, batch: DataProto, columns: Sequence[str], **options: Any
) -> DataProto:
    """Run a program on all rows: on the workers for columns by reference, else in this process."""
    if group is not None and stays_with_workers(batch):
        return run(group, program, batch, columns, **options)
    return program(None, _part(batch, columns, options))


def run_on_shards(
    group: RayWorkerGroup, program: Program, batch: DataProto, columns: Sequence[str], **options: Any
) -> DataProto:
    """Run a program that returns one row for each worker; ``_own_rows`` tells it the rows that only fill the parts."""
    part = _part(batch, columns, options)
    tensors_of(part)[_OWN] = torch.ones(len(batch), dtype=torch.bool)
    padded, added = pad_dataproto_to_divisor(part, group.world_size)
    if added:
        tensors_of(padded)[_OWN][-added:] = False
    output: DataProto = group.execute_with_func_generator(program, padded)
    return output


def _part(batch: DataProto, columns: Sequence[str], options: Mapping[str, Any]) -> DataProto:
    part = batch.select(list(columns), [], [])
    part.meta_info = {BY_REFERENCE: True, _OPTIONS: dict(options)}
    return part


def options_of(data: DataProto) -> dict[str, Any]:
    """Return the options that ``run`` was called with."""
    found: dict[str, Any] = data.meta_info[_OPTIONS]
    return found


# ---- generate


def check_rollout(group: RayWorkerGroup, asked: DataProto, output: DataProto, step: int, single_turn: bool) -> None:
    """Check the output of a rollout where its columns lie.

    Raises: RolloutInvariantError, as ``phases.check_rollout``.
    """
    if is_lazy(output):
        describe_rollout(group, asked, output, step, single_turn)
    else:
        phases.check_rollout(asked, output, step, single_turn)


def describe_rollout(group: RayWorkerGroup, asked: DataProto, output: DataProto, step: int, single_turn: bool) -> None:
    """Check the output of a rollout as ``check_rollout`` does, where it lies, and add the lengths of its rows.

    Raises: RolloutInvariantError, as ``check_rollout``.
    """
    if len(output) != len(asked) or not is_lazy(output):
        phases.check_rollout(asked, output, step, single_turn)
    rows = output.select()
    for name in ("input_ids", "attention_mask"):
        tensors_of(rows)[f"asked_{name}"] = tensors_of(asked)[name]
    read = {"prompts", "responses", "input_ids", "attention_mask", "response_mask", "rollout_log_probs"}
    columns = [name for name in map(str, tensors_of(rows).keys()) if name in read or name.startswith("asked_")]
    limits = {name: output.meta_info.get(name) for name in ("pad_token_id", "eos_token_id", "ignore_eos")}
    found = tensors_of(run(group, _describe_rows, rows, columns, single_turn=single_turn, meta=limits))
    uids = asked.non_tensor_batch.get("uid")
    if uids is not None and "uid" in output.non_tensor_batch:
        moved = torch.from_numpy(uids != output.non_tensor_batch["uid"])
        _raise_first(moved, "the row belongs to another prompt (uid)", uids, step)
    for name in sorted(name for name in map(str, found.keys()) if name.startswith("fault:")):
        _raise_first(found[name], name.split(":", 2)[2], uids, step)
    for name in (PROMPT_LENGTH, RESPONSE_LENGTH, SAMPLED):
        output.non_tensor_batch[name] = found[name].numpy()


def _raise_first(bad: Tensor, fault: str, uids: np.ndarray | None, step: int) -> None:
    if bad.any():
        row = int(bad.nonzero()[0])
        uid = "" if uids is None else f" (uid {uids[row]})"
        others = int(bad.sum()) - 1
        raise RolloutInvariantError(f"step {step}, row {row}{uid}: {fault}; {others} more rows have the same fault")


def _describe_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    options = options_of(data)
    asked = DataProto.from_dict({name: tensors[f"asked_{name}"] for name in ("input_ids", "attention_mask")})
    output = data.select()
    output.meta_info = options["meta"]
    faults = rollout_faults(asked, output, options["single_turn"])
    found = {f"fault:{number:02}:{fault}": rows for number, (rows, fault) in enumerate(faults)}
    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"]
    lengths = {
        PROMPT_LENGTH: attended[:, :-width].sum(-1),
        RESPONSE_LENGTH: attended[:, -width:].sum(-1),
        SAMPLED: tensors["response_mask"].sum(-1),
    }
    return DataProto.from_dict({**found, **{name: value.long() for name, value in lengths.items()}})


# ---- infer


def log_prob_metrics(
    group: RayWorkerGroup | None, batch: DataProto, entropies: Tensor, mode: str, length: int | None
) -> dict[str, float]:
    """Return the entropy of the policy, and the gap of rollout and trainer if the rollout gave log-probabilities.

    Args: ``batch`` has ``old_log_probs``; ``entropies`` are (B, R).
    """
    rows = batch.select()
    tensors_of(rows)["entropys"] = entropies
    columns = ["entropys", "response_mask"]
    if "rollout_log_probs" in tensors_of(batch).keys():
        columns += ["old_log_probs", "rollout_log_probs"]
    found = tensors_of(run_where_it_lies(group, _log_prob_sums, rows, columns))
    shares = tensors_of(batch).get(SHARE_COLUMN, None)
    sampled = found["tokens"]
    weights = row_weights(sampled, mode, length or entropies.shape[-1], shares)
    total = (found["entropy"] * weights.to(found["entropy"].dtype)).sum()
    metrics = {"actor/entropy": (total / unit_count(sampled, agg_unit(mode), shares).to(total.dtype)).item()}
    sums = {name.removeprefix("gap:"): found[name] for name in map(str, found.keys()) if name.startswith("gap:")}
    return metrics | (mismatch.gap_metrics_of_rows(sums) if sums else {})


def _log_prob_sums(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    entropies = torch.where(mask.bool(), tensors["entropys"], 0.0)
    found = {"entropy": entropies.sum(-1), "tokens": mask.sum(-1)}
    if "rollout_log_probs" in tensors.keys():
        sums = mismatch.gap_sums_of_rows(tensors["old_log_probs"], tensors["rollout_log_probs"], mask)
        found |= {f"gap:{name}": value for name, value in sums.items()}
    return DataProto.from_dict(found)


# ---- score


def clear_response_mask(group: RayWorkerGroup | None, batch: DataProto, rows: Tensor) -> None:
    """Make the response mask of rows (B,) bool zero, where it lies."""
    part = batch.select()
    tensors_of(part)[_CLEARED] = rows
    found = run_where_it_lies(group, _cleared_mask, part, ["response_mask", _CLEARED])
    tensors_of(batch)["response_mask"] = tensors_of(found)["response_mask"]
    if SAMPLED in batch.non_tensor_batch:
        sampled = batch.non_tensor_batch[SAMPLED]
        batch.non_tensor_batch[SAMPLED] = np.where(rows.numpy(), 0, sampled)


def _cleared_mask(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    return DataProto.from_dict({"response_mask": tensors["response_mask"].masked_fill(tensors[_CLEARED][:, None], 0)})


# ---- shape


def add_rollout_weights(
    group: RayWorkerGroup, batch: DataProto, algorithm: AlgoConfig
) -> tuple[DataProto, dict[str, float]]:
    """Do what ``shaping.add_rollout_weights`` does, with ``algorithm.rollout_is_threshold`` and log-probabilities."""
    given: dict[str, Any] = {
        "level": algorithm.rollout_is_level,
        "mode": algorithm.rollout_is_mode,
        "upper": algorithm.rollout_is_threshold,
        "given_lower": algorithm.rollout_is_threshold_lower,
        "veto": algorithm.rollout_is_veto_threshold,
    }
    names = ["old_log_probs", "rollout_log_probs", "response_mask"]
    found = tensors_of(run(group, _weigh_rows, batch, names, options=given))
    sums = {name: found[name] for name in map(str, found.keys()) if name != "rollout_is_weights"}
    options = mismatch.WeightOptions(**given)
    batch.non_tensor_batch[VETOED] = (sums["catastrophic"] > 0).numpy()
    by_token = options.level == "token"
    percentiles = _token_percentiles(group, batch, names) if by_token else mismatch.percentiles_of_rows(sums)
    metrics = mismatch.metrics_of_rows(sums, options, percentiles)
    if algorithm.rollout_is:
        tensors_of(batch)["rollout_is_weights"] = found["rollout_is_weights"]
    return batch, metrics


def _weigh_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    columns, weights = mismatch.scan_rows(
        tensors["old_log_probs"],
        tensors["rollout_log_probs"],
        tensors["response_mask"],
        mismatch.WeightOptions(**options_of(data)["options"]),
    )
    return DataProto.from_dict({**columns, "rollout_is_weights": weights})


_BITS = (11, 11, 10)
"""The bits of a 32-bit number that each pass looks at."""


def _token_percentiles(group: RayWorkerGroup, batch: DataProto, names: Sequence[str]) -> list[float]:
    """Return the percentiles of the weights of all tokens: workers count the tokens by the first bits of their ratio.

    Ratios of higher rank have higher keys (``_keys``). Three passes of counts give the keys of the ranks that a
    percentile lies between, bit for bit.
    """
    count = int(batch.non_tensor_batch[SAMPLED].sum())
    if not count:
        return [0.0] * len(mismatch.QUANTILES)  # ``metrics_of_rows`` refuses such a batch
    positions = [quantile * (count - 1) for quantile in mismatch.QUANTILES]
    ranks = sorted({bound for position in positions for bound in (int(np.floor(position)), int(np.ceil(position)))})
    prefix = dict.fromkeys(ranks, 0)
    below = dict(zip(ranks, ranks, strict=True))  # rank of the wanted token among those with its prefix
    for turn, bits in enumerate(_BITS):
        wanted = sorted(set(prefix.values()))
        found = run_on_shards(group, _count_keys, batch, names, turn=turn, prefixes=wanted)
        counts = found.non_tensor_batch["counts"].sum(0).reshape(len(wanted), 1 << bits)
        for rank in ranks:
            bins = counts[wanted.index(prefix[rank])]
            before = np.cumsum(bins) - bins
            chosen = int(np.searchsorted(before + bins, below[rank], side="right"))
            below[rank] -= int(before[chosen])
            prefix[rank] = (prefix[rank] << bits) | chosen
    ratios = _ratios_of(np.array([prefix[rank] for rank in ranks], dtype=np.uint32))
    limit = mismatch.MAX_LOG_WEIGHT
    weight = dict(zip(ranks, np.exp(np.clip(ratios.astype(np.float64), -limit, limit)).tolist(), strict=True))
    values = []
    for position in positions:
        low = weight[int(np.floor(position))]
        high = weight[int(np.ceil(position))]
        values.append(low + (high - low) * (position - np.floor(position)))
    return [float(value) for value in values]


def _count_keys(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    options = options_of(data)
    keep = tensors["response_mask"].bool() & tensors[_OWN].unsqueeze(-1)
    ratio = (tensors["old_log_probs"].float() - tensors["rollout_log_probs"].float())[keep]
    keys = _keys(ratio.numpy())
    turn = options["turn"]
    bits = _BITS[turn]
    left = sum(_BITS[turn + 1 :])
    digits = (keys >> np.uint32(left)) & np.uint32((1 << bits) - 1)
    above = keys.astype(np.uint64) >> np.uint64(left + bits)
    counts = [np.bincount(digits[above == prefix], minlength=1 << bits) for prefix in options["prefixes"]]
    return DataProto.from_dict(non_tensors={"counts": np.concatenate(counts).astype(np.int64)[None]})


def _keys(ratios: np.ndarray) -> np.ndarray:
    """Return whole numbers in the order of fp32 numbers."""
    bits = (ratios.astype(np.float32) + np.float32(0.0)).view(np.uint32)  # -0.0 counts as 0.0
    return np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))


def _ratios_of(keys: np.ndarray) -> np.ndarray:
    return np.where(keys >> np.uint32(31), keys & np.uint32(0x7FFFFFFF), ~keys).astype(np.uint32).view(np.float32)


def add_advantages(
    group: RayWorkerGroup, batch: DataProto, algorithm: AlgoConfig, config: Any, name: str | AdvantageEstimator
) -> DataProto:
    """Add ``advantages`` and ``returns`` by reference, as ``shaping.compute_advantage`` does for the same estimator."""
    estimator = AdvantageEstimator(name)
    tensors = tensors_of(batch)
    if estimator in advantage.OF_RESPONSES:
        tensors["advantages"] = tensors["returns"] = _spread(group, batch, algorithm, config, estimator)
        return batch
    if estimator in advantage.OF_ROWS:
        columns = ["token_level_rewards", "response_mask", "reward_baselines"]
        found = tensors_of(run(group, _remax_rows, batch, columns))
        tensors["advantages"], tensors["returns"] = found["advantages"], found["returns"]
        return batch
    if estimator == AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
        tensors["advantages"] = _spread(group, batch, algorithm, config, estimator)
    else:
        columns = ["token_level_rewards", "response_mask"]
        columns += ["values"] if estimator == AdvantageEstimator.GAE else []
        options = {"gamma": algorithm.gamma, "lam": algorithm.lam}
        found = tensors_of(run(group, _discounted_rows, batch, columns, **options))
        tensors["advantages"], tensors["returns"] = found["advantages"], found["returns"]
    compares = estimator == AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE
    _whiten(group, batch, compares)
    if compares:
        tensors["returns"] = tensors["advantages"]
    return batch


def _spread(
    group: RayWorkerGroup, batch: DataProto, algorithm: AlgoConfig, config: Any, estimator: AdvantageEstimator
) -> Tensor:
    """Return the advantages of responses as a column by reference."""
    rewards = tensors_of(batch)["token_level_rewards"]
    of_responses = advantage.advantages_of_responses(
        estimator,
        rewards.sum(-1),
        _numbers(batch.non_tensor_batch[SAMPLED]),
        batch.non_tensor_batch.get("uid"),
        config,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
    )
    rows = batch.select(["response_mask"], [])
    tensors_of(rows)["of_response"] = of_responses
    return tensors_of(run(group, _spread_rows, rows, ["response_mask", "of_response"]))["advantages"]


def _spread_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    given = tensors["of_response"]
    return DataProto.from_dict(
        {"advantages": advantage.spread_over_tokens(given, tensors["response_mask"], given.dtype)}
    )


def _remax_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    return _of_used_rows(tensors["response_mask"], *advantage.compute_remax_outcome_advantage(**tensors))


def _discounted_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    options = options_of(data)
    rewards = tensors["token_level_rewards"]
    mask = tensors["response_mask"]
    if "values" in tensors.keys():
        found = advantage.gae_of_rows(rewards, tensors["values"], mask, options["gamma"], options["lam"])
    else:
        found = advantage.discounted_returns(rewards, mask, options["gamma"])
    return _of_used_rows(mask, *found)


def _of_used_rows(mask: Tensor, advantages: Tensor, returns: Tensor) -> DataProto:
    """Return both with zeros in rows without a sampled token, which the plain step does not show to an estimator."""
    unused = ~mask.bool().any(-1, keepdim=True)
    columns = {"advantages": advantages, "returns": returns}
    return DataProto.from_dict({name: value.masked_fill(unused, 0.0) for name, value in columns.items()})


def _whiten(group: RayWorkerGroup, batch: DataProto, compares: bool) -> None:
    """Whiten the advantages over the tokens of the rows that count: two passes, a mean and a scale between them."""
    tensors = tensors_of(batch)
    sampled = _numbers(batch.non_tensor_batch[SAMPLED])
    used = advantage.rows_to_use(sampled.unsqueeze(-1), batch.non_tensor_batch.get("uid") if compares else None)
    rows = batch.select(["advantages", "response_mask"], [])
    tensors_of(rows)["used"] = used
    names = ["advantages", "response_mask", "used"]
    count = int(sampled[used].sum())
    mean = advantage.whitening_mean(tensors["advantages"].sum(-1), count)
    found = tensors_of(run(group, _centre_rows, rows, names, mean=mean))
    tensors_of(rows)["advantages"] = found["advantages"]
    scale = advantage.whitening_scale(found["squares"], count)
    tensors["advantages"] = tensors_of(run(group, _scale_rows, rows, names, scale=scale))["advantages"]


def _centre_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    keep = tensors["response_mask"].bool() & tensors["used"].unsqueeze(-1)
    centred, squares = advantage.centre(tensors["advantages"], keep, options_of(data)["mean"])
    return DataProto.from_dict({"advantages": centred, "squares": squares})


def _scale_rows(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    advantages = tensors["advantages"] * options_of(data)["scale"]
    return DataProto.from_dict({"advantages": advantages.masked_fill(~tensors["used"].unsqueeze(-1), 0.0)})


# ---- metrics


def token_metrics(group: RayWorkerGroup, batch: DataProto, use_critic: bool) -> dict[str, float]:
    """Return the part of ``compute_data_metrics`` that reads tokens: advantages, returns and values."""
    names = ["advantages", "returns", *(["values"] if use_critic else [])]
    found = tensors_of(run(group, _token_sums, batch, [*names, "response_mask"]))
    used = _numbers(batch.non_tensor_batch[SAMPLED]) > 0
    count = float(batch.non_tensor_batch[SAMPLED].sum())
    if not count:
        return {}
    metrics: dict[str, float] = {}
    for name in names:
        metrics[f"critic/{name}/mean"] = found[f"{name}:sum"].sum().item() / count
        metrics[f"critic/{name}/max"] = found[f"{name}:max"][used].max().item()
        metrics[f"critic/{name}/min"] = found[f"{name}:min"][used].min().item()
    if use_critic:
        spread = {
            name: (found[f"{name}:squares"].sum() - found[f"{name}:sum"].sum() ** 2 / count).item() / max(count - 1, 1)
            for name in ("returns", "errors")
        }
        unexplained = spread["errors"] / (spread["returns"] + 1e-5) if count > 1 else 0.0
        metrics["critic/vf_explained_var"] = 1.0 - unexplained
    return metrics


def _token_sums(worker: Worker | None, data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    keep = tensors["response_mask"].bool()
    names = ["advantages", "returns", "values"]
    columns = {name: tensors[name] for name in names if name in tensors.keys()}
    if "values" in columns:
        columns["errors"] = columns["returns"] - columns["values"]
    found = {}
    for name, value in columns.items():
        inside = torch.where(keep, value, 0.0).double()
        found[f"{name}:sum"] = inside.sum(-1)
        found[f"{name}:squares"] = inside.square().sum(-1)
        found[f"{name}:max"] = torch.where(keep, value, -torch.inf).amax(-1)
        found[f"{name}:min"] = torch.where(keep, value, torch.inf).amin(-1)
    return DataProto.from_dict(found)
