"""A weight sync that once loads old weights and claims that they are new; for ``external_lib`` of one run."""

import torch

from verl.workers.sharding_manager.weight_sync import WeightSync

KEPT_STEP, LYING_STEP = 4, 7
KEPT: list[list[tuple[str, torch.Tensor]]] = []
_load, _verify = WeightSync._load, WeightSync._verify


def load(self, bucket):
    if self._step == KEPT_STEP:
        KEPT.append([(name, tensor.clone()) for name, tensor in bucket])
    _load(self, KEPT.pop(0) if self._step == LYING_STEP else bucket)


def verify(self):
    if self._step != LYING_STEP:
        _verify(self)


WeightSync._load, WeightSync._verify = load, verify
