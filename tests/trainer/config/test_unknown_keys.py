"""An unknown key in any node of any command is refused, or told where code of the user may read it."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError, omega_conf_to_dataclass, parse_node
from verl.trainer import preflight
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.generation_server import parse_generation_server
from verl.trainer.config.keys import dotted_keys, is_free, is_under, select
from verl.trainer.config.overrides import prepare_arguments
from verl.trainer.config.run_config import RayConfig
from verl.trainer.config.sft import parse_sft_config
from verl.trainer.config.unread_keys import tell_unread_keys
from verl.trainer.config.validation import examined_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = {
    path.stem: str(path.parent)
    for path in sorted(ROOT.glob("recipe/*/config/*.yaml"))
    if path.stem.endswith("_trainer")
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
BY_FILE, BY_OVERRIDE = "unread_in_file", "unread_in_override"


@cache
def all_nodes(name: str) -> tuple[list[str], list[str]]:
    """Return the nodes of a tree, and those that take free keys, but none below another one of these."""
    with hydra.initialize_config_dir(TREES[name], version_base=None):
        tree: Any = OmegaConf.to_container(hydra.compose(name), resolve=False)
    keys = dotted_keys(tree)
    free = [key for key in keys if is_free(key, keys)]
    top = [key for key in free if not is_under(key.rpartition(".")[0], free)]
    return ["", *(key for key in keys if isinstance(select(tree, key), dict) and key not in free)], top


def nodes_of(name: str) -> list[str]:
    """Return the top and every node of a tree, but not those that take free keys."""
    return all_nodes(name)[0]


def at(node: str, key: str = UNKNOWN) -> str:
    return f"{node}.{key}" if node else key


def own_file(folder: Path, name: str, content: dict[str, Any]) -> list[str]:
    """Write a file of the user on top of one of a command, and return the flags that choose it."""
    text = Path(TREES[name], f"{name}.yaml").read_text(encoding="utf-8")
    package = Path(TREES[name]).parent.name
    text = re.sub(r"(: |pkg://)\.\.(?=\w)", rf"\1recipe.{package}.", text)  # names relative to the file
    shipped: Any = OmegaConf.create(text)
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
def without_further_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the like keys, a tenth of a second for each, and the wrong values, for which Hydra composes again."""
    monkeypatch.setattr("verl.trainer.config.unread_keys.similar_keys", lambda key, known: [])
    monkeypatch.setattr("verl.trainer.config.overrides._wrong_types", lambda config_name, overrides: [])


@pytest.mark.parametrize(("name", "own"), [*((name, True) for name in TREES), ("ppo_trainer", False)])
def test_every_node_refuses_a_key_that_nothing_reads(tmp_path: Path, name: str, own: bool) -> None:
    """One key comes from a file of the user, and another from the command line."""
    by_file, keys = ([at(node, key) for node in nodes_of(name)] for key in (BY_FILE, BY_OVERRIDE))
    overrides = [f"{'+' * (i % 2)}{key}=1" for i, key in enumerate(keys)]
    if own:
        overrides += own_file(tmp_path, name, nested(by_file))
    assert set(refused(overrides, name)) == {*keys, *(by_file if own else ())}


SHARED = "actor_rollout_ref"
REFUSED, TOLD, LATER = "refused", "told to have no effect", "answered after the checks of the configuration"
FREE = {
    "wrap_policy": (REFUSED, "unknown key: write one of min_num_params"),
    "override_ddp_config": (REFUSED, "is no field of megatron-core's DistributedDataParallelConfig"),
    "override_transformer_config": (REFUSED, "is no field of megatron-core's TransformerConfig"),
    "override_optimizer_config": (REFUSED, "is no field of megatron-core's OptimizerConfig"),
    "override_config": (REFUSED, "names unread_"),
    f"{SHARED}.ref.model": (REFUSED, "there is no such key"),
    f"{SHARED}.rollout.engine_kwargs": (REFUSED, "is no engine with arguments: write vllm or sglang"),
    f"{SHARED}.rollout.engine_kwargs.vllm": (REFUSED, "is no argument of vLLM; the nearest"),
    f"{SHARED}.rollout.engine_kwargs.sglang": (TOLD, "engine_kwargs.sglang"),
    f"{SHARED}.rollout.server": (REFUSED, "there is no such key"),
    "reward_model.reward_kwargs": (REFUSED, "is not taken by the reward manager 'naive'"),
    "custom_reward_function.reward_kwargs": (TOLD, "custom_reward_function.reward_kwargs"),
    "global_profiler.global_tool_config": (REFUSED, "there is no such tool"),
    "data.apply_chat_template_kwargs": (LATER, "by the chat template: trainer/preflight.py"),
    "reward_model.overlong_buffer": (REFUSED, "there is no such key"),
    "algorithm.filter_groups": (REFUSED, "there is no such key"),
    "ray_kwargs.ray_init": (REFUSED, "is no argument of ray.init; the nearest"),
}
"""Node that takes free keys, or its last name -> what becomes of a key there that nothing reads."""


