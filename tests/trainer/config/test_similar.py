"""Keys that are proposed for one that does not exist."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.config.keys import dotted_keys, optional_keys
from verl.trainer.config.similar import USUAL_NAMES, similar_keys

TREES = ("ppo_trainer", "sft_trainer", "sft_trainer_engine", "generation")


def keys_of(name: str) -> set[str]:
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        tree = OmegaConf.to_container(compose(name), resolve=False)
    known = dotted_keys(tree)
    return {*known, *optional_keys(known)}


@pytest.fixture(scope="module")
def keys() -> dict[str, set[str]]:
    return {name: keys_of(name) for name in TREES}


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("batch_size", "data.train_batch_size"),
        ("model_path", "actor_rollout_ref.model.path"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.sed", "trainer.seed"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("data.train_flies", "data.train_files"),
        ("output_dir", "trainer.default_local_dir"),
    ],
)
def test_the_first_proposal(key: str, first: str, keys: dict[str, set[str]]) -> None:
    assert similar_keys(key, keys["ppo_trainer"])[0] == first


@pytest.mark.parametrize("key", ["trainer.wrong_0", "foo.zzz", "trainer.banana", "critic.q"])
def test_nothing_is_proposed_if_nothing_is_alike(key: str, keys: dict[str, set[str]]) -> None:
    assert similar_keys(key, keys["ppo_trainer"]) == []


def test_a_usual_name_is_that_of_the_command(keys: dict[str, set[str]]) -> None:
    assert similar_keys("learning_rate", keys["sft_trainer"]) == ["optim.lr"]
    assert similar_keys("model_path", keys["sft_trainer"]) == ["model.partial_pretrain"]
    assert similar_keys("max_new_tokens", keys["generation"]) == ["rollout.response_length"]


def test_the_table_names_keys_that_exist(keys: dict[str, set[str]]) -> None:
    known = set().union(*keys.values())
    assert [each for found in USUAL_NAMES.values() for each in found if each not in known] == []
    assert not [name for name in USUAL_NAMES if not similar_keys(name, keys["ppo_trainer"])]
    assert len(USUAL_NAMES) >= 40
