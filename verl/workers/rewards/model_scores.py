"""Inputs of a reward model, and scores of parts of a batch while the rest is still generated."""

import contextvars
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import ray

from verl.protocol import DataProto, DataProtoFuture, tensors_of
from verl.protocol.lazy import BY_REFERENCE
from verl.utils.chat.messages import TURNS_COLUMN
from verl.utils.failures import settle
from verl.utils.metric import reduce_metrics

if TYPE_CHECKING:
    from verl.single_controller.ray import RayWorkerGroup

SCORED_BY_MODEL = "score_by_model"
"""Meta of a batch: whether a reward model with its own devices scores each part of it as soon as it is there."""
_COLUMNS = ("raw_prompt", "reward_model", "multi_modal_inputs", TURNS_COLUMN)


def for_reward_model(batch: DataProto, columns: DataProto | None = None) -> DataProto:
    """Select the inputs of the reward model, padded to a multiple of its workers.

    Args: ``columns`` has the same rows, with the columns that ``batch`` may lack.
    """
    tensors = tensors_of(batch)
    known = batch.non_tensor_batch if columns is None else {**columns.non_tensor_batch, **batch.non_tensor_batch}
    names = ["input_ids", "attention_mask", "position_ids", "responses"]
    if "response_mask" in tensors.keys():
        names.append("response_mask")  # the response may end with the answer of a tool, or hold its images
    return DataProto.from_dict(
        tensors={name: tensors[name] for name in names},
        non_tensors={name: known[name] for name in _COLUMNS if name in known},
        meta_info={"global_steps": batch.meta_info.get("global_steps")}
        | ({BY_REFERENCE: True} if batch.meta_info.get(BY_REFERENCE) else {}),
        auto_padding=True,
    )


def start_scoring(group: "RayWorkerGroup", batch: DataProto, columns: DataProto | None = None) -> DataProtoFuture:
    """Let the reward model score a batch; the arguments are those of ``for_reward_model``.

    The worker of a fork may only have ``compute_rm_score``. It gets the whole batch, and the caller waits for it.
    """
    if hasattr(group, "start_rm_score"):
        future: DataProtoFuture = group.start_rm_score(for_reward_model(batch, columns))
        return future
    known = batch.non_tensor_batch if columns is None else {**columns.non_tensor_batch, **batch.non_tensor_batch}
    whole = DataProto.from_dict(dict(tensors_of(batch).items()), known, dict(batch.meta_info), auto_padding=True)
    return DataProtoFuture(DataProto.concat, [group.compute_rm_score(whole)])


class ScoresOfParts:
    """A thread that sends each part of a batch to the reward model as soon as the part is generated.

    A part is always the same rows, so its scores do not depend on the order in which the parts end.

    Args: ``requests`` are the rows of each part, with the columns that its answer may lack.
    """

    def __init__(
        self, group: "RayWorkerGroup", refs: "Sequence[ray.ObjectRef[DataProto]]", requests: Sequence[DataProto]
    ) -> None:
        self._group = group
        self._refs = list(refs)
        self._requests = list(requests)
        self._scores: dict[int, DataProtoFuture] = {}
        self._end: Future[None] = Future()
        context = contextvars.copy_context()  # errors name the phase of the caller
        threading.Thread(
            target=context.run, args=(settle, self._end, self._send), name="reward-model", daemon=True
        ).start()

    def _send(self) -> None:
        left = list(self._refs)
        while left:
            (done, *_), left = ray.wait(left, num_returns=1)
            at = self._refs.index(done)
            part = ray.get(done)
            asked = self._requests[at]
            if len(part) == len(asked):  # else rows were added, and the batch is scored as a whole
                part.meta_info["global_steps"] = asked.meta_info.get("global_steps")
                self._scores[at] = start_scoring(self._group, part, asked)

    def add_to(self, parts: Sequence[DataProto]) -> dict[str, Any]:
        """Add ``rm_scores`` (B, R) to the parts; return the metrics of the reward model, averaged over the rows."""
        self._end.result()
        if len(self._scores) < len(parts):
            for future in self._scores.values():
                future.get()
            return {}
        found: dict[str, list[tuple[int, float]]] = {}
        for at, part in enumerate(parts):
            output = self._scores[at].get()
            tensors_of(part)["rm_scores"] = tensors_of(output)["rm_scores"]
            for name, value in reduce_metrics(output.meta_info.pop("metrics", {})).items():
                found.setdefault(name, []).append((len(part), value))
        return {name: _mean_or_peak(name, values) for name, values in found.items()}


def _mean_or_peak(name: str, values: Sequence[tuple[int, float]]) -> float:
    if "/memory/" in name:
        return max(value for _, value in values)
    return sum(count * value for count, value in values) / sum(count for count, _ in values)
