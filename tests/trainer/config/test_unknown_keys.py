"""An unknown key in any node of any command is refused, or told where code of the user may read it."""

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.config.cli import CONFIG_DIR, prepare_arguments
from verl.trainer.config.keys import dotted_keys, is_free, select
from verl.trainer.config.validation import checked_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = {
    path.stem: str(path.parent)
    for path in sorted(ROOT.glob("recipe/*/config/*.yaml"))
    if path.stem.endswith(("_trainer", "_evaluation"))
}
TREES = {
    "ppo_trainer": CONFIG_DIR,
    "ppo_megatron_trainer": CONFIG_DIR,
    "sft_trainer": CONFIG_DIR,
    "sft_trainer_engine": CONFIG_DIR,
    "generation": CONFIG_DIR,
    "generation_server": CONFIG_DIR,
    "evaluation": CONFIG_DIR,
    **RECIPES,
}
UNKNOWN = "unread_key"


def nodes_of(name: str) -> list[str]:
    """Return the top and every node of a tree, but not those that take free keys."""
    with hydra.initialize_config_dir(TREES[name], version_base=None):
        tree: Any = OmegaConf.to_container(hydra.compose(name), resolve=False)
    keys = dotted_keys(tree)
    return ["", *(key for key in keys if isinstance(select(tree, key), dict) and not is_free(key, keys))]


def at(node: str) -> str:
    return f"{node}.{UNKNOWN}" if node else UNKNOWN


def own_file(folder: Path, name: str, content: dict[str, Any]) -> list[str]:
    """Write a file of the user on top of one of a command, and return the flags that choose it."""
    shipped = OmegaConf.load(Path(TREES[name], f"{name}.yaml"))
    if "hydra" not in shipped:  # which only the first file may have: a file with it is copied
        shipped = OmegaConf.create({"defaults": [name, "_self_"]})
    head = {"hydra": {"searchpath": [f"file://{TREES[name]}", "pkg://verl.trainer.config"]}}
    OmegaConf.save(OmegaConf.merge(shipped, head, content), folder / "mine.yaml")
    return ["--config-path", str(folder), "--config-name", "mine"]


def nested(keys: list[str], value: Any = 1) -> dict[str, Any]:
    tree: Any = OmegaConf.create({})
    for key in keys:
        OmegaConf.update(tree, key, value, force_add=True)
    content: dict[str, Any] = OmegaConf.to_container(tree)
    return content


def refused(arguments: list[str], name: str = "ppo_trainer", is_own: bool = False) -> dict[str, str]:
    try:
        prepare_arguments(arguments, name, TREES[name], is_own)
    except ConfigError as error:
        return {violation.key: violation.expected for violation in error.violations}
    return {}


