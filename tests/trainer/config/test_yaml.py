"""The YAML files: style, generated copy, composition, and equality with the dataclasses."""

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from verl.trainer.config import AlgoConfig
from verl.trainer.config.keys import dotted_keys, select
from verl.trainer.config.run_config import RunConfig, default_of
from verl.trainer.config.sft import DataOptions, TrainerOptions
from verl.utils.config import omega_conf_to_dataclass

ROOT = Path(__file__).resolve().parents[3]
CONFIG_DIR = ROOT / "verl" / "trainer" / "config"


def test_style():
    command = [sys.executable, "scripts/check_yaml_style.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n", "1: no comment above the key 'a'"),
        ("# one\na: 1\n# two\nb: 2\n", "4: no blank line before the comment of 'b'"),
        ("# one\na: 1  # more\n", "2: inline comment"),
        ("# one\na:\n\n  b: '#1'\n", "4: no comment above the key 'b'"),
        ("# one\na:\n\n# two\n  b: 1\n", "4: the comment does not begin in the column of its key 'b'"),
        ("  # one\na: 1\n", "1: the comment does not begin in the column of its key 'a'"),
        ("# one\na: [1\n", "3: no YAML: "),
        ("a text\n", "1: no keys"),
        ("", "1: no keys"),
    ],
)
def test_style_check_sees(tmp_path, text, problem):
    (tmp_path / "x.yaml").write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "check_yaml_style.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and f"x.yaml:{problem}" in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_style_check_names_a_file_that_does_not_exist(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "check_yaml_style.py"), str(tmp_path / "x.yaml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "x.yaml: no such file or folder" in result.stdout


TRAINERS = ("ppo_trainer", "ppo_megatron_trainer")


@pytest.mark.parametrize("name", TRAINERS)
def test_the_generated_copy_is_fresh(composed, name):
    text = (CONFIG_DIR / f"_generated_{name}.yaml").read_text()
    tree = OmegaConf.to_container(composed(name=name, base=False), resolve=False)
    assert yaml.safe_load(text) == tree, "run bash scripts/generate_trainer_config.sh"


def test_roles_of_one_process_have_one_timeout(composed):
    config = composed("actor_rollout_ref.nccl_timeout=33")
    assert config.critic.nccl_timeout == config.reward_model.nccl_timeout == 33
    assert omega_conf_to_dataclass(config.critic).nccl_timeout == 33


