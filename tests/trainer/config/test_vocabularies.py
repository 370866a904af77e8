"""Models that read the policy's tokens with another tokenizer are refused, with both paths and a token."""

import json
import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.trainer.config.conftest import CONFIG_DIR
from verl.base_config import ConfigError
from verl.trainer.config.sft import parse_sft_config
from verl.trainer.config.validation import validate_config

ROOT = Path(__file__).resolve().parents[3]
TOKENS = ["<end>", "a", "b", "c"]
MODEL, CRITIC, REWARD = "actor_rollout_ref.model", "critic.model.path", "reward_model.model"
REFERENCE = "actor_rollout_ref.ref.model.path"


@pytest.fixture(scope="module")
def folders(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make models that differ in their tokenizers."""
    root = tmp_path_factory.mktemp("vocabularies")
    (policy,) = [each.split("=")[1] for each in small_run if each.startswith(f"{MODEL}.path=")]
    found = {}
    for name, tokens in {
        "policy": TOKENS,
        "same": TOKENS,
        "more": [*TOKENS, "d"],
        "fewer": TOKENS[:-1],
        "renumbered": ["<end>", "b", "a", "c"],
        "unknown": [],
    }.items():
        shutil.copytree(policy, root / name)
        vocab = {token: number for number, token in enumerate(tokens)}
        (root / name / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}, "by": name}))
        found[name] = str(root / name)
    return found


def violations(config, changes, use_reference=True):
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, use_reference, True)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


@pytest.fixture(scope="module")
def main(composed, folders):
    return composed(f"{MODEL}.path={folders['policy']}", "data.return_raw_chat=true", f"{CRITIC}={folders['policy']}",
                    f"critic.model.tokenizer_path={folders['policy']}")  # fmt: skip


@pytest.fixture(scope="module")
def prime(composed, folders):
    overrides = [f"{MODEL}.path={folders['policy']}", "reward_model.micro_batch_size_per_gpu=2"]
    folder = ROOT / "recipe/prime/config"
    return composed(*overrides, "data.oversample_factor=2.0", name="prime_trainer", folder=folder)


def scored(folders, **model):
    """Return a reward model that reads the tokens of the policy."""
    node = {"path": folders["same"], "input_tokenizer": None} | model
    return {"reward_model.enable": True, "reward_model.micro_batch_size_per_gpu": 2} | {
        f"{REWARD}.{name}": value for name, value in node.items()
    }


ROLES = {
    REFERENCE: ("main", lambda folders, path: {"actor_rollout_ref.ref.model": {"path": path}}),
    CRITIC: ("main", lambda folders, path: {CRITIC: path}),
    f"{REWARD}.path": ("main", lambda folders, path: scored(folders, path=path)),
    f"{REWARD}.input_tokenizer": ("main", lambda folders, path: scored(folders, input_tokenizer=path)),
    f"{REWARD}.path of prime": ("prime", lambda folders, path: {f"{REWARD}.path": path}),
    f"{REWARD}.ref_path": ("prime", lambda folders, path: {f"{REWARD}.ref_path": path}),
}


@pytest.mark.parametrize("key", ROLES)
def test_a_role_needs_every_token_of_the_policy(key, folders, request):
    tree, changes = ROLES[key]
    config, key = request.getfixturevalue(tree), key.removesuffix(" of prime")
    for name in ("policy", "same", "more", "unknown"):
        assert key not in violations(config, changes(folders, folders[name])), name
    for name, told in {
        "renumbered": f"the token 'a' has the id 1 in {folders['policy']} and the id 2 in {folders['renumbered']}",
        "fewer": f"the token 'c' has the id 3 in {folders['policy']} and none in {folders['fewer']}",
    }.items():
        found = violations(config, changes(folders, folders[name]))[key]
        assert told in found and f"{key}={folders[name]}: reads the tokens of {MODEL}.path with another" in found


def test_models_that_nobody_reads_are_not_compared(main, folders):
    other = {"actor_rollout_ref.ref.model": {"path": folders["renumbered"]}}
    assert REFERENCE in violations(main, other) and REFERENCE not in violations(main, other, use_reference=False)
    texts = scored(folders, path=folders["renumbered"], input_tokenizer=folders["policy"])
    assert f"{REWARD}.path" not in violations(main, texts)  # the reward model reads text


def test_the_tokenizer_of_the_policy_may_have_tokens_that_its_folder_lacks(main, folders):
    key = f"{MODEL}.tokenizer_path"
    assert key not in violations(main, {key: folders["more"]})
    assert "is not the tokenizer of actor_rollout_ref.model.path: the token 'b'" in violations(
        main, {key: folders["renumbered"]}
    )[key]  # fmt: skip
    assert "none in" in violations(main, {key: folders["more"]})[CRITIC]  # which has no such token


def test_supervised_training(folders, small_run, tmp_path):
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        rows = next(each.split("=")[1] for each in small_run if each.startswith("data.train_files="))
        paths = [f"model.path={folders['policy']}", f"data.train_files={rows}", "trainer.logger=[console]"]
        for name, is_right in (("same", True), ("more", True), ("renumbered", False)):
            tree = compose("sft_trainer_engine", [*paths, f"model.tokenizer_path={folders[name]}"])
            try:
                parse_sft_config(tree, 1)
                told = ""
            except ConfigError as error:
                told = str(error)
            assert ("model.tokenizer_path is not its tokenizer: the token 'b'" in told) is not is_right, told