@pytest.fixture(autouse=True)
def without_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search for like keys, which takes a tenth of a second for each."""
    monkeypatch.setattr("verl.trainer.config.cli.nearest", lambda key, known: [])


@pytest.mark.parametrize("name", TREES)
def test_every_node_refuses_a_key_that_nothing_reads(tmp_path: Path, name: str) -> None:
    keys = [at(node) for node in nodes_of(name)]
    assert set(refused(own_file(tmp_path, name, nested(keys)), name)) == set(keys)
    assert set(refused([f"{'+' * (i % 2)}{key}=1" for i, key in enumerate(keys)], name)) == set(keys)


REPLACED = {
    "trainer.profile_steps": ([1], "global_profiler.steps"),
    "trainer.controller_nsight_options": ({"trace": "cuda"}, "global_tool_config.nsys.controller_nsight_options"),
    "trainer.worker_nsight_options": ({"trace": "cuda"}, "global_tool_config.nsys.worker_nsight_options"),
    "trainer.profile_continuous_steps": (True, "global_profiler.profile_continuous_steps"),
    "trainer.npu_profile": ({"options": {"level": "level1"}}, "actor_rollout_ref.actor.profiler.tool_config.npu"),
    "actor_rollout_ref.profiler": ({"ranks": [0]}, "actor_rollout_ref.actor.profiler"),
    "actor_rollout_ref.actor.profile": ({"step_start": 1}, "actor_rollout_ref.actor.profiler.enable"),
    "actor_rollout_ref.actor.tis_imp_ratio_cap": (2.0, "algorithm.rollout_is_threshold"),
    "global_profiler.tool_config": ({"nsys": {"discrete": True}}, "global_profiler.global_tool_config"),
}


@pytest.mark.parametrize("name", ["ppo_trainer", "prime_trainer", "generation_server"])
def test_replaced_keys_are_told_from_a_file_too(tmp_path: Path, name: str) -> None:
    content: Any = OmegaConf.create({})
    for key, (value, _) in REPLACED.items():
        OmegaConf.update(content, key, value, force_add=True)
    found = refused(own_file(tmp_path, name, OmegaConf.to_container(content)), name)
    assert set(found) == set(REPLACED)
    assert [key for key, (_, instead) in REPLACED.items() if instead not in found[key]] == []


def test_a_tree_that_no_command_has_read_is_told_of_replaced_keys(composed: Any) -> None:
    config = composed()
    for key, (value, _) in REPLACED.items():
        OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError) as info:
        checked_config(config)
    assert set(REPLACED) <= {violation.key for violation in info.value.violations}


def test_a_group_of_the_user_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "mine.yaml").write_text("defaults: [dp_critic, _self_]\nmodel: {unread_key: 1}\n")
    assert set(refused(["--config-dir", str(tmp_path), "critic@critic=mine"])) == {"critic.model.unread_key"}


def test_a_whole_file_in_a_folder_of_the_user_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {unread_key: 1}\n")
    assert set(refused(["--config-dir", str(tmp_path), "--config-name=mine"])) == {"trainer.unread_key"}


def test_a_key_that_an_interpolation_names_is_read(tmp_path: Path) -> None:
    content = {
        "mine": {"lr": 1e-5, "unread_key": 1, "sizes": {"batch": 8}},
        "actor_rollout_ref": {"actor": {"optim": {"lr": "${mine.lr}"}}},
        "data": {"train_batch_size": "${..mine.sizes.batch}"},
        "global_profiler": {"tool_config": {"torch": {"step_start": 1}}},
        "critic": {
            "profiler": {
                "tool_config": {"torch": {"step_start": "${oc.select:global_profiler.tool_config.torch.step_start}"}}
            }
        },
    }
    assert set(refused(own_file(tmp_path, "ppo_trainer", content))) == {"mine.unread_key"}


OWN_CODE = {
    "data.custom_cls.path": ("data.py", {"data"}),
    "data.sampler.class_path": ("sampler.py", {"data"}),
    "reward_model.reward_manager": ("mine", {"reward_model"}),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": ("loops.yaml", {"data", "reward_model", "trainer", ""}),
    "actor_rollout_ref.model.external_lib": ("json", {"data", "reward_model", "trainer", ""}),
}


@pytest.mark.parametrize(
    ("switch", "by_file"), [*((switch, True) for switch in OWN_CODE), ("data.custom_cls.path", False)]
)
def test_what_code_of_the_user_may_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, switch: str, by_file: bool
) -> None:
    value, read = OWN_CODE[switch]
    keys = [at(node) for node in ("data", "reward_model", "trainer", "")]

    def run(changed: list[str]) -> dict[str, str]:
        if by_file:
            content = OmegaConf.create(nested(changed))
            OmegaConf.update(content, switch, value, force_add=True)
            return refused(own_file(tmp_path, "ppo_trainer", OmegaConf.to_container(content)))
        return refused([*(f"+{key}=1" for key in changed), f"{switch}={value}"])

    mine = [at(node) for node in ("data", "reward_model", "trainer", "") if node in read]
    assert set(run(keys)) == set(keys) - set(mine)
    caplog.clear()
    assert run(mine) == {}
    (notice,) = caplog.messages
    assert all(f"{key}=1" in notice for key in mine)


def test_a_command_of_the_user_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refused(own_file(tmp_path, "ppo_trainer", nested(["trainer.mine"])), is_own=True) == {}
    assert refused(["+trainer.mine=1"], is_own=True) == {}
    assert len(caplog.messages) == 2
    assert "write a + before it" in refused(["trainer.mine=1"], is_own=True)["trainer.mine"]  # as Hydra has it


@pytest.mark.parametrize(
    "file",
    [
        "examples/split_placement/config/ppo_trainer_split.yaml",
        "examples/sglang_multiturn/config/gsm8k_multiturn_megatron_grpo.yaml",
        "recipe/deepeyes/configs/deepeyes_multiturn_grpo.yaml",
    ],
)
def test_files_of_examples_pass(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str) -> None:
    monkeypatch.chdir(ROOT)
    assert refused(["--config-path", str((ROOT / file).parent), "--config-name", Path(file).stem]) == {}
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("sft_trainer_engine", "data.gen_batch_size=8"),
        ("sft_trainer", "trainer.remove_previous_ckpt_in_save=true"),
        ("generation", "trainer.wandb_proxy=p"),
        ("evaluation", "reward_model.strategy=fsdp"),
        ("ppo_trainer", "rollout.seed=1"),
    ],
)
def test_keys_beyond_the_files_are_those_of_the_command(name: str, override: str) -> None:
    assert set(refused([override], name)) == {override.partition("=")[0]}
    assert refused(["data.image_key=pictures"], "sft_trainer") == refused(["rollout.seed=1"], "generation") == {}
