"""Records of steps for people to read: details in the record of the run, JSON-lines dumps, and traces."""

import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import numpy as np
import psutil
import ray
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.experimental.agent_loop.segments import EarlierSegments
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import digest_of, fetched, is_lazy
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.conversations import Call, Conversation, conversations, readable
from verl.trainer.ppo.metric_utils import without_dropped
from verl.trainer.ppo.phases import lengths_of
from verl.trainer.ppo.reward import ExtraColumns
from verl.trainer.ppo.segments import SEGMENTS_COLUMN, earlier_segments, per_trajectory
from verl.trainer.ppo.shaping import vetoed_rows
from verl.trainer.ppo.state import Metrics
from verl.trainer.run.output import RankReport, take_digests, take_parts
from verl.utils.failures import only_warning
from verl.utils.json_types import Json, JsonObject
from verl.utils.observe.digest import column_digest, tensor_digest
from verl.utils.observe.record import Details, LengthHistogram, Sample, SampleCall, SampleTurn, WorkerReport
from verl.utils.observe.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from verl.utils.observe.timeline import Part
from verl.utils.observe.tracking import plain
from verl.workers.rollout.base import BEHIND_COLUMN

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

T = TypeVar("T")

LENGTH_BINS = 24
_OF_SCORE = ("rm_scores", "token_level_scores")
"""Columns that the phase ``score`` begins, although a later phase may add them."""
_NAMES = ("uid", "data_source", "reward_failure")
"""Columns that name a sample in the record."""
_COPY_OF = {"multi_modal_data": "multi_modal_inputs", "raw_prompt_ids": "input_ids"}
"""Columns of the data set, and the column of the batch that holds the same content."""
_OF_DUMP = frozenset({"input", "output", "gts", "score", "step", "turns", "earlier_segments", BEHIND_COLUMN})
"""Columns of a dump that are no extras of a reward function."""
MAX_TEXT = 1200
"""Longest prompt, response or turn in a sample, in characters; a longer one loses its middle."""
MAX_CALL = 300
"""Longest name or arguments of a tool call in a sample, in characters."""


# ---- the record of the run


