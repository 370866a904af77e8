"""Counts the rows that an actor trains on; for ``external_lib`` of runs that are killed.

Before each update every worker appends a line with its step and a digest of the tokens of each row to the file that
``COUNTED_UPDATES`` names.
"""

import hashlib
import json
import os

import torch

from verl.workers.roles import batching
from verl.workers.roles.batching import BatchInfo

_spec = batching.policy_update_spec


def digest(tokens: torch.Tensor, mask: torch.Tensor) -> str:
    """Return the digest of the tokens of a row, without its padding."""
    return hashlib.sha256(tokens[mask.bool()].numpy().tobytes()).hexdigest()[:16]


def counted_spec(spec, config, data, temperature):
    """Note the rows of an update, which is about to begin."""
    tensors = data.batch
    rows = [digest(*pair) for pair in zip(tensors["input_ids"], tensors["attention_mask"], strict=True)]
    length = tensors["input_ids"].shape[1] - tensors["responses"].shape[1]
    prompts = zip(tensors["input_ids"][:, :length], tensors["attention_mask"][:, :length], strict=True)
    line = {"step": BatchInfo.of(data).step, "rows": rows, "prompts": [digest(*pair) for pair in prompts]}
    with open(os.environ["COUNTED_UPDATES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return _spec(spec, config, data, temperature)


if "COUNTED_UPDATES" in os.environ:  # a test that imports this module does not count
    batching.policy_update_spec = counted_spec
