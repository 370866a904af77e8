"""Random seeds as pure functions of their place in a run, so that every draw can be replayed on its own."""

import hashlib
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from verl.utils import envs

_RUN_NAMESPACE = uuid.UUID("6f0c4ad2-7f5a-5c2b-9d0e-3b1f6e8a4c17")


# The constants of SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_FACTOR = np.uint64(0xBF58476D1CE4E5B9)


def mix(value: np.ndarray) -> np.ndarray:
    """Scramble uint64 values so that close inputs give unrelated outputs.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13.
    """
    value = (value ^ (value >> np.uint64(30))) * MIX_FACTOR
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def compute_deterministically() -> None:
    """Let torch take deterministic algorithms in this process; an operation that has none warns."""
    envs.write_default({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"})
    torch.use_deterministic_algorithms(True, warn_only=True)


def derive_seed(run_seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for one named place in a run, for instance ``derive_seed(1, "driver", step)``."""
    text = "/".join([str(run_seed), *(str(part) for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_seeds(
    run_seed: int,
    step: int,
    num_prompts: int,
    n: int,
    validate: bool = False,
    first_prompt: int = 0,
    places: np.ndarray | None = None,
) -> Tensor:
    """Return the seeds of ``num_prompts * n`` requests, interleaved as in ``DataProto.repeat``: int64, 63 bit.

    A seed depends only on the run, the step, the position of the prompt in the step's data and the number of the
    sample. ``first_prompt`` is the position of the first prompt, for data that comes in several batches. ``places``
    (num_prompts,) uint64 are other numbers of the prompts than their positions.
    """
    # Two rounds of mixing give unrelated seeds for neighbours, without a hash for each of thousands of requests.
    base = np.uint64(derive_seed(run_seed, "validate" if validate else "sample", step))
    prompts = np.arange(first_prompt, first_prompt + num_prompts, dtype=np.uint64) if places is None else places
    samples = np.arange(n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        of_prompt = mix(base + (prompts + np.uint64(1)) * GOLDEN)
        seeds = mix(of_prompt[:, None] + (samples[None, :] + np.uint64(1)) * GOLDEN)
    return torch.from_numpy((seeds.reshape(-1) >> np.uint64(1)).astype(np.int64))


@dataclass
class RequestSeeds:
    """Seeds for requests without a seed, which the training loop of a user's fork may send.

    A seed depends only on the run, the step and the place of the request among all of the step, not on the number of
    processes that share them. A resumed run thus samples what the run before it would have sampled.

    Args:
        shard: which of the ``num_shards`` equal parts of each batch comes to this process.
        updates: returns the number of updates of the policy so far, which counts the steps of batches that do not
            name theirs.
    """

    run_seed: int
    shard: int = 0
    num_shards: int = 1
    updates: Callable[[], int] = int
    _drawn: dict[bool, tuple[int, int]] = field(init=False, default_factory=dict)  # validate -> step, requests

    def draw(self, count: int, step: int | None = None, validate: bool = False) -> Tensor:
        """Return the seeds of the next ``count`` requests of this process: int64, 63 bit."""
        step = self.updates() if step is None else step
        known, first = self._drawn.get(validate, (step, 0))
        if known != step:
            first = 0
        self._drawn[validate] = (step, first + count * self.num_shards)
        return sampling_seeds(self.run_seed, step, count, 1, validate, first + count * self.shard)


def prompt_uids(run_seed: int, step: int, num_prompts: int, kind: str = "train", first_prompt: int = 0) -> np.ndarray:
    """Return one UUID per prompt of a step as an object array (num_prompts,), the same in every replay."""
    positions = range(first_prompt, first_prompt + num_prompts)
    names = [str(uuid.uuid5(_RUN_NAMESPACE, f"{run_seed}/{kind}/{step}/{position}")) for position in positions]
    return np.array(names, dtype=object)


def seed_process(run_seed: int, *path: int | str) -> None:
    """Seed ``random``, numpy and torch of this process for one named place in a run."""
    seed = derive_seed(run_seed, *path)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class ProcessRandomState:
    """The state of the CPU random generators that ``seed_process`` seeds."""

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def now(cls) -> Self:
        """Return the present state."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Go back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
