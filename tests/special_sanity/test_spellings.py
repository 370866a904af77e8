"""Every launch script composes the same configuration in the spelling of later versions."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.special_sanity.test_examples import CONFIG_OF_MODULE, LAUNCHERS, ROOT, commands_of_script
from verl.trainer.config.cli import prepare_arguments

ROLLOUT = "actor_rollout_ref.rollout"
SPELLINGS = {
    r"custom_reward_function\.": "reward.custom_reward_function.",
    r"reward_model\.reward_manager=": "reward.reward_manager.name=",
    r"reward_model\.sandbox_fusion\.": "reward.sandbox_fusion.",
    r"reward_model\.model\.path=": "reward.reward_model.model_path=",
    r"reward_model\.(enable|enable_resource_pool|n_gpus_per_node|nnodes)=": r"reward.reward_model.\1=",
    r"actor_rollout_ref\.rollout\.update_weights_bucket_megabytes=": (
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes="
    ),
    r"actor_rollout_ref\.rollout\.multi_turn\.tool_config_path=": "data.tool_config_path=",
    r"actor_rollout_ref\.rollout\.skip_rollout=": "skip.rollout.enable=",
    r"actor_rollout_ref\.rollout\.skip_dump_dir=": "skip.rollout.dump_dir=",
    r"(actor_rollout_ref\.model|critic\.model|model)\.lora_(rank|alpha)=": r"\1.lora.\2=",
    r"(actor_rollout_ref\.model|critic\.model|model)\.target_modules=": r"\1.lora.target_modules=",
    r"critic\.model\.fsdp_config\.": "critic.fsdp.",
    r"(actor_rollout_ref\.\w+|critic)\.megatron\.use_mbridge=": r"\1.megatron.vanilla_mbridge=",
}
"""Key of ours -> its spelling in later versions."""
ADDED = (
    "trainer.use_v1=true",
    "transfer_queue.enable=true",
    f"{ROLLOUT}.checkpoint_engine.backend=naive",
    "ray_kwargs.ray_init.runtime_env.py_executable=python",
)
"""What scripts of later versions set beside their own keys."""


def in_later_spelling(overrides: list[str]) -> list[str]:
    changed = []
    for line in overrides:
        for ours, theirs in SPELLINGS.items():
            line = re.sub(rf"^(\W*){ours}", lambda found, theirs=theirs: found[1] + found.expand(_moved(theirs)), line)
        changed.append(line)
    return changed


def _moved(template: str) -> str:
    """Return a template whose groups are counted after one more."""
    return re.sub(r"\\(\d)", lambda found: rf"\{int(found[1]) + 1}", template)


@pytest.mark.full
@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_launch_is_the_same_in_both_spellings(script: Path, tmp_path: Path) -> None:
    for words in commands_of_script(script, tmp_path, []):
        module = next((word for word in words if word in CONFIG_OF_MODULE), None)
        if module is None:
            continue
        given = [word for word in words[words.index(module) + 1 :] if word != "--check"]
        ours = composed(module, given)
        overrides = [word for word in given if not word.startswith("--")]
        flags = [word for word in given if word.startswith("--")]
        trains = "actor_rollout_ref" in ours and "trainer" in ours
        if trains:
            strategy = ours["actor_rollout_ref"]["actor"]["strategy"]
            overrides.append(f"model_engine={'megatron' if strategy == 'megatron' else 'dp'}")
            flags = [flag for flag in flags if flag != "--config-name=ppo_megatron_trainer"]
        theirs = composed(module, [*flags, *in_later_spelling(overrides), *(ADDED if trains else ())])
        if trains:
            theirs["ray_kwargs"]["ray_init"].pop("runtime_env")
            ours["ray_kwargs"]["ray_init"].pop("runtime_env", None)
        assert theirs == ours


def composed(module: str, given: list[str]) -> dict[str, Any]:
    """Return the tree that a command composes."""
    folder = str(ROOT.joinpath(*module.split(".")[:-1], "config"))
    arguments = prepare_arguments(given, CONFIG_OF_MODULE[module], folder)
    split = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    flags = {split[at]: split[at + 1] for at, word in enumerate(split) if word.startswith("--config-")}
    overrides = [
        word
        for at, word in enumerate(split)
        if not word.startswith("--config-") and not (at and split[at - 1].startswith("--config-"))
    ]
    with initialize_config_dir(flags.get("--config-path", folder), version_base=None):
        name = flags.get("--config-name", CONFIG_OF_MODULE[module])
        tree: Any = OmegaConf.to_container(compose(name, overrides), resolve=False)
    return tree
