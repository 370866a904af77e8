"""Samples of a batch for people to read: JSON-lines dumps, traces, and the samples in the record of a step."""

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto
from verl.trainer.ppo.phases import tensors_of
from verl.trainer.ppo.shaping import compute_response_mask
from verl.utils.observe.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from verl.utils.observe.tracking import plain

logger = logging.getLogger(__name__)

Sample = dict[str, str | int | float]
"""A response with its prompt, score, length and label, as the record keeps it."""
MAX_TEXT = 1200
"""Longest prompt or response in a sample, in characters; a longer one loses its middle."""


def ground_truths(batch: DataProto) -> list[Any]:
    """Return ``reward_model.ground_truth`` of every row, None for rows without one."""
    rows = batch.non_tensor_batch.get("reward_model", np.full(len(batch), None, dtype=object))
    return [row.get("ground_truth") if isinstance(row, Mapping) else None for row in rows]


# ---- dumps


def dump_generations(
    folder: str,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    extras: Mapping[str, Sequence[Any]],
) -> Path:
    """Write ``<folder>/<step>.jsonl``: one object per sample with input, output, gts, score, step and the extras.

    An extra is left out if its length is not the number of samples, or if its name is that of another column.
    A number that is not finite is written as text, for instance ``"NaN"``.
    """
    count = len(inputs)
    columns: dict[str, Sequence[Any]] = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
    columns["step"] = [step] * count
    columns |= {name: values for name, values in extras.items() if len(values) == count and name not in columns}
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for row in range(count):
            sample = {name: plain(values[row]) for name, values in columns.items()}
            file.write(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n")
    unfinished.replace(path)
    return path


def dump_training_batch(
    folder: str,
    step: int,
    batch: DataProto,
    tokenizer: PreTrainedTokenizerBase,
    extras: Mapping[str, Sequence[Any]],
    order: Sequence[int],
) -> Path:
    """Dump a scored training batch; row ``i`` of the file is row ``order[i]`` of the batch."""
    tensors = tensors_of(batch)

    def ordered(values: Sequence[Any]) -> list[Any]:
        return [values[row] for row in order]

    kept = {name: ordered(values) for name, values in extras.items() if len(values) == len(batch)}
    if "request_id" in batch.non_tensor_batch:
        kept.setdefault("request_id", ordered(list(batch.non_tensor_batch["request_id"])))
    return dump_generations(
        folder,
        step,
        inputs=ordered(tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)),
        outputs=ordered(tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)),
        gts=ordered(ground_truths(batch)),
        scores=ordered(tensors["token_level_scores"].sum(-1).tolist()),
        extras=kept,
    )


# ---- traces


def trace_batch(
    batch: DataProto, scores: Tensor, step: int, tokenizer: PreTrainedTokenizerBase, validate: bool = False
) -> None:
    """Send a trace of every response of a scored batch to ``rollout.trace.backend``; ``scores`` is (B,).

    A backend that fails does not end the run: the rest of the batch is left out, with a warning.
    """
    if RolloutTraceConfig.get_backend() is None:
        return
    num_traced: dict[Hashable, int] = {}
    try:
        for row, (uid, score) in enumerate(zip(batch.non_tensor_batch["uid"], scores.tolist(), strict=True)):
            sample = num_traced.get(uid, 0)
            num_traced[uid] = sample + 1
            with rollout_trace_attr(sample_index=uid, step=step, rollout_n=sample, validate=validate):
                _trace_row(batch, row, score, tokenizer)
    except Exception as error:  # each tracing library raises its own classes
        backend = RolloutTraceConfig.get_backend()
        text = f"rollout.trace.backend={backend} has not taken all traces of step {step}, and the run goes on"
        logger.warning("%s: %s: %s", text, type(error).__name__, error)