@dataclass
class StepRecord:
    """Gathers the details of one step after the other.

    Attributes:
        digests: whether to digest batches, weights and random states.
        num_samples: how many sample responses to keep of a step.
        tokenizer: decodes the samples; may be None if there are none.
        veto_threshold: ratio of trainer to rollout below which a token vetoes its response; None if nothing does.
        seconds: time spent on the record of the current step.
        parts: what the workers recorded of the last step, for its timeline.
    """

    digests: bool
    num_samples: int
    tokenizer: PreTrainedTokenizerBase | None = None
    veto_threshold: float | None = None
    seconds: float = field(init=False, default=0.0)
    parts: list[Part] = field(init=False, default_factory=list)
    _phases: dict[str, dict[str, str]] = field(init=False, default_factory=dict)
    _seen: dict[str, Tensor] = field(init=False, default_factory=dict)
    _asked: dict[str, tuple[RayWorkerGroup, list[ray.ObjectRef[RankReport]]]] = field(init=False, default_factory=dict)

    def phase(self, name: str, batch: DataProto, row_order: Sequence[int] | None = None) -> None:
        """Digest the columns that a phase has added or replaced; a second run of a phase gets its own number.

        ``row_order`` puts the rows back in the order of the data, so that digests do not depend on the ranks. Columns
        of the data set belong to the first phase, ``prepare``.
        """
        if not self.digests or batch.batch is None:
            return
        started = time.perf_counter()
        new = {
            key: value
            for key, value in sorted(batch.batch.items())
            if isinstance(value, Tensor) and self._seen.get(key) is not value
        }
        self._seen.update(new)
        rows = None if row_order is None or list(row_order) == sorted(row_order) else torch.as_tensor(row_order)
        found = {key: _digest_in_order(value, rows) for key, value in new.items()}
        if name == "prepare":
            columns = batch.non_tensor_batch
            chosen = [key for key in sorted(columns) if _COPY_OF.get(key) not in {*columns, *new}]
            found |= {key: column_digest(columns[key]) for key in chosen}
        times = sum(known.partition("#")[0] == name for known in self._phases)
        label = f"{name}#{times + 1}" if times else name
        self._phases[label] = {}
        scored = next((known for known in reversed(self._phases) if known.partition("#")[0] == "score"), label)
        for key, digest in found.items():
            self._phases[scored if key in _OF_SCORE else label][key] = digest
        self.seconds += time.perf_counter() - started

    def ask_workers(self, groups: Mapping[str, RayWorkerGroup]) -> None:
        """Let the workers report while the driver goes on; ``finish`` takes their reports."""
        started = time.perf_counter()
        self._asked = {
            name: (group, reports) for name, group in groups.items() if (reports := group.report_step(self.digests))
        }
        self.seconds += time.perf_counter() - started

    def finish(self, batch: DataProto, metrics: Metrics) -> Details:
        """Return the details of the step that ends, ready for JSON, and begin the next step.

        The time that the record took goes to the metric ``timing_s/record``.
        """
        started = time.perf_counter()
        batch = without_dropped(batch)
        details: Details = {"response_length": length_histogram(batch)}
        batch = per_trajectory(batch)
        if self.num_samples:  # decode samples while the workers compute their reports
            assert self.tokenizer is not None
            details["samples"] = sample_rows(batch, self.tokenizer, self.num_samples, self.veto_threshold)
        workers: dict[str, list[RankReport]] = {
            name: group.wait(reports, "report_step") for name, (group, reports) in self._asked.items()
        }
        self.parts = take_parts(workers)
        if self.digests:
            details["phases"] = self._phases | take_digests(workers)
        memory = {"host_gb": psutil.Process().memory_info().rss / 1024**3}
        shown: dict[str, list[WorkerReport]] = {name: [*reports] for name, reports in workers.items()}
        details["workers"] = shown | {"driver": [{"rank": 0, "seconds": {}, "memory": memory}]}
        self._phases = {}
        self._seen = {}
        self._asked = {}
        kept: Details = plain(details)
        metrics["timing_s/record"] = self.seconds + time.perf_counter() - started
        self.seconds = 0.0
        return kept


def _digest_in_order(column: Tensor, rows: Tensor | None) -> str:
    if column.dim() >= 2 and not column.is_nested:
        return digest_of(column, None if rows is None else rows.tolist())
    return tensor_digest(column if rows is None else column[rows])


def length_histogram(batch: DataProto) -> LengthHistogram:
    """Return the counts of response lengths in equal bins from 0 to ``limit`` tokens."""
    limit = tensors_of(batch)["responses"].shape[-1]
    lengths = lengths_of(batch)[1].numpy()
    counts, _ = np.histogram(lengths, bins=min(LENGTH_BINS, limit), range=(0, limit))
    return {"limit": limit, "counts": counts.tolist()}


