"""What a ledger says about the updates after a place in it: a resumed run repeats them, and a replay follows them."""

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict, cast

import torch

from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.trainer.asynchronous.ledger import Ledger, LedgerReader
from verl.trainer.asynchronous.scheduler import Group
from verl.utils.loading import load_pickle


class _Facts(TypedDict):
    """The facts of the events that are read, each of which has some."""

    number: int
    version: int
    spans: list[list[int]]
    reason: str
    update: int
    numbers: list[int]
    weights: list[str]


@dataclass
class History:
    """Recorded batches, trajectories and weights.

    Attributes:
        ledger: holds the payloads.
        trusted_classes: classes that payloads may hold besides plain values and tensors.
        batches: the numbers of the groups of each update; the last attempt at an update counts.
        finished, scored: the event that holds the responses and the scores of a group.
        failed: why a group was given up.
        weights: digests of the weights after each update, one per rank.
    """

    ledger: Ledger | LedgerReader
    trusted_classes: tuple[str, ...] = ()
    batches: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    scored: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    weights: dict[int, list[str]] = field(default_factory=dict)
    _versions: dict[int, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)

    @classmethod
    def read(cls, ledger: Ledger | LedgerReader, after: int, trusted_classes: Iterable[str]) -> "History":
        """Read the events after a place."""
        history = cls(ledger, tuple(trusted_classes))
        for event in ledger.events("finished", "scored", "failed", "batch", "update", after=after):
            facts = cast(_Facts, event.facts)
            if event.kind == "batch":
                history.batches[facts["update"]] = facts["numbers"]
            elif event.kind == "update":
                history.weights[facts["update"]] = facts["weights"]
            elif event.kind == "failed":
                history.failed[facts["number"]] = facts["reason"]
            elif event.kind == "scored":
                history.scored[facts["number"]] = event.seq
            else:
                history.finished[facts["number"]] = event.seq
                spans = [(oldest, newest) for oldest, newest in facts["spans"]]
                history._versions[facts["number"]] = facts["version"], spans
        return history

    def restore(self, group: Group) -> bool:
        """Give a group its recorded responses and scores; return whether there are any."""
        seq = self.finished.get(group.number)
        if seq is None:
            return False
        version = self._versions[group.number]
        group.version = version[0]
        group.spans = version[1]
        output = unpacked(self.ledger.payload(seq), f"event {seq} of the ledger", self.trusted_classes)
        uids = output.non_tensor_batch["uid"].tolist()
        if set(uids) != set(group.prepared.non_tensor_batch["uid"].tolist()):
            raise WrongInput(
                f"the ledger has responses to another prompt as number {group.number} of the data: the data, "
                "trainer.seed or data.seed have changed since. Restore them, or give the run another folder"
            )
        check_samples(group, output)
        scores = self.scored.get(group.number)
        if scores is not None:
            tensors_of(output)["rm_scores"] = torch.load(io.BytesIO(self.ledger.payload(scores)), weights_only=True)
        group.output = output
        return True


def check_samples(group: Group, output: DataProto) -> None:
    """Refuse kept responses of another number than the run asks for.

    Raises: WrongInput.
    """
    if len(output) != len(group.requests):
        raise WrongInput(
            f"prompt {group.number} of the data has {len(output)} kept responses, and the run asks for "
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
