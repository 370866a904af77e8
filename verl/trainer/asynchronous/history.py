"""What a ledger says about the updates after a place in it: a resumed run repeats them, and a replay follows them."""

import io
import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from verl.errors import WrongInput
from verl.experimental.agent_loop.held import KeptTokens
from verl.protocol import DataProto, tensors_of
from verl.trainer.asynchronous.ledger import Facts, LedgerReader
from verl.trainer.asynchronous.scheduler import Group
from verl.utils.loading import load_pickle
from verl.utils.py_functional import object_array
from verl.workers.rewards.scoring import FAILURE_COLUMN


@dataclass
class History:
    """Recorded batches, trajectories and weights.

    Attributes:
        ledger: holds the payloads; None if there are none.
        trusted_classes: classes that payloads may hold besides plain values and tensors.
        batches: the numbers of the groups of each update; the last attempt at an update counts.
        finished: the events that hold the responses of a group, by their place in it.
        scored: the event that holds the scores of a group.
        failed: why a group was given up.
        begun: the events that hold the tokens of interrupted responses, of the whole ledger.
        published: versions of the weights by their numbers, of the whole ledger.
        weights: digests of the weights after each update, one per rank.
    """

    ledger: LedgerReader | None
    trusted_classes: tuple[str, ...] = ()
    batches: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, dict[int, int]] = field(default_factory=dict)
    scored: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    weights: dict[int, list[str]] = field(default_factory=dict)
    begun: dict[int, dict[int, int]] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    _facts: dict[int, Facts] = field(default_factory=dict)

    @classmethod
    def read(cls, ledger: LedgerReader, after: int, trusted_classes: Iterable[str]) -> "History":
        """Read the events after a place."""
        history = cls(ledger, tuple(trusted_classes))
        for event in ledger.events("finished", "scored", "failed", "batch", "update", after=after):
            facts = cast(Facts, event.facts)
            if event.kind == "batch":
                history.batches[facts["update"]] = facts["numbers"]
            elif event.kind == "update":
                history.weights[facts["update"]] = facts["weights"]
            elif event.kind == "failed":
                history.failed[facts["number"]] = facts["reason"]
            elif event.kind == "scored":
                history.scored[facts["number"]] = event.seq
                history._facts[event.seq] = facts
            else:
                history.finished.setdefault(facts["number"], {})[facts["sample"]] = event.seq
                history._facts[event.seq] = facts
        for event in ledger.events("turn", "published"):
            facts = cast(Facts, event.facts)
            if event.kind == "published":
                history.published[facts["number"]] = facts["version"]
            else:
                history.begun.setdefault(facts["number"], {})[facts["sample"]] = event.seq
        return history

    def num_finished(self) -> tuple[int, int]:
        """Return how many groups have finished, and how many responses of groups that have not."""
        whole = 0
        rest = 0
        for seqs in self.finished.values():
            is_whole = len(seqs) == self._facts[min(seqs.values())]["samples"]
            whole += is_whole
            rest += 0 if is_whole else len(seqs)
        return whole, rest

    def restore(self, group: Group) -> None:
        """Give a group its recorded responses, and the tokens of those that were interrupted."""
        if self.ledger is None:
            return
        for place, seq in self.finished.get(group.number, {}).items():
            response = unpacked(self.ledger.payload(seq), f"event {seq} of the ledger", self.trusted_classes)
            if set(response.non_tensor_batch["uid"].tolist()) != set(group.prepared.non_tensor_batch["uid"].tolist()):
                raise WrongInput(
                    f"the ledger has responses to another prompt as number {group.number} of the data: the data, "
                    "trainer.seed or data.seed have changed since. Restore them, or give the run another folder"
                )
            check_samples(group, self._facts[seq]["samples"])
            oldest, newest = self._facts[seq]["span"]
            group.spans[place] = oldest, newest
            group.plan(self._facts[seq]["planned"])
            group.responses[place] = response
        for place in group.missing:
            begun = self.begun.get(group.number, {}).get(place)
            if begun is not None:
                self._restore_part(group, place, _kept_tokens(self.ledger.payload(begun)))

    def _restore_part(self, group: Group, place: int, kept: KeptTokens) -> None:
        """Give a group the tokens of an interrupted response, if the ledger knows the versions that sampled them.

        A ledger that begins with a segment may not.
        """
        numbers = [number for number, count in kept.versions if count]
        versions = [self.published[number] for number in numbers if number in self.published]
        if versions and len(versions) == len(numbers):
            group.kept[place] = kept
            group.spans[place] = min(versions), max(versions)  # the update must not be too late for its oldest token
            group.plan(min(numbers))

    def add_scores(self, group: Group) -> None:
        """Give the responses of a group their recorded scores, if there are any; some may have none, for a reason."""
        scores = self.scored.get(group.number)
        if scores is not None and group.output is not None and self.ledger is not None:
            content = io.BytesIO(self.ledger.payload(scores))
            tensors_of(group.output)["rm_scores"] = torch.load(content, weights_only=True)
            group.output.non_tensor_batch[FAILURE_COLUMN] = object_array(self._facts[scores]["failures"])
            extras = {FAILURE_COLUMN, *group.output.meta_info.get("reward_extra_keys", ())}
            group.output.meta_info["reward_extra_keys"] = sorted(extras)


def _kept_tokens(payload: bytes) -> KeptTokens:
    kept = KeptTokens(**json.loads(payload))
    return replace(kept, versions=[(version, count) for version, count in kept.versions])


def check_samples(group: Group, count: int) -> None:
    """Refuse kept responses of a group of another size than the run asks for.

    Raises: WrongInput.
    """
    if count != len(group.requests):
        raise WrongInput(
            f"prompt {group.number} of the data has {count} kept responses, and the run asks for "
            f"{len(group.requests)}: restore actor_rollout_ref.rollout.n, or give the run another folder"
        )


def packed(output: DataProto) -> bytes:
    """Return responses as the payload of an event."""
    return pickle.dumps(output, protocol=5)


def unpacked(payload: bytes, source: str, trusted_classes: Iterable[str]) -> DataProto:
    """Return the responses of a payload.

    Raises: UntrustedClassError, CheckpointError naming the source.
    """
    output: DataProto = load_pickle(io.BytesIO(payload), trusted_classes, source)
    output.check_consistency()
    return output