def answer(node: str) -> tuple[str, str]:
    return FREE[node] if node in FREE else FREE[node.rpartition(".")[2]]


SMALL = {
    "prime_trainer": ["reward_model.micro_batch_size_per_gpu=2", "data.oversample_factor=2.0"],
    "sft_trainer": ["data.train_files={file}", "data.val_files={file}", "model.partial_pretrain={model}"],
    "sft_trainer_engine": ["data.train_files={file}", "data.val_files={file}", "model.path={model}"],
    "generation": ["data.path={file}", "data.output_path=out", "model.path={model}", "rollout.name=vllm"],
    "generation_server": ["data.train_files={file}", "data.output_path=out"],
    "evaluation": ["data.path={file}"],
}
"""What a small run of a command needs, beyond that of the main trainer where ``PARSERS`` has no other."""


def check_evaluation(config: Any) -> None:
    wrong = parse_node(OmegaConf.to_container(config.ray_kwargs), RayConfig, "ray_kwargs")[1]
    if wrong:
        raise ConfigError(wrong)


PARSERS: dict[str, Callable[[Any], object]] = {
    "sft_trainer": parse_sft_config,
    "sft_trainer_engine": parse_sft_config,
    "generation": GenerationConfig.parse,
    "generation_server": parse_generation_server,
    "evaluation": check_evaluation,
}
SHARED_BY_GENERATION = [f"{SHARED}.model.path={{model}}", f"{SHARED}.rollout.name=vllm"]
SHARED_BY_GENERATION += [f"{SHARED}.rollout.tensor_model_parallel_size=1"]


def switch_roles(config: Any, is_on: bool) -> None:
    """Switch the roles that the small run does not have."""
    for key in ("actor_rollout_ref.actor.use_kl_loss", "reward_model.enable"):
        OmegaConf.update(config, key, is_on)


def found_and_told(check: Callable[[], object], caplog: pytest.LogCaptureFixture) -> tuple[dict[str, str], str]:
    """Return what a check refuses, and what it tells."""
    caplog.clear()
    found: dict[str, str] = {}
    try:
        check()
    except ConfigError as error:
        found = {violation.key: violation.expected for violation in error.violations}
    return found, " ".join(text for text in caplog.messages if text.startswith("without effect in this run: "))


def tells(notice: str, node: str, keys: tuple[str, ...] = (UNKNOWN,)) -> bool:
    """Whether a notice names the keys, or the whole node with them."""
    return all(f" {at(node, key)}=1" in notice for key in keys) or f" {node}={dict.fromkeys(keys, 1)}" in notice


NAMED_BY = {
    "model.fsdp_config.wrap_policy": "engine.wrap_policy",
    "custom_reward_function.reward_kwargs": "custom_reward_function.name",
}
"""Node -> the key by which a refusal names it, if it has another one."""


def refusal(found: dict[str, str], node: str, key: str) -> str:
    """Return what a check refuses of a key in a node, or of the node with the key's name; empty if it takes it."""
    place = NAMED_BY.get(node, node)
    of_node = found.get(place, "")
    return found.get(at(place, key)) or (of_node if key in of_node else "")


def composed_with(file: list[str], overrides: list[str], name: str) -> Any:
    """Compose what a command reads from a file of the user, as ``own_file`` names it, and from overrides."""
    accepted = [word for word in prepare_arguments([*file, *overrides], name, TREES[name]) if "=" in word]
    with hydra.initialize_config_dir(file[1], version_base=None):
        config = hydra.compose(file[3], accepted)
    OmegaConf.set_struct(config, False)
    return config


