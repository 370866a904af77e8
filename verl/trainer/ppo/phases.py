"""The contract of the phases of a training step: the batch keys that each reads and writes, and checks.

``VERL_CHECK_PHASES=1`` checks the table at every phase.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algos.config import AlgoConfig
from verl.errors import ContractError
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import Workers, computed, is_lazy
from verl.utils import envs
from verl.workers.config import ActorConfig


@dataclass(frozen=True)
class Phase:
    """Batch keys of one phase; ``optional`` ones are added by some configurations only."""

    reads: frozenset[str]
    writes: frozenset[str]
    optional: frozenset[str] = frozenset()


def _phase(reads: str, writes: str, optional: str = "") -> Phase:
    return Phase(frozenset(reads.split()), frozenset(writes.split()), frozenset(optional.split()))


_SEQUENCE = "input_ids attention_mask position_ids responses response_mask"

PHASES: dict[str, Phase] = {
    "prepare": _phase("", "input_ids attention_mask position_ids uid"),
    "generate": _phase(
        "input_ids attention_mask position_ids uid",
        "prompts responses response_mask",
        "rollout_log_probs sampling_seed reward_baselines rm_scores",
    ),
    "score": _phase(_SEQUENCE, "", "rm_scores"),
    "segments": _phase(_SEQUENCE, "", "trajectory_share token_level_scores rm_scores acc"),
    "infer": _phase(_SEQUENCE, "", "old_log_probs ref_log_prob values"),
    "shape": _phase(
        _SEQUENCE + " uid",
        "token_level_scores token_level_rewards advantages returns",
        "rollout_is_weights acc rm_scores",
    ),
    "update": _phase(_SEQUENCE + " advantages", ""),
}


@contextmanager
def checked_phase(name: str, before: DataProto | None) -> Iterator[list[DataProto]]:
    """Check a phase against its row of ``PHASES`` if ``VERL_CHECK_PHASES`` is set; the body appends its result.

    Columns without a fixed name are not checked: those of the data set, and the extras of reward functions.
    """
    result: list[DataProto] = []
    if not envs.flag("VERL_CHECK_PHASES"):
        yield result
        return
    keys_before = batch_keys(before)
    _require(name, "reads", PHASES[name].reads, keys_before)
    yield result
    after = batch_keys(result[0] if result else before)
    _require(name, "writes", PHASES[name].writes, after)
    known = frozenset().union(*(phase.writes | phase.optional for phase in PHASES.values()))
    unexpected = ((after - keys_before) & known) - PHASES[name].writes - PHASES[name].optional
    if unexpected:
        raise ContractError(f"phase {name!r} added {sorted(unexpected)}, which belongs to another phase")


def _require(name: str, verb: str, wanted: frozenset[str], found: frozenset[str]) -> None:
    if wanted - found:
        raise ContractError(f"phase {name!r} {verb} {sorted(wanted - found)}, which the batch does not hold")


def batch_keys(batch: DataProto | None) -> frozenset[str]:
    """Return the tensor and array keys of a batch."""
    if batch is None:
        return frozenset()
    tensors = batch.batch.keys() if batch.batch is not None else ()
    return frozenset(map(str, tensors)) | frozenset(batch.non_tensor_batch)


# ---- rollout invariants


_CHECKED = ("prompts", "responses", "input_ids", "attention_mask", "response_mask", "rollout_log_probs")
_ASKED = "asked_"
PROMPT_LENGTH = "__prompt_length__"
RESPONSE_LENGTH = "__response_length__"
"""Arrays (B,) of a batch with columns by reference: attended tokens of prompt and response."""


def lengths_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the attended tokens of prompt and response of each row, (B,), without reading a column by reference."""
    columns = batch.non_tensor_batch
    if RESPONSE_LENGTH in columns and is_lazy(batch):
        return torch.from_numpy(columns[PROMPT_LENGTH]), torch.from_numpy(columns[RESPONSE_LENGTH])
    attended = tensors_of(batch)["attention_mask"]
    width = tensors_of(batch)["responses"].shape[-1]
    return attended[:, :-width].sum(-1), attended[:, -width:].sum(-1)


def check_rollout(
    asked: DataProto, output: DataProto, step: int, single_turn: bool = True, group: Workers | None = None
) -> None:
    """Check the output of a rollout against the requests, row by row.

    Columns by reference are checked by a worker of ``group``, and the batch gets the lengths of its rows.

    Args: ``asked`` holds ``input_ids`` and ``attention_mask`` (B, P) and ``uid``; ``output`` is the rollout's batch.
    Raises: RuntimeError naming the step, the first wrong row and its fault.
    """
    if len(output) != len(asked):
        raise RuntimeError(f"step {step}: {len(asked)} responses were asked for, {len(output)} came back")
    uids = asked.non_tensor_batch.get("uid")
    rows = output.select()
    for name in ("input_ids", "attention_mask"):
        tensors_of(rows)[_ASKED + name] = tensors_of(asked)[name]
    if uids is not None:
        rows.non_tensor_batch[_ASKED + "uid"] = uids
    columns = [*_CHECKED, _ASKED + "input_ids", _ASKED + "attention_mask"]
    limits = {name: output.meta_info.get(name) for name in ("pad_token_id", "eos_token_id", "ignore_eos")}
    arrays = ["uid", _ASKED + "uid"]
    found = computed(_first_fault, rows, columns, arrays, group, single_turn=single_turn, limits=limits)
    if "fault" in found.meta_info:
        row, others, fault = found.meta_info["fault"]
        uid = "" if uids is None else f" (uid {uids[row]})"
        raise RuntimeError(f"step {step}, row {row}{uid}: {fault}; {others} more rows have the same fault")
    if is_lazy(output):
        for name in (PROMPT_LENGTH, RESPONSE_LENGTH):
            output.non_tensor_batch[name] = tensors_of(found)[name].numpy()


