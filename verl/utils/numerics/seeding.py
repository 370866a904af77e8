"""Random seeds as pure functions of their place in a run, so that every draw can be replayed on its own."""

import hashlib
import random
import uuid

import numpy as np
import torch
from torch import Tensor

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


def derive_seed(run_seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for one named place in a run, for instance ``derive_seed(1, "driver", step)``."""
    text = "/".join([str(run_seed), *(str(part) for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_seeds(
    run_seed: int, step: int, num_prompts: int, n: int, validate: bool = False, first_prompt: int = 0
) -> Tensor:
    """Return the seeds of ``num_prompts * n`` requests, interleaved as in ``DataProto.repeat``: int64, 63 bit.

    A seed depends only on the run, the step, the position of the prompt in the step's data and the number of the
    sample. ``first_prompt`` is the position of the first prompt, for data that comes in several batches.
    """
    base = np.uint64(derive_seed(run_seed, "validate" if validate else "sample", step))
    prompts = np.arange(first_prompt, first_prompt + num_prompts, dtype=np.uint64)
    samples = np.arange(n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        of_prompt = mix(base + (prompts + np.uint64(1)) * GOLDEN)
        seeds = mix(of_prompt[:, None] + (samples[None, :] + np.uint64(1)) * GOLDEN)
    return torch.from_numpy((seeds.reshape(-1) >> np.uint64(1)).astype(np.int64))


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
