"""What the record of a run keeps of a step besides its metrics: digests by phase, workers, lengths and samples."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor

from verl.trainer.ppo.dumps import ground_truths
from verl.utils.observe.digest import column_digest, tensor_digest
from verl.utils.observe.tracking import plain

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

MAX_TEXT = 1200
"""Characters of a prompt or response that a sample keeps; of a longer one its beginning and its end."""
LENGTH_BINS = 24
_OF_SCORE = ("rm_scores", "token_level_scores")
"""What the phase ``score`` begins and a later one waits for."""
_COPY_OF = {"multi_modal_data": "multi_modal_inputs", "raw_prompt_ids": "input_ids"}
"""Columns of the data set, and where what they hold is in the batch once more."""


class Trail:
    """Gathers the details of one step after the other."""

    def __init__(self, digests: bool, num_samples: int) -> None:
        self.digests, self.num_samples = digests, num_samples
        self.seconds = 0.0
        self._phases: dict[str, dict[str, str]] = {}
        self._seen: dict[str, Tensor] = {}
        self._asked: dict[str, tuple[Any, Any]] = {}

    def phase(self, name: str, batch: "DataProto", row_order: Sequence[int] | None = None) -> None:
        """Digest what a phase has added or replaced; a phase that is run again counts as another.

        ``row_order`` puts the rows back in the order of the data, whatever workers they were arranged for. The columns
        of the data set are those of the first phase, ``prepare``.
        """
        if not self.digests or batch.batch is None:
            return
        started = time.perf_counter()
        new = {key: value for key, value in sorted(batch.batch.items()) if self._seen.get(key) is not value}
        self._seen.update(new)
        rows = None if row_order is None or list(row_order) == sorted(row_order) else torch.as_tensor(row_order)
        found = {key: tensor_digest(value if rows is None else value[rows]) for key, value in new.items()}
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

    def ask_workers(self, trainer: "RayPPOTrainer") -> None:
        """Have the workers report while the driver goes on; ``finish`` takes what they say."""
        started = time.perf_counter()
        groups = _reporting_groups(trainer).items()
        self._asked = {name: (group, group.report_step(self.digests)) for name, group in groups}
        self.seconds += time.perf_counter() - started

    def finish(self, trainer: "RayPPOTrainer", batch: "DataProto", metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the details of the step that ends, as JSON can hold them, and begin the next.

        The seconds by which all this delays the step join the metrics as ``timing_s/record``.
        """
        if not self._asked:
            self.ask_workers(trainer)
        started = time.perf_counter()
        details: dict[str, Any] = {"response_length": length_histogram(batch)}
        samples = sample_rows(trainer, batch, self.num_samples) if self.num_samples else []
        workers = {name: group.wait(reports, "report_step") for name, (group, reports) in self._asked.items()}
        if self.digests:
            details["phases"] = self._phases | _digests_of_workers(workers)
        driver = {"rank": 0, "seconds": {}, "memory": {"host_gb": psutil.Process().memory_info().rss / 1024**3}}
        details["workers"] = workers | {"driver": [driver]}
        if self.num_samples:
            details["samples"] = samples
        self._phases, self._seen, self._asked = {}, {}, {}
        kept: dict[str, Any] = plain(details)
        metrics["timing_s/record"] = self.seconds + time.perf_counter() - started
        self.seconds = 0.0
        return kept


def _digests_of_workers(workers: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, str]]:
    """Take the digests out of the reports of all ranks, as two more phases."""
    weights: dict[str, str] = {}
    states: dict[str, str] = {}
    for group, reports in workers.items():
        for report in reports:
            digests, name = report.pop("digests"), f"{group}, rank {report['rank']}"
            states[name] = digests["random_state"]
            if "weights" in digests:
                weights[name] = digests["weights"]
    return {"weights": weights, "random state": states}


NO_TRAIL = Trail(digests=False, num_samples=0)
"""Of a trainer that does not run."""


def _reporting_groups(trainer: "RayPPOTrainer") -> dict[str, Any]:
    ref = None if trainer.ref_in_actor else trainer.ref_policy_wg
    groups = {"actor_rollout": trainer.actor_rollout_wg, "critic": trainer.critic_wg, "ref": ref, "rm": trainer.rm_wg}
    return {name: group for name, group in groups.items() if hasattr(group, "report_step")}


