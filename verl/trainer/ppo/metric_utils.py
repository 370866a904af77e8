"""Metrics that the driver computes: of the batch of a step, its times and throughput, and of a validation."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Number
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregate import SHARE_COLUMN, agg_unit, row_weights, unit_count
from verl.algos.mismatch import gap_metrics_of_rows, gap_sums_of_rows
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import Workers, computed
from verl.trainer.ppo.conversations import turn_metrics
from verl.trainer.ppo.phases import lengths_of
from verl.trainer.ppo.segments import Joined, per_trajectory
from verl.utils.metric import reduce_metrics as reduce_metrics
from verl.workers.rollout.base import DROPPED_COLUMN

_TIMERS_OVER_RESPONSE = ("gen",)
_TIMERS_OVER_ALL = ("ref", "values", "adv", "update_critic", "update_actor")
_NUM_BOOTSTRAP = 1000
T = TypeVar("T")
_ROWS_PER_BYTE = 250
_PROMPTS_AT_ONCE = 256


# Training


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """Return ``prompt_length`` and ``response_length`` in tokens, (B,) floats, and ``response_mask``, (B, R).

    ``response_mask`` is the attention mask of the response. Forks import this function, and tests of users replace it.
    """
    tensors = tensors_of(batch)
    width = tensors["responses"].shape[-1]
    prompt_length, response_length = lengths_of(batch)
    return {
        "response_mask": tensors["attention_mask"][:, -width:],
        "prompt_length": prompt_length.float(),
        "response_length": response_length.float(),
    }


def _summary(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _length_summary(name: str, lengths: Tensor, is_full: Tensor) -> dict[str, float]:
    return {**_summary(name, lengths), f"{name}/clip_ratio": is_full.float().mean().item()}


def log_prob_metrics(
    batch: DataProto, entropies: Tensor, mode: str, length: int | None, group: Workers | None = None
) -> dict[str, float]:
    """Return the entropy of the policy, and the gap of rollout and trainer if the rollout gave log-probabilities.

    Args: ``batch`` has ``old_log_probs``; ``entropies`` are (B, R).
    """
    rows = batch.select()
    tensors_of(rows)["entropys"] = entropies
    columns = ["entropys", "response_mask"]
    if "rollout_log_probs" in tensors_of(batch).keys():
        columns += ["old_log_probs", "rollout_log_probs"]
    found = tensors_of(computed(_log_prob_sums, rows, columns, group=group))
    shares = tensors_of(batch).get(SHARE_COLUMN, None)
    sampled = found["tokens"]
    weights = row_weights(sampled, mode, length or entropies.shape[-1], shares)
    total = (found["entropy"] * weights.to(found["entropy"].dtype)).sum()
    metrics = {"actor/entropy": (total / unit_count(sampled, agg_unit(mode), shares).to(total.dtype)).item()}
    sums = {name.removeprefix("gap:"): found[name] for name in map(str, found.keys()) if name.startswith("gap:")}
    return metrics | (gap_metrics_of_rows(sums) if sums else {})


def _log_prob_sums(data: DataProto) -> DataProto:
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    entropies = torch.where(mask.bool(), tensors["entropys"], 0.0)
    found = {"entropy": entropies.sum(-1), "tokens": mask.sum(-1)}
    if "rollout_log_probs" in tensors.keys():
        sums = gap_sums_of_rows(tensors["old_log_probs"], tensors["rollout_log_probs"], mask)
        found |= {f"gap:{name}": value for name, value in sums.items()}
    return DataProto.from_dict(found)


def _token_metrics(data: DataProto) -> DataProto:
    """Return the metrics of advantages, returns and values, none without a token, as ``metrics``."""
    tensors = tensors_of(data)
    mask = tensors["response_mask"].bool()
    if not mask.any():
        return DataProto(meta_info={"metrics": {}})
    metrics = _summary("critic/advantages", tensors["advantages"][mask])
    metrics |= _summary("critic/returns", tensors["returns"][mask])
    if "values" in tensors.keys():
        values = tensors["values"][mask]
        returns = tensors["returns"][mask]
        unexplained = (returns - values).var() / (returns.var() + 1e-5) if len(returns) > 1 else torch.tensor(0.0)
        metrics |= _summary("critic/values", values)
        metrics["critic/vf_explained_var"] = 1.0 - unexplained.item()
    return DataProto(meta_info={"metrics": metrics})


def compute_data_metrics(batch: DataProto, use_critic: bool = True, group: Workers | None = None) -> dict[str, float]:
    """Summarise scores, rewards, advantages, returns, values and lengths of a training batch.

    Scores and rewards leave out aborted responses, which have no token. Rows without a trajectory are left out of all.
    A trajectory of several rows counts once: its length is the sum over its rows, and it counts as truncated if one of
    its rows is. Prompt lengths are those of all rows. A worker of ``group`` reads columns by reference.

    Raises: ValueError when all responses were aborted, or the response mask is empty.
    """
    reasons = _failures(batch)
    batch = without_dropped(batch)
    tensors = tensors_of(batch)
    info = _compute_response_info(batch)
    prompt_length = info["prompt_length"]
    response_length = info["response_length"]
    response_limit = tensors["responses"].shape[-1]
    is_full = response_length == response_limit
    scores = tensors["token_level_scores"]
    rewards = tensors["token_level_rewards"]
    if whole := Joined.of(batch):
        response_length = whole.total(response_length)
        is_full = whole.total(is_full.float()) > 0
        scores = whole.rewards(scores)
        rewards = whole.rewards(rewards)
    finished = response_length > 0
    names = ["advantages", "returns", *(["values"] if use_critic else []), "response_mask"]
    of_tokens = computed(_token_metrics, batch, names, group=group).meta_info["metrics"]
    if not finished.any() or not of_tokens:
        raise ValueError(f"all {len(response_length)} responses of this step are empty: there is nothing to learn from")

    prompt_limit = tensors["attention_mask"].shape[-1] - response_limit
    metrics = {
        **_summary("critic/score", scores.sum(-1)[finished]),
        **_summary("critic/rewards", rewards.sum(-1)[finished]),
        **_length_summary("response_length", response_length, is_full),
        **_length_summary("response_length_non_aborted", response_length[finished], is_full[finished]),
        "response/aborted_ratio": (~finished).float().mean().item(),
        **_length_summary("prompt_length", prompt_length, prompt_length == prompt_limit),
    }
    metrics |= of_tokens
    columns = per_trajectory(batch).non_tensor_batch
    metrics |= failure_metrics("reward", reasons)
    counted = {"__num_turns__": "num_turns", "tool_call_counts": "tool_call_counts"}
    for column, name in counted.items():
        counts = [float(count) for count in columns.get(column, ()) if count is not None]
        if counts:
            metrics |= _summary(name, torch.tensor(counts, dtype=torch.float64))
    if "segments" in columns:  # only loops that may return several say how many
        segments = [1.0 if count is None else float(count) for count in columns["segments"]]
        metrics |= _summary("segments", torch.tensor(segments, dtype=torch.float64))
    if "cut_segments" in columns:
        metrics["segments/cut"] = float(sum(count or 0 for count in columns["cut_segments"]))
    return metrics | turn_metrics(batch)


def without_dropped(batch: DataProto) -> DataProto:
    """Return the rows that have a trajectory: all, unless agent loops failed (``rollout.agent.on_failure``)."""
    dropped = batch.non_tensor_batch.get(DROPPED_COLUMN)
    if dropped is None or not dropped.any():
        return batch
    return batch.select_idxs(torch.from_numpy(~dropped.astype(bool)))


def _failures(batch: DataProto) -> list[str | None] | None:
    """Return why each trajectory was not scored, None for a scored one; None for all if no column holds reasons."""
    columns = per_trajectory(batch).non_tensor_batch
    if "reward_failure" not in columns:
        return None
    dropped = columns.get(DROPPED_COLUMN, [False] * len(columns["reward_failure"]))
    pairs = zip(columns["reward_failure"], dropped, strict=True)
    return [reason for reason, is_dropped in pairs if reason is not None or not is_dropped]


def failure_metrics(name: str, reasons: Sequence[str | None] | np.ndarray | None) -> dict[str, float]:
    """Count the responses that could not be scored, from the extra ``reward_failure`` of the reward managers."""
    if reasons is None or not len(reasons):
        return {}
    failed = sum(reason is not None for reason in reasons)
    return {f"{name}/failed": failed, f"{name}/failed_ratio": failed / len(reasons)}


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Report each timer in seconds, and the main ones in milliseconds per token."""
    info = _compute_response_info(batch)
    prompt_length = info["prompt_length"]
    response_length = info["response_length"]
    response_tokens = response_length.sum().item()
    all_tokens = prompt_length.sum().item() + response_tokens
    tokens = dict.fromkeys(_TIMERS_OVER_RESPONSE, response_tokens) | dict.fromkeys(_TIMERS_OVER_ALL, all_tokens)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, count in tokens.items():
        if name in timing_raw and count:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / count
    return metrics


