"""Groups in a checkpoint: those that are drawn and in no update yet."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from verl.errors import CheckpointError, UntrustedClassError, WrongInput
from verl.protocol import DataProto, tensors_of
from verl.trainer.asynchronous.scheduler import Group
from verl.utils.checkpoint.files import write_file
from verl.utils.py_functional import object_array

FILE_NAME = "groups.pkl"
_PROGRESS = "progress"
_NUMBER = "__number__"
_VERSION = "__version__"
_PLANNED = "__planned__"
_SPANS = "__spans__"
_OUTPUT = "__output__"
_RESPONSES = "__responses__"


@dataclass
class Progress:
    """How far the data of a run are drawn and generated.

    Attributes:
        drawn: prompts that were drawn.
        generated: responses that were generated.
        tokens_generated: their tokens.
        score_generated: the sum of their scores; None once one had none when it was finished.
        trained, tokens_trained, score_trained: the same of responses in an update.
        stale_groups: groups that an update has trained after their version was no longer the newest.
        stale_trajectories: responses of which that is true.
        failed: numbers of the groups that were given up because their agent loops failed.
        dropped: groups that were too old to be trained.
        restarted: responses that were under way when the run ended, and were sampled again.
        trained_number: the engine's number of the weights at the checkpoint.
        ledger_seq: events of the ledger at the checkpoint.
    """

    drawn: int = 0
    generated: int = 0
    tokens_generated: int = 0
    score_generated: float | None = 0.0
    trained: int = 0
    tokens_trained: int = 0
    score_trained: float | None = 0.0
    stale_groups: int = 0
    stale_trajectories: int = 0
    failed: list[int] = field(default_factory=list)
    dropped: int = 0
    restarted: int = 0
    trained_number: int = 0
    ledger_seq: int = 0

    def add_generated(self, output: DataProto) -> None:
        """Count the responses to a prompt."""
        self.generated += len(output)
        self.tokens_generated += sum(response_lengths(output))
        self.score_generated = _added(self.score_generated, output)

    def add_trained(self, output: DataProto) -> None:
        """Count the responses to a prompt that an update takes."""
        self.trained += len(output)
        self.tokens_trained += sum(response_lengths(output))
        self.score_trained = _added(self.score_trained, output)


def _added(score: float | None, output: DataProto) -> float | None:
    scores = tensors_of(output).get("rm_scores")
    return None if score is None or scores is None else score + float(scores.sum())


def response_lengths(output: DataProto) -> list[int]:
    """Return the tokens of each response."""
    tensors = tensors_of(output)
    lengths: list[int] = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].sum(-1).tolist()
    return lengths


def save_groups(folder: Path, groups: Sequence[Group], progress: Progress) -> None:
    """Write the groups to the folder of a checkpoint with the responses that are there."""
    rows = DataProto.concat([group.prepared for group in groups]) if groups else DataProto()
    rows = rows.select()
    if groups:
        rows.non_tensor_batch[_NUMBER] = np.array([group.number for group in groups])
        rows.non_tensor_batch[_VERSION] = np.array([group.version for group in groups])
        planned = [None if group.output is None and not group.responses else group.planned for group in groups]
        rows.non_tensor_batch[_PLANNED] = object_array(planned)
        rows.non_tensor_batch[_SPANS] = object_array([dict(group.spans) for group in groups])
        rows.non_tensor_batch[_RESPONSES] = object_array([dict(group.responses) for group in groups])
        rows.non_tensor_batch[_OUTPUT] = object_array([group.output for group in groups])
    rows.meta_info = {_PROGRESS: asdict(progress)}
    write_file(folder, FILE_NAME, lambda file: pickle.dump(rows, file, protocol=5))


def load_groups(
    path: Path, trusted_classes: Iterable[str], new_group: Callable[[int, DataProto], Group]
) -> tuple[list[Group], Progress]:
    """Return what ``save_groups`` has written; ``new_group`` makes a group of its number and its row.

    Raises: UntrustedClassError; WrongInput for a file that is missing or damaged.
    """
    how = "without it the prompts that were under way would be lost. Copy it back, or resume from another checkpoint"
    try:
        rows = DataProto.load_from_disk(path, trusted_classes)
    except UntrustedClassError:
        raise
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing: {how}") from None
    except (CheckpointError, ValueError) as error:
        raise WrongInput(f"{path}: {error}: {how}") from error
    progress = Progress(**rows.meta_info.pop(_PROGRESS))
    if not rows.non_tensor_batch:
        return [], progress
    numbers = rows.non_tensor_batch.pop(_NUMBER).tolist()
    versions = rows.non_tensor_batch.pop(_VERSION).tolist()
    planned = rows.non_tensor_batch.pop(_PLANNED)
    spans = rows.non_tensor_batch.pop(_SPANS)
    responses = rows.non_tensor_batch.pop(_RESPONSES)
    outputs = rows.non_tensor_batch.pop(_OUTPUT)
    groups = []
    for at, number in enumerate(numbers):
        group = new_group(number, rows[at : at + 1])
        group.version = versions[at]
        group.planned = planned[at]
        group.spans = spans[at]
        group.output = outputs[at]
        group.responses = {} if group.output is not None else responses[at]
        groups.append(group)
    return groups, progress