def length_histogram(batch: "DataProto") -> dict[str, Any]:
    """Return the counts of response lengths in equal bins from 0 to ``limit`` tokens."""
    limit = batch.batch["responses"].shape[-1]
    lengths = batch.batch["attention_mask"][:, -limit:].sum(-1).numpy()
    counts, _ = np.histogram(lengths, bins=min(LENGTH_BINS, limit), range=(0, limit))
    return {"limit": limit, "counts": counts.tolist()}


# ---- samples


def sample_rows(trainer: "RayPPOTrainer", batch: "DataProto", count: int) -> list[dict[str, Any]]:
    """Return the texts and scores of at most ``count`` responses: the best, the worst, and some that were vetoed."""
    scores = batch.batch["token_level_scores"].sum(-1)
    chosen = choose_rows(scores, vetoed_rows(batch, trainer.config.algorithm), count, batch.non_tensor_batch.get("uid"))
    rows = list(chosen)
    decode, width = trainer.tokenizer.batch_decode, batch.batch["responses"].shape[-1]
    prompts = decode(batch.batch["prompts"][rows], skip_special_tokens=True)
    responses = decode(batch.batch["responses"][rows], skip_special_tokens=True)
    lengths = batch.batch["attention_mask"][:, -width:].sum(-1).tolist()
    truths, extras = ground_truths(batch), batch.non_tensor_batch
    samples = []
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        sample = {"kind": chosen[row], "prompt": shortened(prompt), "response": shortened(response)}
        sample |= {"score": scores[row].item(), "tokens": lengths[row], "truth": _short(truths[row])}
        for column in ("uid", "data_source", "reward_failure"):
            if column in extras and extras[column][row] is not None:
                sample[column] = _short(extras[column][row])
        samples.append(sample)
    return samples


def choose_rows(scores: Tensor, vetoed: Tensor, count: int, uids: Any = None) -> dict[int, str]:
    """Return which of (B,) scores are shown, and as what: a quarter for the vetoed, the rest best and worst.

    Of equal scores those of other prompts come first.
    """
    chosen = dict.fromkeys(vetoed.nonzero().flatten().tolist()[: max(1, count // 4)], "vetoed")
    best = [row for row in torch.argsort(scores, descending=True, stable=True).tolist() if row not in chosen]
    worst = _spread(best[::-1], scores, uids)
    best = _spread(best, scores, uids)
    left = min(count - len(chosen), len(best))
    chosen |= dict.fromkeys(best[: math.ceil(left / 2)], "best")
    return chosen | dict.fromkeys([row for row in worst if row not in chosen][: left // 2], "worst")


def _spread(order: list[int], scores: Tensor, uids: Any) -> list[int]:
    """Return the rows in the order of their scores, and of equal ones first one of each prompt."""
    values, times = scores.tolist(), Counter[Any]()
    keys: dict[int, tuple[int, int]] = {}
    level = {value: place for place, value in enumerate(dict.fromkeys(values[row] for row in order))}
    for row in order:
        keys[row] = level[values[row]], times[None if uids is None else uids[row]]
        times[None if uids is None else uids[row]] += 1
    return sorted(order, key=keys.__getitem__)


def vetoed_rows(batch: "DataProto", algorithm: Mapping[str, Any]) -> Tensor:
    """Return which responses hold a token that rollout and trainer disagree on beyond the veto threshold, (B,)."""
    tensors, threshold = batch.batch, algorithm.get("rollout_is_veto_threshold")
    known = {"old_log_probs", "rollout_log_probs"} <= set(tensors.keys())
    if algorithm.get("rollout_is_threshold") is None or threshold is None or not known:
        return torch.zeros(len(batch), dtype=torch.bool)
    gap = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    return ((gap < math.log(threshold)) & tensors["response_mask"].bool()).any(-1)


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of at most about ``limit`` characters, the middle left out of a longer one."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters ...]\n{text[-(limit - limit // 2) :]}"


def _short(value: Any) -> Any:
    return value if isinstance(value, int | float) else shortened(str(value), 200)
