"""Which models and groups of workers the keys of a role ask for."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl.trainer.config.cli import CONFIG_DIR
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker, rollout_group_size


def node(*overrides):
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.{each}" for each in overrides]).actor_rollout_ref


@pytest.mark.parametrize(("name", "size"), [("vllm", 2), ("hf", 1)])
def test_transformers_generates_in_each_worker_alone(name, size):
    assert rollout_group_size(node(f"rollout.name={name}").rollout) == size


def test_a_reference_of_its_own_differs_in_the_keys_that_it_names():
    config = node(
        "model.path=actor", "model.use_remove_padding=true",
        "ref.model={path: other, override_config: {b: 2}}", "ref.log_prob_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    OmegaConf.update(config, "model.override_config", {"a": 1}, force_add=True)
    built = []

    def build_engine(kind, model, engine, optimizer, checkpoint, load_weight):
        built.append((kind, model, engine, optimizer))
        assert load_weight
        return SimpleNamespace(get_data_parallel_size=lambda: 1)

    actor_model = omega_conf_to_dataclass(config.model)
    worker = SimpleNamespace(config=config, model_config=actor_model, build_engine=build_engine, _is_actor=False)
    ActorRolloutRefWorker._build_ref(worker)
    config.ref.model = None
    ActorRolloutRefWorker._build_ref(worker)
    (kind, other, engine, optimizer), (_, same, _, _) = built
    assert kind == "language_model" and engine.forward_only and optimizer is None
    assert (other.path, other.use_remove_padding, other.override_config) == ("other", True, {"a": 1, "b": 2})
    assert same is actor_model
    assert worker.ref_cut.micro_batch_size_per_gpu == 2 and worker.engine is worker.ref_engine
