"""The ledger of a run, in the words of the trainer."""

import io
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from verl.errors import WrongInput
from verl.experimental.agent_loop.held import KeptTokens
from verl.trainer.asynchronous.history import History, packed
from verl.trainer.asynchronous.kept import response_lengths
from verl.trainer.asynchronous.ledger import Facts, Ledger, LedgerReader
from verl.trainer.asynchronous.scheduler import Group
from verl.utils.json_types import JsonObject
from verl.utils.observe.digest import tensor_digest

logger = logging.getLogger(__name__)


NAME = "ledger.sqlite"
SEGMENT = "ledger_segment.sqlite"


class RunRecord:
    """Writes what decides what is trained to a ledger, and knows what it says about updates that are to be repeated.

    Attributes: ``history`` says which updates are repeated; a replay repeats all of them, and writes no ledger.
        ``is_replay`` says whether the run follows the ledger of another one.
    """

    def __init__(self, ledger: Ledger | None, history: History, is_replay: bool = False) -> None:
        self.history = history
        self.is_replay = is_replay
        self._ledger = ledger
        self._resumed_at = 0
        self._exported = 0

    @classmethod
    def of_run(cls, folder: Path, trusted_classes: Iterable[str], is_new: bool) -> Self:
        """Open the ledger of a run, and read it from its start; a new run puts that of an earlier one aside."""
        path = folder / NAME
        if is_new and path.exists():
            logger.warning("trainer.resume_mode=disable: the ledger of the earlier run is %s now", put_aside(path))
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(path)
        return cls(ledger, History.read(ledger, 0, trusted_classes))

    @classmethod
    def of_replay(cls, path: Path, trusted_classes: Iterable[str]) -> Self:
        """Read the ledger that a replay follows.

        Raises: LedgerError if it was changed; WrongInput if it holds no update.
        """
        reader = LedgerReader(path)
        reader.verify()
        history = History.read(reader, 0, trusted_classes)
        if not history.batches:
            raise WrongInput(f"async_training.replay={path}: the ledger holds no batch, so there is nothing to replay")
        return cls(None, history, is_replay=True)

    @classmethod
    def of_validation(cls) -> Self:
        """Write and read no ledger, since nothing is trained."""
        return cls(None, History(None))

    def place(self, update: int) -> int:
        """Return the place in the ledger for a checkpoint before an update, after which a resumed run reads it.

        What finishes while the checkpoint is written stands behind it, and so do the updates that this run itself has
        still to repeat. A replay has the place 0.
        """
        if self._ledger is None:
            return 0
        is_repeating = any(recorded >= update for recorded in self.history.batches)
        return self._resumed_at if is_repeating else self._ledger.last_seq

    def resume(self, step: int, seq: int, segment: Path, trusted_classes: Iterable[str]) -> None:
        """Go on after the checkpoint of a step, which holds the place ``seq`` in the ledger.

        A ledger that was lost, with the disk of the driver for instance, or that has lost its end, begins again with
        the ``segment`` of the checkpoint.
        """
        if self._ledger is None:
            return
        if self._ledger.last_seq < seq and segment.is_file():
            self._ledger = _begun_with(segment, self._ledger)
        self._exported = self._resumed_at = seq
        if self._ledger.last_seq < seq:
            logger.warning(
                "the ledger has %d events, and had %d at the checkpoint of step %d: it is not the one of this run, or "
                "was lost. The run goes on from the checkpoint, and nothing after it is repeated",
                *(self._ledger.last_seq, seq, step),
            )
            self._exported = self._resumed_at = self._ledger.last_seq
            self.history = History(self._ledger)
            return
        self.history = History.read(self._ledger, seq, trusted_classes)

    def tell_resumed(self, step: int, drawn: int) -> int:
        """Say and record what is repeated and taken over; return how many responses start again.

        Args: ``drawn`` prompts were drawn at the checkpoint.
        Raises: LedgerError if one of the events that are repeated or taken over was changed.
        """
        if self._ledger is None or not (self._ledger.last_seq or step):
            return 0
        self._ledger.verify(self._resumed_at)
        history = self.history
        finished, responses = history.num_finished()
        continued, restarted = self._under_way(self._ledger)
        facts: JsonObject = {
            "step": step,
            "drawn": drawn,
            "updates": sorted(history.batches),
            "finished": finished,
            "responses": responses,
            "continued": continued,
            "restarted": restarted,
            "failed": len(history.failed),
        }
        self._ledger.append("resumed", facts)
        logger.info(
            "ledger: the run goes on after update %d, repeats %d updates with their recorded batches, and takes over "
            "%d finished groups, %d responses of unfinished groups, and %d groups that had failed; of the responses "
            "that were under way %d go on after their recorded tokens, and %d start again",
            *(step, len(history.batches), finished, responses, len(history.failed), continued, restarted),
        )
        return restarted

    @staticmethod
    def _under_way(ledger: Ledger) -> tuple[int, int]:
        """Return how many responses that were under way at the end of a ledger have tokens, and how many have none."""
        sent: dict[int, int] = {}
        begun: set[tuple[int, int]] = set()
        ended: set[tuple[int, int]] = set()
        for event in ledger.events("sent", "turn", "finished", "failed"):
            facts = cast(Facts, event.facts)
            if event.kind == "sent":
                sent[facts["number"]] = len(facts["seeds"])
            elif event.kind == "failed":
                sent.pop(facts["number"], None)
            else:
                (begun if event.kind == "turn" else ended).add((facts["number"], facts["sample"]))
        left = {(number, place) for number, count in sent.items() for place in range(count)} - ended
        return len(left & begun), len(left - begun)

    # ---- events

    def drawn(self, group: Group) -> None:
        """Record the draw of a prompt."""
        prompt = tensor_digest(group.requests.batch["input_ids"][:1]) if group.requests.batch is not None else ""
        uid = str(group.prepared.non_tensor_batch["uid"][0])
        self._append("drawn", {"number": group.number, "uid": uid, "prompt": prompt})

    def sent(self, group: Group, update: int) -> None:
        """Record the requests of a group; ``update`` is the next whose groups are not chosen yet."""
        seeds = group.seeds.tolist()
        self._append("sent", {"number": group.number, "version": group.version, "update": update, "seeds": seeds})

    def interrupted(self, group: Group, kept: KeptTokens) -> None:
        """Record the tokens so far of a response."""
        facts: JsonObject = {"number": group.number, "sample": kept.sample, "length": len(kept.token_ids)}
        self._append("turn", facts, json.dumps(asdict(kept)).encode())

    def finished(self, group: Group, place: int) -> None:
        """Record the response at a place of a group."""
        response = group.responses[place]
        servers = sorted({name for line in response.meta_info["attempts"] for name in line.get("servers", ())})
        facts: JsonObject = {"number": group.number, "sample": place, "samples": len(group.requests)}
        facts |= {"span": list(group.spans[place]), "servers": servers, "planned": group.planned}
        facts["length"] = response_lengths(response)[0]
        self._append("finished", facts, packed(response))

    def failed(self, group: Group, reason: str) -> None:
        """Record why a group is given up."""
        self._append("failed", {"number": group.number, "reason": reason})

    def dropped(self, group: Group, reason: str) -> None:
        """Record why a finished group is not trained."""
        self._append("dropped", {"number": group.number, "reason": reason})

    def scored(self, groups: Sequence[Group], scores: Tensor, failures: Sequence[str | None]) -> None:
        """Record the token-level scores (B, R) of groups, in their order, and why responses have none."""
        first = 0
        for group in groups:
            count = len(group.requests)
            content = io.BytesIO()
            torch.save(scores[first : first + count].clone(), content)
            facts: JsonObject = {"number": group.number, "scores": scores[first : first + count].sum(-1).tolist()}
            facts["failures"] = list(failures[first : first + count])
            self._append("scored", facts, content.getvalue())
            first += count

    def batch(self, update: int, version: int, groups: Sequence[Group]) -> None:
        """Record which groups an update trains on."""
        numbers = [group.number for group in groups]
        self._append("batch", {"update": update, "version": version, "numbers": numbers})

    def updated(self, update: int, weights: Sequence[str | None], number: int) -> None:
        """Record the weights after an update, and compare them with those of its last attempt.

        Raises: RuntimeError in a replay whose weights differ.
        """
        digests = [str(digest) for digest in weights]
        known = self.history.weights.get(update)
        if known is not None and known != digests:
            words = f"update {update}: the weights are {digests}, and were {known} when it was recorded"
            if self.is_replay:
                raise RuntimeError(f"the replay departs from its ledger: {words}")
            logger.warning("%s: the repeated update has other bits", words)
        self._append("update", {"update": update, "weights": digests, "number": number})

    def published(self, version: int, number: int) -> None:
        """Record that the servers get a version, which has a number of the engine."""
        self._append("published", {"version": version, "number": number})

    def export(self, folder: Path) -> None:
        """Write the events since the place of the checkpoint before to the folder of a checkpoint."""
        if self._ledger is not None:
            self._ledger.export(folder / SEGMENT, self._exported, self._ledger.last_seq)

    def saved(self, step: int, seq: int) -> None:
        """Record a checkpoint, which holds the place ``seq`` in the ledger."""
        self._append("checkpoint", {"step": step, "seq": seq}, durable=True)
        self._exported = seq

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def _append(self, kind: str, facts: JsonObject, payload: bytes | None = None, durable: bool = False) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, facts, payload, durable)


def _begun_with(segment: Path, short: Ledger) -> Ledger:
    """Return the ledger that goes on after the events of a segment, in place of one that ends before.

    Raises: LedgerError if an event of the segment was changed.
    """
    with LedgerReader(segment) as reader:
        reader.verify()
        found = short.last_seq
        short.close()
        aside = put_aside(short.path)
        reader.export(short.path, reader.base_seq, reader.last_seq)
    logger.warning(
        "the ledger %s had %d events, fewer than at the checkpoint, and is %s now: the run goes on after the events of "
        "%s",
        *(short.path, found, aside, segment),
    )
    return Ledger(short.path)


def put_aside(path: Path) -> Path:
    """Rename a ledger, and return its new path."""
    number = 1
    while (other := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    for ending in ("", "-wal", "-shm"):
        part = path.with_name(path.name + ending)
        if part.exists():
            part.rename(other.with_name(other.name + ending))
    return other