def _trace_row(batch: DataProto, row: int, score: float, tokenizer: PreTrainedTokenizerBase) -> None:
    """Trace one response: token ids, and their text if the backend takes text."""
    tensors = tensors_of(batch)
    attended = tensors["attention_mask"][row].bool()
    width = tensors["prompts"].shape[-1]
    prompt_ids = tensors["prompts"][row][attended[:width]].tolist()
    response_ids = tensors["responses"][row][attended[width:]].tolist()

    def text(name: str, ids: list[int]) -> dict[str, str]:
        return {name: str(tokenizer.decode(ids))} if RolloutTraceConfig.enable_token2text() else {}

    @rollout_trace_op
    def trajectory(prompt_ids: list[int], score: float, prompt_text: str | None = None) -> dict[str, Any]:
        return {"response_ids": response_ids, "score": score, **text("response_text", response_ids)}

    trajectory(prompt_ids, score, **text("prompt_text", prompt_ids))


# ---- samples in the record


def sample_rows(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, count: int, veto_threshold: float | None
) -> list[Sample]:
    """Return texts and scores of at most ``count`` responses: the best, the worst, and some that were vetoed."""
    tensors = tensors_of(batch)
    scores = tensors["token_level_scores"].sum(-1)
    chosen = choose_rows(scores, vetoed_rows(batch, veto_threshold), count, batch.non_tensor_batch.get("uid"))
    rows = list(chosen)
    prompts = tokenizer.batch_decode(tensors["prompts"][rows], skip_special_tokens=True)
    responses = tokenizer.batch_decode(tensors["responses"][rows], skip_special_tokens=True)
    lengths = compute_response_mask(batch).sum(-1).tolist()
    truths = ground_truths(batch)
    extras = batch.non_tensor_batch
    samples = []
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        sample: Sample = {
            "kind": chosen[row],
            "prompt": shortened(prompt),
            "response": shortened(response),
            "score": scores[row].item(),
            "tokens": lengths[row],
            "truth": _short(truths[row]),
        }
        for column in ("uid", "data_source", "reward_failure"):
            if column in extras and extras[column][row] is not None:
                sample[column] = _short(extras[column][row])
        samples.append(sample)
    return samples


def choose_rows(
    scores: Tensor, vetoed: Tensor, count: int, uids: Sequence[Hashable] | np.ndarray | None = None
) -> dict[int, str]:
    """Choose sample rows and their labels: a quarter ``vetoed``, the rest half ``best`` and half ``worst``.

    Among equal scores, rows of different prompts come first. Args: ``scores`` and ``vetoed`` are (B,).
    """
    chosen = dict.fromkeys(vetoed.nonzero().flatten().tolist()[: max(1, count // 4)], "vetoed")
    best = [row for row in torch.argsort(scores, descending=True, stable=True).tolist() if row not in chosen]
    worst = _spread(best[::-1], scores, uids)
    best = _spread(best, scores, uids)
    left = min(count - len(chosen), len(best))
    chosen |= dict.fromkeys(best[: math.ceil(left / 2)], "best")
    return chosen | dict.fromkeys([row for row in worst if row not in chosen][: left // 2], "worst")


def _spread(order: Iterable[int], scores: Tensor, uids: Sequence[Hashable] | np.ndarray | None) -> list[int]:
    """Keep the order of the scores; among equal ones, put the first row of each prompt before the second."""
    rows = list(order)
    values = scores.tolist()
    times: Counter[Hashable] = Counter()
    before: dict[int, int] = {}  # rows of the same prompt before each row
    for row in rows:
        uid = None if uids is None else uids[row]
        before[row] = times[uid]
        times[uid] += 1
    levels = itertools.groupby(rows, key=values.__getitem__)
    return [row for _, level in levels for row in sorted(level, key=before.__getitem__)]


def vetoed_rows(batch: DataProto, threshold: float | None) -> Tensor:
    """Return the responses with a token whose ratio of trainer to rollout is below the veto threshold, (B,) bool."""
    tensors = tensors_of(batch)
    if threshold is None or not {"old_log_probs", "rollout_log_probs"} <= set(tensors.keys()):
        return torch.zeros(len(batch), dtype=torch.bool)
    gap = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    below: Tensor = (gap < math.log(threshold)) & tensors["response_mask"].bool()
    return below.any(-1)


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Cut the middle out of a text that is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters ...]\n{text[-(limit - limit // 2) :]}"


def _short(value: Any) -> int | float | str:
    return value if isinstance(value, int | float) else shortened(str(value), 200)