def _first_fault(data: DataProto) -> DataProto:
    """Return the lengths of the rows, and in ``fault`` the first wrong row, the number of others, and a message."""
    tensors = tensors_of(data)
    columns = data.non_tensor_batch
    asked = DataProto.from_dict(
        {name: tensors[_ASKED + name] for name in ("input_ids", "attention_mask")},
        {"uid": columns[_ASKED + "uid"]} if _ASKED + "uid" in columns else {},
    )
    output = data.select(meta_info_keys=[])
    output.meta_info = data.meta_info["limits"]
    meta = {}
    for bad_rows, fault in rollout_faults(asked, output, data.meta_info["single_turn"]):
        if bad_rows.any():
            meta["fault"] = (int(bad_rows.nonzero()[0]), int(bad_rows.sum()) - 1, fault)
            break
    width = tensors["responses"].shape[1]
    attended = tensors["attention_mask"]
    lengths = {PROMPT_LENGTH: attended[:, :-width].sum(-1), RESPONSE_LENGTH: attended[:, -width:].sum(-1)}
    return DataProto.from_dict(lengths, meta_info=meta)


def rollout_faults(asked: DataProto, output: DataProto, single_turn: bool) -> Iterator[tuple[Tensor, str]]:
    """Yield for each invariant a mask (B,) of the rows that break it, and a message."""
    got = tensors_of(output)
    requests = tensors_of(asked)
    prompts = got["prompts"]
    responses = got["responses"]
    mask = got["response_mask"]
    width = prompts.shape[1]
    attended = got["attention_mask"]
    alive = attended.any(-1)  # an aborted request may come back as a row of padding
    if single_turn:  # an agent loop may change the prompt, for instance to name its tools
        yield alive & _differ(prompts, requests["input_ids"]), "the prompt is not the one that was asked for"
        asked_mask = requests["attention_mask"]
        yield alive & _differ(attended[:, :width], asked_mask), "the prompt's attention mask was changed"
    yield _differ(got["input_ids"], torch.cat([prompts, responses], -1)), "input_ids are not prompt and response"
    if "uid" in asked.non_tensor_batch and "uid" in output.non_tensor_batch:
        moved = torch.from_numpy(asked.non_tensor_batch["uid"] != output.non_tensor_batch["uid"])
        yield moved, "the row belongs to another prompt (uid)"
    yield ((mask != 0) & (mask != 1)).any(-1), "response_mask holds something other than 0 and 1"
    yield ((mask != 0) & (attended[:, width:] == 0)).any(-1), "response_mask covers a position that is not attended"
    if single_turn:
        yield from _single_turn_faults(responses, mask, attended[:, width:], output.meta_info)
    if "rollout_log_probs" in got.keys():
        log_probs = got["rollout_log_probs"]
        sampled = mask.bool()
        yield (sampled & ~torch.isfinite(log_probs)).any(-1), "a sampled token has no finite log-probability"
        yield (sampled & (log_probs > 1e-4)).any(-1), "a sampled token has a log-probability above 0"


def _single_turn_faults(
    responses: Tensor, mask: Tensor, attended: Tensor, meta: dict[str, Any]
) -> Iterator[tuple[Tensor, str]]:
    """Yield the responses that are not one run of sampled tokens from position 0, followed by padding."""
    yield (mask[:, 1:] > mask[:, :-1]).any(-1), "response_mask is not one run from position 0"
    yield _differ(mask, attended), "response_mask and attention mask of the response differ"
    outside = mask == 0
    pad = meta.get("pad_token_id")
    if pad is None:
        pad = responses[outside][0].item() if outside.any() else 0
    yield (outside & (responses != pad)).any(-1), "a token after the response is not padding"
    eos = meta.get("eos_token_id")
    if eos is not None and not meta.get("ignore_eos", False):
        is_eos = torch.isin(responses, torch.as_tensor(eos)) & (mask != 0)
        yield (is_eos[:, :-1] & (mask[:, 1:] != 0)).any(-1), "tokens were sampled after the end-of-sequence token"


def _differ(left: Tensor, right: Tensor) -> Tensor:
    """Return for each row of two (B, T) tensors whether they differ; tensors of different widths differ everywhere."""
    if left.shape != right.shape:
        return torch.ones(left.shape[0], dtype=torch.bool)
    return (left != right).any(-1)


# ---- the passes that a configuration needs


def needs_old_log_probs(actor: ActorConfig, algorithm: AlgoConfig, prompts_per_step: int) -> bool:
    """Whether anything reads the log-probabilities of the policy before the update.

    A single on-policy update does not: its own log-probabilities, detached, are the old ones. The KL in the reward,
    rollout importance sampling, and several mini-batches or epochs do. With ``actor.use_rollout_log_probs`` the
    log-probabilities of the rollout are the old ones, and no pass computes others.
    """
    if actor.use_rollout_log_probs:
        return False
    is_single_update = actor.ppo_mini_batch_size == prompts_per_step and actor.ppo_epochs == 1
    return not is_single_update or algorithm.use_kl_in_reward or algorithm.rollout_is_threshold is not None
