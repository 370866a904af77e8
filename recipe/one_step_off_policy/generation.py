"""A batch that is generated one step ahead, and how a checkpoint stores it."""

import logging
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch

from verl.errors import CheckpointError, UntrustedClassError, WrongInput
from verl.experimental.agent_loop.manager import PendingGeneration
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.state import Metrics
from verl.utils.checkpoint.files import write_file
from verl.utils.numerics.seeding import ProcessRandomState
from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.digest import tensor_digest
from verl.utils.observe.timeline import Part

logger = logging.getLogger(__name__)

FILE_NAME = "generation.pkl"
_ATTEMPTS = "attempts_of_generation"
_DIGEST = "digest_of_prompts"


@dataclass
class GenerationBatchFuture:
    """The batch of a coming step, from the draw of its prompts to its responses.

    Attributes:
        step: the step that trains on it.
        prepared: the drawn batch with all columns.
        batch: the drawn batch without the columns that the rollout reads.
        prompts: the columns that the rollout reads, one row per prompt.
        requests: the columns that the rollout reads, one row per response.
        seeds: the sampling seed of each response.
        metrics: metrics of making the requests.
        random_state: the random state of this process after the draw; the step that trains continues from it.
        position: the position in the data before the draw.
        pending: the running generation.
        gen_batch_output: the responses, once they have arrived.
        attempts: one line per attempt at a trajectory.
        recorded: spans that the agent loops recorded for the timeline of the step.
    """

    step: int
    prepared: DataProto
    batch: DataProto
    prompts: DataProto
    requests: DataProto
    seeds: torch.Tensor
    metrics: Metrics
    random_state: ProcessRandomState
    position: DataPosition | None = None
    pending: PendingGeneration | None = None
    gen_batch_output: DataProto | None = None
    attempts: list[AttemptLine] = field(default_factory=list)
    recorded: list[Part] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A digest that identifies these prompts."""
        return tensor_digest(tensors_of(self.requests)["input_ids"])

    def save(self, folder: Path) -> None:
        """Write the responses into the folder of a checkpoint."""
        output = self.gen_batch_output
        assert output is not None, "only a finished generation is saved"
        kept = output.select()
        kept.meta_info = output.meta_info | {_ATTEMPTS: self.attempts, _DIGEST: self.digest}
        write_file(folder, FILE_NAME, lambda file: pickle.dump(kept, file, protocol=5))

    def take(self, kept: DataProto) -> bool:
        """Adopt the responses of a checkpoint if they answer these requests; return whether they do."""
        attempts = kept.meta_info.pop(_ATTEMPTS, [])
        digest = kept.meta_info.pop(_DIGEST, None)
        if digest != self.digest or len(kept) != len(self.requests):
            logger.warning(
                "step %d: %s of the checkpoint answers other prompts than those of this run, so they are sampled anew",
                *(self.step, FILE_NAME),
            )
            return False
        self.gen_batch_output, self.attempts = kept, list(attempts)
        return True


def load_generation(path: Path, trusted_classes: list[str]) -> DataProto:
    """Return the responses that ``GenerationBatchFuture.save`` has written.

    Raises: UntrustedClassError; WrongInput for a file that is missing or damaged.
    """
    how = "without it the step that follows would train on other responses. Copy it back, or resume from another"
    try:
        return DataProto.load_from_disk(path, trusted_classes)
    except UntrustedClassError:
        raise
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing: {how} checkpoint") from None
    except (CheckpointError, ValueError) as error:
        raise WrongInput(f"{path}: {error}: {how} checkpoint") from error
