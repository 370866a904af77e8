"""The temperature at which the reward model reads responses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.prime.prime_fsdp_workers import PRIMERewardModelWorker
from verl.protocol import DataProto
from verl.workers.engine.passes import PassSpec


def test_reward_model_and_reference_are_read_at_one_temperature() -> None:
    """That of the policy if the policy is the reference, else both at 1."""
    worker: Any = PRIMERewardModelWorker.__new__(PRIMERewardModelWorker)
    worker.spec, worker.ref_engine = PassSpec(False, 2, 64), None
    batch = DataProto.from_dict({"old_log_probs": torch.zeros(1, 2)}, meta_info={"temperature": 0.5})
    assert worker._spec(batch).temperature == 0.5
    batch.meta_info.clear()
    with pytest.raises(ValueError, match="lacks temperature"):
        worker._spec(batch)
    worker.ref_engine = SimpleNamespace()
    assert worker._spec(batch) is worker.spec and worker.spec.temperature == 1.0
