"""``--help KEY``: meaning, type, default and legal values."""

from collections.abc import Mapping

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.config.help_text import comments_in, comments_of, keys_help
from verl.trainer.config.keys import dotted_keys, is_free, select


def test_a_key() -> None:
    text = keys_help(["trainer.resume_mode=x", "trainer.nnodes"], "ppo_trainer", CONFIG_DIR)
    assert "    type      one of auto, disable, resume_path\n    default   auto\n" in text
    assert "    type      an integer of 1 or more\n    default   1\n" in text
    assert "    default   must be given\n" in keys_help(["actor_rollout_ref.rollout.name"], "ppo_trainer", CONFIG_DIR)


def test_a_node_shows_the_keys_in_it() -> None:
    text = keys_help(["algorithm.kl_ctrl"], "ppo_trainer", CONFIG_DIR)
    assert text.startswith("algorithm.kl_ctrl: Weight of the KL in the reward.\n")
    names = [line for line in text.splitlines() if line.startswith("algorithm.kl_ctrl.")]
    assert names == [f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")]


def test_a_key_that_no_file_has() -> None:
    text = keys_help(["trainer.wandb_proxy"], "ppo_trainer", CONFIG_DIR)
    assert "HTTPS proxy for wandb" in text and "type      a string or null" in text


def test_supervised_training() -> None:
    text = keys_help(["trainer.save_freq", "model.lora_rank"], "sft_trainer_engine", CONFIG_DIR)
    assert "type      an integer or a string" in text and "an integer in [0, 8192]" in text


def test_a_key_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        keys_help(["learning_rate"], "ppo_trainer", CONFIG_DIR)
    assert left.value.code == 2
    assert (
        "learning_rate: there is no such key; the nearest: actor_rollout_ref.actor.optim.lr" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "name", ["ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "generation"]
)
def test_every_key_of_a_file_has_a_comment(name: str) -> None:
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        tree = OmegaConf.to_container(compose(name), resolve=False)
        comments = comments_of(name, CONFIG_DIR)
    keys = [key for key in dotted_keys(tree) if not isinstance(select(tree, key), Mapping)]
    assert [key for key in keys if key not in comments and not is_free(key, dotted_keys(tree))] == []


def test_comments_of_nested_keys() -> None:
    text = "# One,\n# in two lines.\na:\n\n  # Two.\n  b: 1\n\n# Three.\nc: 2\nd: 3\n"
    assert dict(comments_in(text)) == {"a": "One, in two lines.", "a.b": "Two.", "c": "Three."}