def sample_rows(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, count: int, veto_threshold: float | None
) -> list[Sample]:
    """Return at most ``count`` responses: the best, the worst, and some that were vetoed."""
    tensors = tensors_of(batch)
    scores = tensors["token_level_scores"].sum(-1)
    chosen = choose_rows(scores, vetoed_rows(batch, veto_threshold), count, batch.non_tensor_batch.get("uid"))
    rows = list(chosen)
    shown = batch[rows]
    if is_lazy(shown):
        read = ("prompts", "responses", "attention_mask")
        shown = fetched(shown.select([name for name in read if name in tensors.keys()]), counted=True)
    turns = conversations(shown, tokenizer) or [None] * len(rows)
    prompts = tokenizer.batch_decode(tensors_of(shown)["prompts"], skip_special_tokens=True)
    responses = tokenizer.batch_decode(tensors_of(shown)["responses"], skip_special_tokens=True)
    lengths = lengths_of(batch)[1].tolist()
    truths = ground_truths(batch)
    extras = batch.non_tensor_batch
    before = list(earlier_segments(batch))
    samples = []
    for row, prompt, response, talk in zip(rows, prompts, responses, turns, strict=True):
        sample: Sample = {
            "kind": chosen[row],
            "prompt": shortened(prompt),
            "response": shortened(readable(talk) if talk and len(talk) > 1 else response),
            "score": scores[row].item(),
            "tokens": lengths[row] + _earlier_tokens(before[row]),
        }
        names = [name for name in _NAMES if name in extras and extras[name][row] is not None]
        values = {"truth": _short(truths[row])} | {name: _short(extras[name][row]) for name in names}
        sample |= cast(Sample, values)  # values come from users and data: any JSON
        if talk and len(talk) > 1:
            sample["turns"] = _sample_turns(talk)
        samples.append(sample)
    return samples


def _earlier_tokens(segments: EarlierSegments | None) -> int:
    """Count the tokens of the responses of earlier segments."""
    if segments is None:
        return 0
    tensors = segments["tensors"]
    return int(tensors["attention_mask"][:, -tensors["responses"].shape[1] :].sum())


def _sample_turns(talk: Conversation) -> list[SampleTurn]:
    """Return a conversation as a sample keeps it, with long texts shortened."""
    return [
        {
            "role": turn["role"],
            "text": shortened(turn["text"]),
            "tokens": turn["tokens"],
            "seconds": turn["seconds"],
            "calls": [_sample_call(call) for call in turn.get("calls", ())],
        }
        for turn in talk
    ]