def _target_nodes(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            if "_target_" in value:
                yield f"{prefix}{name}", value
            yield from _target_nodes(value, f"{prefix}{name}.")


# What a role writes over the defaults of a class that it shares with others.
PER_ROLE = {
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "critic.optim.lr": 1e-5,
    "reward_model.megatron.use_distributed_optimizer": False,
    "global_profiler.save_path": "outputs/profile",
    "rollout.name": "vllm",
    "rollout.top_k": 50,
    "rollout.top_p": 0.7,
    "rollout.prompt_length": 1536,
    "rollout.enforce_eager": True,
    "rollout.load_format": "auto",
    "rollout.tensor_model_parallel_size": 1,
    "rollout.log_prob_micro_batch_size_per_gpu": 8,
}
# What ppo_megatron_trainer spells out of mappings that are empty by default.
SPELLED_OUT = ("layer_name_map", "override_config")
# The class leaves experts to Megatron-Core, which cuts them as the layers around them; the files keep them whole.
OF_FILES = {"expert_tensor_parallel_size": 1}


@pytest.mark.parametrize("name", [*TRAINERS, "sft_trainer_engine", "generation"])
def test_yaml_and_dataclasses_have_the_same_defaults(composed, name):
    """Interpolations count as what they resolve to in an empty tree: the default that they name."""
    raw = OmegaConf.to_container(composed(name=name, base=False), resolve=False)
    resolved = OmegaConf.to_container(composed(name=name, base=False), resolve=True)
    seen = 0
    for path, node in _target_nodes(raw):
        cls = get_class(node["_target_"])
        known = {field.name: field for field in fields(cls)}
        for key, value in node.items():
            dotted = f"{path}.{key}"
            if key == "_target_" or (isinstance(value, dict) and "_target_" in str(value)):
                continue
            if name == "ppo_megatron_trainer" and key in SPELLED_OUT:
                continue
            field = known[key]
            default = field.default if field.default is not MISSING else field.default_factory()
            value = select(resolved, dotted)
            if name in TRAINERS and isinstance(node[key], str) and "${" in node[key]:
                continue  # follows another key; that one is compared
            expected = PER_ROLE.get(dotted, OF_FILES.get(key, list(default) if isinstance(default, tuple) else default))
            if dotted.startswith("global_profiler") and expected is None:
                continue
            assert value == expected, dotted
            seen += 1
    assert seen > {"ppo_trainer": 150, "ppo_megatron_trainer": 150, "sft_trainer_engine": 40, "generation": 20}[name]


PLAIN_NODES = (
    "data",
    "trainer",
    "custom_reward_function",
    "ray_kwargs",
    "reward_model.scoring",
    "reward_model.sandbox_fusion",
    "reward_model.local_sandbox",
    "actor_rollout_ref.ref",
)


@pytest.mark.parametrize("name", TRAINERS)
def test_nodes_without_a_target_have_the_defaults_of_their_dataclasses(composed, name):
    config = composed("actor_rollout_ref.rollout.name=vllm", name=name, base=False)
    run = RunConfig.parse(config)
    raw = OmegaConf.to_container(config, resolve=False)
    seen = 0
    for node in PLAIN_NODES:
        for key in dotted_keys(select(raw, node), f"{node}."):
            value = select(raw, key)
            if isinstance(value, dict) or "_target_" in select(raw, key.rpartition(".")[0]) or ".profiler." in key:
                continue
            if key.startswith(("ray_kwargs.ray_init.", "actor_rollout_ref.ref.megatron.")) or "${" in str(value):
                continue
            if key.endswith("wrap_policy.min_num_params") or key == "actor_rollout_ref.ref.strategy":
                continue
            assert default_of(run, key) == value, key
            seen += 1
    assert seen > 70


@pytest.mark.parametrize("group", ["engine", "optim"])
def test_groups_of_megatron_have_the_defaults_of_their_dataclasses(composed, group):
    written = OmegaConf.to_container(composed(f"{group}=megatron", name="sft_trainer_engine", base=False)[group])
    for field in fields(get_class(written.pop("_target_"))):
        if field.name not in ("_target_", "grad_clip"):
            default = field.default if field.default is not MISSING else field.default_factory()
            expected = OF_FILES.get(field.name, list(default) if isinstance(default, tuple) else default)
            assert written.pop(field.name) == expected, field.name
    assert written == {}


def alone(group, name, *overrides):
    with initialize_config_dir(config_dir=str(CONFIG_DIR / group), version_base=None):
        return compose(config_name=name, overrides=list(overrides))


@pytest.mark.parametrize(
    ("group", "name"),
    [("actor", "dp_actor"), ("actor", "megatron_actor"), ("critic", "dp_critic"), ("critic", "megatron_critic")],
)
def test_the_node_of_a_role_can_be_built_from_its_own_file(group, name):
    config = alone(group, name, "ppo_micro_batch_size_per_gpu=1", "ppo_mini_batch_size=8", "+profiler.discrete=null")
    node = omega_conf_to_dataclass(config)
    OmegaConf.set_struct(config, False)
    cls = get_class(config.pop("_target_"))
    assert type(node) is cls and node.ppo_mini_batch_size == 8 and node.optim.lr > 0
    assert node.profiler.tool_config["nsys"].discrete is None and not node.profiler.enable
    same = omega_conf_to_dataclass(config, dataclass_type=cls)
    assert type(same) is cls and same.optim.lr == node.optim.lr and same.engine.strategy == node.engine.strategy


@pytest.mark.parametrize(("node", "cls"), [("data", DataOptions), ("trainer", TrainerOptions)])
def test_nodes_of_supervised_runs_have_the_defaults_of_their_dataclasses(composed, node, cls):
    written = composed(name="sft_trainer_engine", base=False)[node]
    absent = ("_target_", "micro_batch_size", "chat_template", "train_max_samples", "val_max_samples")
    assert all(written[key] == default for key, default in cls().items() if key not in absent)


@pytest.mark.parametrize("name", TRAINERS)
def test_every_node_can_be_built(composed, name):
    config = composed(name=name)
    for path, _ in _target_nodes(OmegaConf.to_container(config, resolve=False)):
        node = OmegaConf.select(config, path)
        assert type(omega_conf_to_dataclass(node)).__name__ == node._target_.rsplit(".", 1)[-1]


def test_interpolations_follow_their_source(composed):
    config = composed("trainer.seed=9", "actor_rollout_ref.model.use_remove_padding=true", "data.max_response_length=8")
    assert config.actor_rollout_ref.rollout.seed == 9
    assert config.actor_rollout_ref.rollout.response_length == 8
    assert config.actor_rollout_ref.actor.use_remove_padding is True
    assert config.critic.ppo_mini_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.critic.forward_micro_batch_size_per_gpu == 2
    assert list(config.critic.checkpoint.load_contents) == ["model", "optimizer", "extra"]
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


# Overrides of published commands beyond the keys in the YAML, as they spell them: with a leading plus.
PUBLISHED = {
    "reward_model.reward_kwargs.max_resp_len=${data.max_response_length}": 16,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True": True,
    "reward_model.reward_kwargs.metric_weights.accuracy=1": 1,
    "custom_reward_function.reward_kwargs={a: 1}": {"a": 1},
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16": "bf16",
    "actor_rollout_ref.model.override_config.attention_dropout=0.": 0.0,
    "critic.model.override_config.rope_scaling.type=yarn": "yarn",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True": True,
    "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton": "triton",
    "trainer.wandb_proxy=http://proxy": "http://proxy",
    "trainer.tensorboard_dir=logs": "logs",
    "data.gen_batch_size=24": 24,
    "algorithm.filter_groups.enable=true": True,
    "reward_model.overlong_buffer.len=4": 4,
    "ray_kwargs.ray_init.runtime_env.env_vars.A=b": "b",
}


def test_published_overrides_compose(composed):
    config = composed(*(f"+{override}" for override in PUBLISHED))
    for override, value in PUBLISHED.items():
        assert OmegaConf.select(config, override.split("=")[0]) == value


def test_a_recipe_of_the_users_own_composes_from_the_repository_root(tmp_path, monkeypatch):
    recipe = {
        "hydra": {"searchpath": ["file://verl/trainer/config"]},
        "defaults": ["ppo_trainer", "_self_"],
        "data": {"gen_batch_size": "${data.train_batch_size}"},
        "algorithm": {
            "filter_groups": {"_target_": "verl.trainer.config.FilterGroupsConfig", "enable": True, "metric": "acc"}
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(ROOT)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("recipe")
    assert config.data.gen_batch_size == 1024
    built = omega_conf_to_dataclass(config.algorithm)
    assert isinstance(built, AlgoConfig) and built.filter_groups.enable is True
