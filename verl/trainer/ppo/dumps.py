"""JSON-lines dumps of what was generated, one file per step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.utils.observe.tracking import plain

if TYPE_CHECKING:
    from verl.protocol import DataProto


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

    An extra whose length is not the number of samples is left out, and so is one with the name of another column.
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


def ground_truths(batch: "DataProto") -> list[Any]:
    """Return ``reward_model.ground_truth`` of every row, None where a row has none."""
    rows = batch.non_tensor_batch.get("reward_model", np.full(len(batch), None, dtype=object))
    return [row.get("ground_truth") if isinstance(row, Mapping) else None for row in rows]


def dump_training_batch(
    folder: str,
    step: int,
    batch: "DataProto",
    tokenizer: Any,
    extras: Mapping[str, Sequence[Any]],
    order: Sequence[int],
) -> Path:
    """Dump a scored training batch, row ``i`` of the file being row ``order[i]`` of the batch."""
    prompts = tokenizer.batch_decode(batch.batch["prompts"], skip_special_tokens=True)
    responses = tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    truths = ground_truths(batch)
    rows = list(order)

    def ordered(values: Sequence[Any]) -> list[Any]:
        return [values[row] for row in rows]

    kept = {name: ordered(values) for name, values in extras.items() if len(values) == len(batch)}
    if "request_id" in batch.non_tensor_batch:
        kept.setdefault("request_id", ordered(list(batch.non_tensor_batch["request_id"])))
    return dump_generations(folder, step, ordered(prompts), ordered(responses), ordered(truths), ordered(scores), kept)