def _sample_call(call: Call) -> SampleCall:
    return {
        "name": shortened(call["name"], MAX_CALL),
        "arguments": shortened(call["arguments"], MAX_CALL),
        "outcome": call["outcome"],
        "seconds": call["seconds"],
        "reward": call["reward"],
    }


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
    """Reorder rows with equal scores so that the first row of each prompt comes before second rows."""
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


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Cut the middle out of a text that is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters ...]\n{text[-(limit - limit // 2) :]}"


def _short(value: Json) -> int | float | str:
    return value if isinstance(value, int | float) else shortened(str(value), 200)


def ground_truths(batch: DataProto) -> list[Json]:
    """Return ``reward_model.ground_truth`` of every row, None for rows without one."""
    rows = batch.non_tensor_batch.get("reward_model", np.full(len(batch), None, dtype=object))
    return [row.get("ground_truth") if isinstance(row, Mapping) else None for row in rows]


# ---- dumps


class Dump(TypedDict):
    """The columns of a dump, as arguments of ``RayPPOTrainer._dump_generations``."""

    inputs: list[str]
    outputs: list[str]
    gts: list[Json]
    scores: list[float]
    reward_extra_infos_dict: ExtraColumns


def dump_generations(
    folder: str,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Json],
    scores: Sequence[float],
    extras: Mapping[str, Sequence[T]],
) -> Path:
    """Write ``<folder>/<step>.jsonl``: one object per sample with input, output, gts, score, step and the extras.

    An extra is left out if its length is not the number of samples. An extra with the name of another column is written
    as ``extra/<name>``.
    A number that is not finite is written as text, for instance ``"NaN"``.
    """
    count = len(inputs)
    columns: dict[str, Sequence[Json | T]] = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
    columns["step"] = [step] * count
    taken = columns.keys() & extras.keys()
    more = {f"extra/{name}" if name in taken else name: values for name, values in extras.items()}
    columns |= {name: values for name, values in more.items() if len(values) == count}
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for row in range(count):
            sample = {name: plain(values[row]) for name, values in columns.items()}
            file.write(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n")
    unfinished.replace(path)
    return path


def dumped_rows(batch: DataProto, row_order: list[int]) -> DataProto:
    """Return a row for each trajectory; of several segments, the rows come in the order of the requests."""
    return per_trajectory(batch.select_idxs(row_order)) if SEGMENTS_COLUMN in batch.non_tensor_batch else batch


def dump_extras(extras: ExtraColumns) -> ExtraColumns:
    """Return extras by their names in a dump: ``extra/<name>`` for a name that a column of the dump itself has."""
    named: ExtraColumns = {}
    for name, values in extras.items():
        # No warning for score, which the manager dapo returns: the score before the penalty.
        if name in _OF_DUMP and name != "score":
            _warn_once("the reward function returns %r, a column of the dump: it is written as 'extra/%s'", name, name)
        named[f"extra/{name}" if name in _OF_DUMP else name] = values
    return named


def scored_columns(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, extras: ExtraColumns, order: Sequence[int]
) -> Dump:
    """Return the columns of a scored training batch for a dump; row ``i`` of them is row ``order[i]`` of the batch.

    If ``order`` has another number of rows, because a user's fork has cut the batch, the rows stay in their order.
    """
    tensors = tensors_of(batch)
    if len(order) != len(batch):
        order = range(len(batch))

    def ordered(values: Sequence[T]) -> list[T]:
        return [values[row] for row in order]

    kept = {name: ordered(values) for name, values in dump_extras(extras).items() if len(values) == len(batch)}
    for name in ("request_id", BEHIND_COLUMN):
        if name in batch.non_tensor_batch and name not in extras:
            kept[name] = ordered(list(batch.non_tensor_batch[name]))
    turns = conversations(batch, tokenizer)
    if turns is not None:
        kept["turns"] = ordered(turns)
    before = earlier_texts(batch, tokenizer)
    if before is not None:
        kept["earlier_segments"] = ordered(before)
    return {
        "inputs": ordered(tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)),
        "outputs": ordered(tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)),
        "gts": ordered(ground_truths(batch)),
        "scores": ordered(tensors["token_level_scores"].sum(-1).tolist()),
        "reward_extra_infos_dict": kept,
    }


def earlier_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, str]] | None] | None:
    """Return prompt and response of each earlier segment of the rows; None if no row has any."""
    found = [None if each is None else _texts(each, tokenizer) for each in earlier_segments(batch)]
    return None if all(each is None for each in found) else found


def _texts(segments: EarlierSegments, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    names = {"input": "prompts", "output": "responses"}
    texts = {
        key: tokenizer.batch_decode(segments["tensors"][name], skip_special_tokens=True) for key, name in names.items()
    }
    return [{"input": before, "output": after} for before, after in zip(texts["input"], texts["output"], strict=True)]


# ---- traces


def trace_batch(
    batch: DataProto, scores: Tensor, step: int, tokenizer: PreTrainedTokenizerBase, validate: bool = False
) -> None:
    """Send a trace of every response of a scored batch to ``rollout.trace.backend``; ``scores`` is (B,).

    A backend that fails does not end the run: the rest of the batch is left out, with a warning.
    """
    backend = RolloutTraceConfig.get_backend()
    if backend is None:
        return
    num_traced: dict[Hashable, int] = {}
    text = "rollout.trace.backend=%s did not take all traces of step %d; the run continues"
    with only_warning(logger, text, backend, step):
        for row, (uid, score) in enumerate(zip(batch.non_tensor_batch["uid"], scores.tolist(), strict=True)):
            sample = num_traced.get(uid, 0)
            num_traced[uid] = sample + 1
            with rollout_trace_attr(sample_index=uid, step=step, rollout_n=sample, validate=validate):
                _trace_row(batch, row, score, tokenizer)


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
    def trajectory(prompt_ids: list[int], score: float, prompt_text: str | None = None) -> JsonObject:
        return {"response_ids": response_ids, "score": score, **text("response_text", response_ids)}

    trajectory(prompt_ids, score, **text("prompt_text", prompt_ids))
