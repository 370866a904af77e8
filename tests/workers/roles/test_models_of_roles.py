"""Which models and groups of workers the keys of a role ask for."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl.trainer.config.cli import CONFIG_DIR
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.base import AnyTrainedConfig, EngineWorker, engine_config_of
from verl.workers.roles.critic import CriticWorker


def node(*overrides):
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.{each}" for each in overrides]).actor_rollout_ref


@pytest.mark.parametrize(("name", "size"), [("vllm", 2), ("hf", 1)])
def test_transformers_generates_in_each_worker_alone(name, size):
    assert omega_conf_to_dataclass(node(f"rollout.name={name}").rollout).workers_per_engine == size


@pytest.fixture
def alone(monkeypatch):
    """Let workers be constructed here, without processes and models."""
    monkeypatch.setattr(vars(HFModelConfig)["hf_config"], "_load", lambda config: None)
    monkeypatch.setattr("verl.workers.roles.base.initialize_global_process_group_ray", lambda timeout_second: None)
    monkeypatch.setattr("verl.single_controller.base.Worker.__init__", lambda self: None)
    for name, value in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(EngineWorker, name, value, raising=False)
    monkeypatch.setattr(EngineWorker, "_register_dispatch_collect_info", lambda *args: None)


def test_schedules_get_their_length_before_the_models_are_built(alone):
    config = node("model.path=actor", "rollout.name=hf", "actor.ppo_micro_batch_size_per_gpu=1")
    OmegaConf.set_struct(config, True)
    worker = ActorRolloutRefWorker(config, "actor")
    worker.set_total_training_steps(7)
    assert worker.actor_config.optim.total_training_steps == config.actor.optim.total_training_steps == 7
    ActorRolloutRefWorker(node("model.path=actor", "rollout.name=hf"), "ref").set_total_training_steps(7)
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        critic = compose("ppo_trainer", ["critic.model.path=critic", "critic.ppo_micro_batch_size_per_gpu=1"]).critic
    worker = CriticWorker(critic)
    worker.set_total_training_steps(7)
    assert worker.config.optim.total_training_steps == 7


def test_a_reference_of_its_own_differs_in_the_keys_that_it_names(alone, monkeypatch):
    config = node(
        "model.path=actor", "model.use_remove_padding=true",
        "ref.model={path: other, override_config: {b: 2}}", "ref.log_prob_micro_batch_size_per_gpu=2",
        "rollout.name=hf",
    )  # fmt: skip
    OmegaConf.update(config, "model.override_config", {"a": 1}, force_add=True)
    built = []

    def build_engine(self, kind, model, config, frozen):
        built.append((kind, model, config))
        parts = {"module": None, "optimizer": None, "lr_scheduler": None, "adopt": lambda *parts: None}
        return SimpleNamespace(get_data_parallel_size=lambda: 1, **parts)

    monkeypatch.setattr(ActorRolloutRefWorker, "build_engine", build_engine)
    worker = ActorRolloutRefWorker(config, "ref")
    worker.init_model()
    assert worker.ref_spec.micro_batch_size == 2 and worker.engine is worker.ref_engine
    config.ref.model = None
    same = ActorRolloutRefWorker(config, "ref")
    same.init_model()
    (kind, other, config), (_, actor_model, _) = built
    assert kind == "language_model" and engine_config_of(config).forward_only
    assert not isinstance(config, AnyTrainedConfig)  # which alone have an optimizer
    assert (other.path, other.use_remove_padding, other.override_config) == ("other", True, {"a": 1, "b": 2})
    assert other.tokenizer_path == other.hf_config_path == "other"
    assert actor_model is same.model_config and actor_model.path == "actor"
