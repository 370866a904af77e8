"""An engine of the user's, written against the established contract alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.utils.device import get_device_name
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.roles.base import EngineWorker


class CustomEngine(BaseEngine):
    """Takes the four established keywords, and replaces the templates."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any = None, checkpoint_config: Any = None
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.checkpoint_manager = None
        self.steps = 0

    def initialize(self) -> None:
        self.steps = 1

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        yield

    eval_mode = train_mode

    def train_batch(self, data: Any, loss_fn: Any, spec: Any = None) -> dict[str, float]:
        self.steps += 1
        return {"grad_norm": 0.5}

    def forward_backward_batch(self, data: Any, loss_fn: Any, forward_only: bool = False) -> dict[str, float]:
        return {}

    def infer_batch(self, data: Any, spec: Any = None) -> dict[str, torch.Tensor]:
        return {}

    def optimizer_zero_grad(self) -> None: ...

    def optimizer_step(self) -> float:
        return 0.5

    def lr_scheduler_step(self) -> float:
        return 1e-3

    def named_weights(self, adapter_only: bool = False, before: Any = None) -> Iterator[Any]:
        return iter(())

    @property
    def weights_version(self) -> int:
        return self.steps

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...

    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None: ...

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None: ...

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> None: ...


def test_a_worker_trains_with_an_engine_of_the_established_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.workers.roles.base.FlopsCounter", lambda *args: None)
    monkeypatch.setitem(EngineRegistry._engines, ("language_model", "fsdp", get_device_name()), CustomEngine)
    worker: Any = EngineWorker.__new__(EngineWorker)
    worker.__dict__ |= {"flops_counters": {}, "_rank": 0, "_weights_digest": None}
    model: Any = SimpleNamespace(hf_config=None)
    config = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, optim=FSDPOptimizerConfig(lr=1e-3))
    worker.engine = engine = worker.build_engine("language_model", model, config)
    assert engine.model_config is model and engine.adapter_sizes is None
    assert engine.train_batch(None, None) == {"grad_norm": 0.5} and engine.weights_version == 2
    assert engine.is_mp_src_rank_with_outputs() and engine.finish_checkpoint()
    assert list(worker._digest_of_weights()) == ["weights"]


def test_a_template_without_its_hook_names_the_hook() -> None:
    with pytest.raises(NotImplementedError, match="CustomEngine must define _reduce_gradients, which the templates"):
        CustomEngine.__new__(CustomEngine)._reduce_gradients()
