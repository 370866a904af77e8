"""Where the package that generation with SGLang needs is absent."""

import importlib.util

import pytest
from omegaconf import DictConfig

from verl.errors import WrongInput
from verl.trainer.config.run_config import RunConfig
from verl.trainer.preflight import check_run_machine
from verl.trainer.run import inputs


@pytest.mark.parametrize(
    ("device", "remedy"), [("cpu", r"run scripts/setup_env\.sh"), ("cuda", r"install it as docs/install\.md says")]
)
def test_a_run_without_the_package_is_refused(
    composed, monkeypatch: pytest.MonkeyPatch, device: str, remedy: str
) -> None:
    config: DictConfig = composed(f"trainer.device={device}", "actor_rollout_ref.rollout.name=sglang")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find(name))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # a cluster of other tests may run in this process
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(inputs.glob, "glob", lambda path: ["/dev/nvidia0"])
    told = rf"^actor_rollout_ref\.rollout\.name=sglang: needs the package sglang, which is absent: {remedy}, or write v"
    with pytest.raises(WrongInput, match=told):
        check_run_machine(RunConfig.parse(config))