def compute_throughput_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Report tokens, seconds, and tokens per second and device, of the timer ``step``."""
    tokens = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


compute_throughout_metrics = compute_throughput_metrics  # the spelling of the established verl interface


# Validation


def subset_sizes(num_responses: int) -> list[int]:
    """Return 2, 4, 8 and so on below the number of responses, and that number; nothing for a single response."""
    if num_responses < 2:
        return []
    return [*(2**power for power in range(1, (num_responses - 1).bit_length())), num_responses]


def _ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each of (P, k) values within its prompt, and the value of each rank; equal values tie.

    Returns: two (k, P) arrays. Ranks replace values because small integers compare several times faster.
    """
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    steps = np.zeros(values.shape, dtype=np.int64)
    steps[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    dense = steps.cumsum(axis=1)
    ranks = np.zeros_like(dense)
    levels = np.zeros_like(values)
    np.put_along_axis(ranks, order, dense, axis=1)
    np.put_along_axis(levels, dense, ascending, axis=1)
    return _small(ranks.T), levels[:, : dense.max() + 1].T


def _small(numbers: np.ndarray) -> np.ndarray:
    """Store numbers from 0 to the length of the first dim in as few bytes as they need."""
    return np.ascontiguousarray(numbers, dtype=np.min_scalar_type(len(numbers)))


def _extremes(ranks: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest and smallest rank in each draw of (k, P) ranks: two (1000, P) arrays."""
    best = ranks[draws[:, 0]]
    worst = best.copy()
    drawn = np.empty_like(best)
    for column in draws.T[1:]:
        np.take(ranks, column, axis=0, out=drawn)
        np.maximum(best, drawn, out=best)
        np.minimum(worst, drawn, out=worst)
    return best, worst


def _majority(codes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the response with the most frequent answer of each draw: (1000, P) numbers, of (k, P) codes.

    Among equally frequent answers, the one drawn first wins.
    """
    size = draws.shape[1]
    answers = [codes[column] for column in draws.T]
    votes = np.ones((size, *answers[0].shape), dtype=np.min_scalar_type(size))
    for i in range(size):
        for j in range(i):
            same = answers[i] == answers[j]
            votes[i] += same
            votes[j] += same
    # The upper digits hold the votes and the lower ones the draw, reversed, so that the maximum is the answer with the
    # most votes, and in a tie the earliest draw.
    top = np.zeros(answers[0].shape, dtype=np.min_scalar_type((size + 1) * size))
    for i in range(size):
        np.maximum(top, votes[i] * top.dtype.type(size) + top.dtype.type(size - 1 - i), out=top)
    return np.take_along_axis(draws, size - 1 - (top % size).astype(np.int64), axis=1).astype(codes.dtype)


def _times(chosen: np.ndarray, num_levels: int) -> np.ndarray:
    """Count each number below ``num_levels`` in each column of (1000, P) numbers: (num_levels, P)."""
    num_draws, width = chosen.shape
    reached = np.zeros((num_draws, -(-width // 8) * 8), dtype=bool)
    at_least = np.zeros((num_levels + 1, reached.shape[1]), dtype=np.int64)
    at_least[0] = num_draws
    for level in range(1, num_levels):
        np.greater_equal(chosen, level, out=reached[:, :width])
        # Eight columns of bytes are added at once, as one integer; no byte overflows, since a block has 250 rows.
        parts = reached.view(np.uint64).reshape(-1, _ROWS_PER_BYTE, reached.shape[1] // 8).sum(axis=1)
        at_least[level] = parts.view(np.uint8).sum(axis=0)
    return (at_least[:-1] - at_least[1:])[:, :width]


def _mean_and_std(name: str, times: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    """Summarise (k, P) values of which each was drawn a number of times."""
    share = times / _NUM_BOOTSTRAP
    mean = np.where(times > 0, share * values, 0.0).sum(axis=0)
    square = np.where(times > 0, share * (values - mean) ** 2, 0.0).sum(axis=0)
    return {f"{name}/mean": mean, f"{name}/std": np.sqrt(square)}


def _codes(answers: list[list[T]]) -> np.ndarray:
    """Number the distinct answers of each prompt: (k, P)."""
    rows = []
    for row in answers:
        number: dict[Hashable, int] = {}
        rows.append([number.setdefault(_hashable(answer), len(number)) for answer in row])
    return _small(np.array(rows).T)


def _hashable(answer: T) -> T | str:
    """Return an answer, or the text of one that cannot be hashed: a list, a dict, an array."""
    try:
        hash(answer)
    except TypeError:
        return repr(answer)
    return answer


def _prompt_metrics(
    variables: dict[str, np.ndarray], codes: np.ndarray | None, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """Compute every metric of prompts with k responses each: variable -> metric -> (P,)."""
    k = next(iter(variables.values())).shape[1]
    ranks = {name: _ranks(values) for name, values in variables.items()}
    result: dict[str, dict[str, np.ndarray]] = {}
    for name, values in variables.items():
        result[name] = {f"mean@{k}": values.mean(1)} | ({f"std@{k}": values.std(1)} if k > 1 else {})
    for size in subset_sizes(k):
        # Bootstrap: 1000 draws of ``size`` responses with replacement, (1000, size), the same for every prompt.
        draws = np.random.RandomState(seed).choice(k, size=(_NUM_BOOTSTRAP, size), replace=True)
        chosen = _times(_majority(codes, draws), k) if codes is not None else None
        for name, (rank, levels) in ranks.items():
            for kind, drawn in zip(("best", "worst"), _extremes(rank, draws), strict=True):
                result[name] |= _mean_and_std(f"{kind}@{size}", _times(drawn, len(levels)), levels)
            if chosen is not None:
                result[name] |= _mean_and_std(f"maj@{size}", chosen, variables[name].T)
    return result


def _is_numeric(values: Sequence[T]) -> bool:
    return all(isinstance(value, (Number, np.bool_)) for value in values)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[T]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Summarise the responses of each prompt, and average over the prompts of a data source.

    For k responses: ``mean@k``, ``std@k`` and, for m of 2, 4, 8, ... and k, the mean and deviation over 1000 draws of
    m responses with replacement of the best (``best@m``), the worst (``worst@m``), and the value of the most frequent
    ``pred`` (``maj@m``, if that variable exists). A variable is left out of a data source where it is not a number in
    all responses, and ``maj@m`` where no response has a ``pred``.

    Returns: data source -> variable -> metric -> value.
    """
    rows_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of[key].append(row)
    prompts_of: dict[str, list[list[int]]] = defaultdict(list)
    for (source, _), rows in rows_of.items():
        prompts_of[source].append(rows)
    return {source: _source_metrics(prompts, infos_dict, seed) for source, prompts in prompts_of.items()}


def _source_metrics(
    prompts: Sequence[Sequence[int]], infos_dict: Mapping[str, Sequence[T]], seed: int
) -> dict[str, dict[str, float]]:
    """Return the metrics of a data source (variable -> metric -> value), given the rows of each prompt."""
    own = [row for rows in prompts for row in rows]
    columns = {name: [values[row] for row in own] for name, values in infos_dict.items() if len(values)}
    numeric = {name: np.array(v, dtype=np.float64) for name, v in columns.items() if _is_numeric(v)}
    answers = columns.get("pred", [])
    has_answers = any(answer is not None for answer in answers)
    # Number of responses -> the positions in ``own`` of each prompt with so many.
    alike: dict[int, list[range]] = defaultdict(list)
    end = 0
    for rows in prompts:
        alike[len(rows)].append(range(end, end + len(rows)))
        end += len(rows)
    values: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)  # (variable, metric) -> values by chunk
    for group in alike.values() if numeric else ():
        for at in range(0, len(group), _PROMPTS_AT_ONCE):
            chunk = np.array(group[at : at + _PROMPTS_AT_ONCE])
            codes = _codes([[answers[i] for i in row] for row in chunk]) if has_answers else None
            computed = _prompt_metrics({name: v[chunk] for name, v in numeric.items()}, codes, seed)
            for name, metrics in computed.items():
                for metric, value in metrics.items():
                    values[name, metric].append(value)
    result: dict[str, dict[str, float]] = {}
    for (name, metric), parts in values.items():  # sorted, so that the order of the prompts does not change the sum
        result.setdefault(name, {})[metric] = float(np.sort(np.concatenate(parts)).mean())
    return result


# For forks and tests, which import these two


def bootstrap_metric(
    data: Sequence[T],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[T]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Return mean and deviation of each function over random subsets of the data, drawn with replacement."""
    draws = np.random.RandomState(seed).choice(len(data), size=(n_bootstrap, subset_size), replace=True)
    subsets = [[data[i] for i in draw] for draw in draws]
    found = np.array([[reduce(subset) for subset in subsets] for reduce in reduce_fns])
    return [(float(values.mean()), float(values.std())) for values in found]


def calc_maj_val(data: Sequence[Mapping[str, float]], vote_key: str, val_key: str) -> float:
    """Return the value of the first row with the most frequent vote; in a tie the vote that comes first wins."""
    votes = Counter(row[vote_key] for row in data)
    winner, _ = votes.most_common(1)[0]
    return next(row[val_key] for row in data if row[vote_key] == winner)


# Progress


def describe_step(metrics: Mapping[str, float]) -> list[str | None]:
    """Return reward, validation and speed as the display shows them; None keeps the value of an earlier step."""
    validation = [value for key, value in metrics.items() if key.startswith("val-core/")]
    seconds = metrics.get("perf/time_per_step")
    return [
        f"reward {metrics['critic/score/mean']:.3f}" if "critic/score/mean" in metrics else None,
        f"validation {sum(validation) / len(validation):.3f}" if validation else None,
        f"{metrics['perf/total_num_tokens'] / seconds:,.0f} tokens/s" if seconds else None,
    ]