@pytest.mark.parametrize("name", TREES)
def test_every_free_node_answers_a_key_that_nothing_reads(
    tmp_path: Path, small_run: list[str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One key comes from a file of the user, and another from the command line; also in nodes of absent roles."""
    is_ppo = name.startswith("ppo_")
    engines = ("", ".vllm", ".sglang") if is_ppo else ("",)
    free = [f"{node}{each}" for node in all_nodes(name)[1] for each in (engines if "engine_kw" in node else ("",))]
    words = [*SMALL.get(name, []), *(SHARED_BY_GENERATION if name == "generation_server" else [])]
    files = {each.partition("=")[0].rpartition(".")[2]: each.partition("=")[2] for each in small_run}
    words = [each.format(file=files["train_files"], model=files["path"]) for each in words]
    words += [] if name in PARSERS else small_run
    file = own_file(tmp_path, name, nested([at(node, BY_FILE) for node in free]))
    config = composed_with(file, [*words, *(f"{at(node, BY_OVERRIDE)}=1" for node in free)], name)
    nodes = () if is_ppo else ("algorithm.filter_groups",)
    parse = PARSERS.get(name, lambda config: examined_config(config, recipe_nodes=nodes).checked())
    left = [(node, key) for node in free if answer(node)[0] is not LATER for key in (BY_FILE, BY_OVERRIDE)]
    texts: dict[tuple[str, str], str] = {}

    def without_refused() -> tuple[dict[str, str], str]:
        """Remove the keys that are refused until none is; return what else is refused, and what is told."""
        while True:
            found, told = found_and_told(lambda: parse(config), caplog)
            refused_here = {pair: text for pair in left if (text := refusal(found, *pair))}
            if not refused_here:
                return found, told
            texts.update(refused_here)
            for node, key in refused_here:
                del OmegaConf.select(config, node)[key]
                left.remove((node, key))

    if is_ppo:
        switch_roles(config, True)
        without_refused()
        assert {pair: text for pair, text in texts.items() if answer(pair[0])[1] not in text} == {}
        assert {node for node, _ in left} == {node for node in free if answer(node)[0] is TOLD}
        switch_roles(config, False)
    found, told = without_refused()
    assert found == {}
    kept = {node: tuple(key for each, key in left if each == node) for node, _ in left}
    assert [node for node, keys in kept.items() if not tells(told, node, keys)] == []


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_free_nodes_of_roles_that_a_run_does_not_have_are_told(
    composed: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config = composed("algorithm.adv_estimator=grpo", name=name)
    assert found_and_told(lambda: examined_config(config).checked(), caplog) == ({}, "")
    roles = ("critic", f"{SHARED}.ref", "reward_model.m")
    free = [node for node in all_nodes(name)[1] if node.startswith(roles) and "ref.model" not in node]
    refused = (
        []
        if "megatron" in name
        else [f"{SHARED}.ref.fsdp_config.wrap_policy", "reward_model.model.fsdp_config.wrap_policy"]
    )
    told = [node for node in free if node not in refused]
    for node in told:
        OmegaConf.update(config, at(node), 1, force_add=True)
    found, notice = found_and_told(lambda: examined_config(config).checked(), caplog)
    assert told and found == {}
    assert [node for node in told if not tells(notice, node)] == []


@pytest.mark.parametrize("name", ["ppo_trainer", "generation_server"])
def test_options_of_tools_that_do_not_exist_are_refused(composed: Any, small_run: list[str], name: str) -> None:
    """Also below the node of a tool."""
    files = {each.partition("=")[0].rpartition(".")[2]: each.partition("=")[2] for each in small_run}
    words = [each.format(model=files["path"]) for each in SHARED_BY_GENERATION]
    words += [each.format(file=files["train_files"]) for each in SMALL["generation_server"]]
    config = composed(*(words if name in PARSERS else ()), name=name, base=name not in PARSERS)
    OmegaConf.set_struct(config, False)
    node = "global_profiler.global_tool_config"
    keys = [at(node), *(at(f"{node}.{tool}") for tool in ("nsys", "torch_memory"))]
    for key in keys:
        OmegaConf.update(config, key, 1, force_add=True)
    with pytest.raises(ConfigError) as info:
        PARSERS.get(name, lambda config: examined_config(config).checked())(config)
    assert {violation.key for violation in info.value.violations} == set(keys)


def test_a_reward_model_that_is_off_tells_its_free_nodes(composed: Any, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [f"reward_model.{name}" for name in ("engine_kwargs", "data_processor_config", "sampling_config")]
    config = composed()
    for node in nodes:
        OmegaConf.update(config, at(node), 1, force_add=True)
    examined_config(config).checked()
    assert [node for node in nodes if f"{node}=" not in caplog.text] == []


def test_a_changed_reference_needs_its_path_and_its_fields(composed: Any, small_run: list[str]) -> None:
    changes = ["actor_rollout_ref.actor.use_kl_loss=true", "+actor_rollout_ref.ref.model.override_config.unread_key=1"]
    with pytest.raises(ConfigError, match="is read only together with actor_rollout_ref.ref.model.path"):
        examined_config(composed(*changes)).checked()
    path = next(each.partition("=")[2] for each in small_run if each.startswith("actor_rollout_ref.model.path"))
    with pytest.raises(ConfigError, match="ref.model.override_config.*names unread_key, which the model does not read"):
        examined_config(composed(*changes, f"+actor_rollout_ref.ref.model.path={path}")).checked()


def test_unread_options_of_experts_are_refused(composed: Any) -> None:
    config = composed("+actor_rollout_ref.model.override_config.moe_config.freeze_moe_ruter=true")
    with pytest.raises(ConfigError, match="names moe_config.freeze_moe_ruter, which nothing reads"):
        examined_config(config).checked()


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


def test_the_remedy_of_options_of_profilers_is_accepted(composed: Any) -> None:
    told = refused(["global_profiler.tool_config.npu.level=level0", "+global_profiler.tool_config.torch.step_start=0"])
    role, run = "actor_rollout_ref.actor.profiler.tool_config", "global_profiler.global_tool_config"
    assert told and all(role in text and run in text for text in told.values())
    places = {"npu": role, "torch": role, "nsys": run, "torch_memory": run}
    words = [f"{places[tool]}.{tool}={{}}" for tool in places] + [f"{role}.npu.level=level0"]
    assert refused(words) == {}
    examined_config(composed(*(f"++{word}" for word in words))).checked()


@pytest.mark.parametrize("cap", [2.0, -1])
def test_the_node_of_the_actor_names_what_replaced_the_cap(composed: Any, cap: float) -> None:
    """Also where only the worker reads the node, as in a fork. The command takes the value that meant off."""
    key = "actor_rollout_ref.actor.tis_imp_ratio_cap"
    assert (refused([f"{key}={cap}"]) == {}) == (cap == -1)
    assert prepare_arguments([f"+{key}=-1"], "ppo_trainer", CONFIG_DIR) == []
    config = composed(f"+actor_rollout_ref.actor.tis_imp_ratio_cap={cap}")
    with pytest.raises(
        ConfigError, match=r"leave it out if it is -1, which meant off; else write algorithm\.rollout_is"
    ):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


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
        examined_config(config).checked()
    assert set(REPLACED) <= {violation.key for violation in info.value.violations}


@pytest.mark.parametrize("of_fork", [False, True])
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_a_tree_that_no_command_has_read_is_told_of_unknown_keys(
    composed: Any, caplog: pytest.LogCaptureFixture, name: str, of_fork: bool
) -> None:
    """Its nodes of a dataclass refuse them, unless code of the user reads the whole tree."""
    left = nodes_of(name)

    def refused() -> list[str]:
        config = composed(name=name)
        for node in left:
            OmegaConf.update(config, at(node), 1, force_add=True)
        try:
            examined_config(config, of_fork=of_fork).checked()
        except ConfigError as error:
            keys = {violation.key for violation in error.violations}
            return [node for node in left if keys & {node, at(node)}]
        tell_unread_keys(config, "ppo_trainer")
        return []

    while found := refused():
        left = [node for node in left if node not in found]
    (notice,) = [text for text in caplog.messages if "your code may" in text]
    assert [node for node in left if f" {at(node)}=1" not in notice] == []
    assert {"", "data", "trainer", "ray_kwargs"} <= set(left)
    assert ("actor_rollout_ref.actor" in left) == of_fork


def test_the_launching_process_tells_them(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(preflight, "tell_unread_keys", lambda config, name: told.append(name))
    monkeypatch.setattr(preflight, "check_backends", lambda names: None)
    with pytest.raises(ValueError, match="cannot be read as parquet"):  # the file of the small run holds no rows
        preflight.check_inputs(composed(), of_fork=True)
    assert told == ["ppo_trainer"]


def test_a_tree_of_the_shipped_file_is_told_nothing(composed: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        tell_unread_keys(composed(name=name), "ppo_trainer")
    assert "your code may" not in caplog.text


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
