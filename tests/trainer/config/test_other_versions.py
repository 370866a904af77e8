"""Keys of other versions of the established project: translated, accepted, or answered by name."""

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from tests.trainer.config.keys_elsewhere import (
    ACTOR,
    CHECKPOINT_ENGINE,
    CORRECTION,
    KEYS,
    MODEL,
    REF,
    ROLLOUT,
    VALUES,
)
from tests.trainer.config.other_versions_page import PAGE, page
from verl.base_config import ConfigError
from verl.trainer.config.cli import CONFIG_DIR, missing_file
from verl.trainer.config.help_text import keys_help
from verl.trainer.config.keys import select
from verl.trainer.config.other_versions import ROWS, row_of
from verl.trainer.config.overrides import prepare_arguments

ROOT = Path(__file__).resolve().parents[3]
NAME = f"{ROLLOUT}.name=vllm"


def composed(*words: str, name: str = "ppo_trainer", folder: str = CONFIG_DIR, is_own: bool = False) -> DictConfig:
    """Return the configuration of a command line, as Hydra composes it."""
    arguments = [
        *chain.from_iterable(
            word.split("=") if word.startswith("--") else [word]
            for word in prepare_arguments(list(words), name, folder, is_own)
        )
    ]
    flags = [at for at, word in enumerate(arguments) if word.startswith("--config-")]
    chosen = {arguments[at]: arguments[at + 1] for at in flags}
    overrides = [word for at, word in enumerate(arguments) if at not in flags and at - 1 not in flags]
    with hydra.initialize_config_dir(chosen.get("--config-path", folder), version_base=None):
        return hydra.compose(chosen.get("--config-name", name), overrides)


def refusals(*words: str, name: str = "ppo_trainer", is_own: bool = False) -> dict[str, str]:
    with pytest.raises(ConfigError) as info:
        prepare_arguments(list(words), name, CONFIG_DIR, is_own)
    return {each.key: each.expected for each in info.value.violations}


def command_of(key: str) -> str:
    """Return the file of a command that reads a key."""
    return "sft_trainer_engine" if key.split(".")[0] in ("model", "engine", "optim") else "ppo_trainer"


# ---- the table, the page, and the keys


def test_every_key_has_a_row_with_its_decision() -> None:
    for decision, keys in KEYS.items():
        for key in keys:
            row = row_of(key)
            assert row is not None and row.decision == decision, key
    for decision, values in VALUES.items():
        for key, names in values.items():
            for name in names:
                row = row_of(key, name)
                assert row is not None and row.decision == decision, (key, name)


def test_every_row_is_about_a_known_key() -> None:
    values = {(key, name) for each in VALUES.values() for key, names in each.items() for name in names}
    keys = [key for each in KEYS.values() for key in each]
    for row in ROWS:
        of_value = row.only and ((row.key, row.only[0]) in values or row.key.endswith(".lora.merge"))
        known = (
            of_value
            or any(row_of(key) is row for key in keys)
            or row.key.endswith((".router_replay", ".optimizer", ".pack_weights"))
        )
        assert known or not row.roots, row.key


def test_the_page_shows_the_table() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m tests.trainer.config.other_versions_page"


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine"])
def test_no_key_of_ours_is_one_of_another_version(name: str) -> None:
    with hydra.initialize_config_dir(CONFIG_DIR, version_base=None):
        tree: Any = OmegaConf.to_container(hydra.compose(name), resolve=False)

    def keys(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            yield f"{prefix}{key}", value
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")

    rows = {key: row_of(key, value, tree) for key, value in keys(tree)}
    assert [
        key for key, row in rows.items() if row and not row.is_ours and not row.needs_nothing(key, select(tree, key))
    ] == []


# ---- alias: another spelling of our keys


EFFECTS: list[tuple[str, dict[str, Any]]] = [
    ("reward.custom_reward_function.path=a.py", {"custom_reward_function.path": "a.py"}),
    ("reward.custom_reward_function.name=score", {"custom_reward_function.name": "score"}),
    ("reward.custom_reward_function.reward_kwargs={a:1}", {"custom_reward_function.reward_kwargs": {"a": 1}}),
    ("reward.reward_manager.name=dapo", {"reward_model.reward_manager": "dapo"}),
    ("reward.reward_manager={source:register,name:dapo}", {"reward_model.reward_manager": "dapo"}),
    (
        "reward.reward_manager={source:importlib,name:Mine,module:{path:/a/b.py}}",
        {"reward_model.reward_manager": "/a/b.py:Mine"},
    ),
    (
        "reward.reward_manager={source:importlib,module:{path:b.py,name:Mine}}",
        {"reward_model.reward_manager": "b.py:Mine"},
    ),
    ("reward.reward_model.enable=true", {"reward_model.enable": True}),
    (
        "reward.reward_model={enable_resource_pool:true,n_gpus_per_node:2,nnodes:3}",
        {"reward_model.enable_resource_pool": True, "reward_model.n_gpus_per_node": 2, "reward_model.nnodes": 3},
    ),
    ("reward.reward_model.model_path=/judge", {"reward_model.model.path": "/judge"}),
    (
        "reward.reward_model.rollout={name:hf,response_length:64,tensor_model_parallel_size:1}",
        {
            "reward_model.name": "hf",
            "reward_model.response_length": 64,
            "reward_model.tensor_model_parallel_size": 1,
        },
    ),
    ("reward.sandbox_fusion.url=http://a", {"reward_model.sandbox_fusion.url": "http://a"}),
    (
        "sandbox_fusion={max_concurrent:3,memory_limit_mb:9}",
        {
            "reward_model.sandbox_fusion.max_concurrent": 3,
            "reward_model.sandbox_fusion.memory_limit_mb": 9,
        },
    ),
    (
        f"{CORRECTION}.rollout_is=token",
        {
            "algorithm.rollout_is": True,
            "algorithm.rollout_is_level": "token",
            "algorithm.rollout_is_threshold": 2.0,
            "algorithm.rollout_is_veto_threshold": None,
            f"{ROLLOUT}.calculate_log_probs": True,
        },
    ),
    (
        f"{CORRECTION}={{rollout_is:sequence,rollout_is_threshold:5}}",
        {
            "algorithm.rollout_is": True,
            "algorithm.rollout_is_level": "sequence",
            "algorithm.rollout_is_threshold": 5.0,
            "algorithm.rollout_is_mode": "truncate",
            "algorithm.rollout_is_veto_threshold": None,
        },
    ),
    (
        f"{CORRECTION}={{rollout_is:token,rollout_is_threshold:'0.5_2'}}",
        {
            "algorithm.rollout_is_threshold_lower": 0.5,
            "algorithm.rollout_is_threshold": 2.0,
            "algorithm.rollout_is_mode": "mask",
        },
    ),
    (
        f"{CORRECTION}.rollout_is_threshold=0.5_5",
        {
            "algorithm.rollout_is": False,
            "algorithm.rollout_is_threshold_lower": 0.5,
            "algorithm.rollout_is_threshold": 5.0,
        },
    ),
    (f"{CORRECTION}.rollout_is=null", {"algorithm.rollout_is": False, "algorithm.rollout_is_threshold": None}),
    *(
        (
            f"{node}={{enable:true,dump_dir:/kept}}",
            {f"{ROLLOUT}.skip_rollout": True, f"{ROLLOUT}.skip_dump_dir": "/kept"},
        )
        for node in ("skip.rollout", "skip.rollout_tq")
    ),
    (f"{CHECKPOINT_ENGINE}.update_weights_bucket_megabytes=64", {f"{ROLLOUT}.update_weights_bucket_megabytes": 64}),
    (f"{ROLLOUT}.full_determinism=true", {f"{ROLLOUT}.batch_invariant": True}),
    (f"{ROLLOUT}.full_determinism=false", {f"{ROLLOUT}.batch_invariant": None}),
    (f"{ROLLOUT}.scheduling_policy=priority", {f"{ROLLOUT}.engine_kwargs.vllm.scheduling_policy": "priority"}),
    (f"{ROLLOUT}.prometheus.enable=true", {"trainer.prometheus": True}),
    ("critic.fsdp.param_offload=true", {"critic.model.fsdp_config.param_offload": True}),
    (f"{ACTOR}.tau_pos=2.0", {f"{ACTOR}.policy_loss.tau_pos": 2.0}),
    (f"{ACTOR}.tau_neg=3.0", {f"{ACTOR}.policy_loss.tau_neg": 3.0}),
    (f"{ACTOR}.rollout_n=4", {f"{ROLLOUT}.n": 4}),
    ("data.function_tool_path=tools.py", {f"{ROLLOUT}.multi_turn.function_tool_path": "tools.py"}),
    ("data.tool_config_path=tools.yaml", {f"{ROLLOUT}.multi_turn.tool_config_path": "tools.yaml"}),
    (
        "data.mm_processor_kwargs={max_pixels:9}",
        {f"{ROLLOUT}.engine_kwargs.vllm.mm_processor_kwargs": {"max_pixels": 9}},
    ),
    *(
        (f"{node}.lora.{name}={text}", {f"{node}.{ours}": value})
        for node in (MODEL, "critic.model", "model")
        for name, ours, text, value in (
            ("rank", "lora_rank", "8", 8),
            ("alpha", "lora_alpha", "32", 32),
            ("target_modules", "target_modules", "[q_proj]", ["q_proj"]),
            ("exclude_modules", "exclude_modules", "lm_head", "lm_head"),
        )
        if not (node == "critic.model" and name == "exclude_modules")
    ),
    *(
        (f"{node}.optimizer={name}", {f"{node}.optimizer": None})
        for node in (f"{ACTOR}.optim", "critic.optim", "optim")
        for name in ("AdamW", "adamw")
    ),
]


def leaves_of(text: str) -> str:
    return text.partition("=")[0].lstrip("+")


def batches(effects: list[tuple[str, dict[str, Any]]]) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yield groups of effects that can be asked for at once: no two set the same key."""
    left = effects
    while left:
        now: list[tuple[str, dict[str, Any]]] = []
        later = []
        for words, expected in left:
            top = ".".join(leaves_of(words).split(".")[:2])
            clashes = any(
                set(expected) & set(others)
                or top == ".".join(leaves_of(other).split(".")[:2])
                and CORRECTION in words + other
                or leaves_of(words) == leaves_of(other)
                or "reward_manager" in words
                and "reward_manager" in other
                for other, others in now
            )
            (later if clashes else now).append((words, expected))
        yield now
        left = later


@pytest.mark.parametrize("name", ["ppo_trainer", "sft_trainer_engine"])
def test_a_translated_key_has_the_effect_of_ours(name: str, caplog: pytest.LogCaptureFixture) -> None:
    effects = [each for each in EFFECTS if command_of(each[0]) == name]
    needed = [NAME] if name == "ppo_trainer" else []
    for batch in batches(effects):
        caplog.clear()
        written = [f"{'+' * (at % 3)}{words}" for at, (words, _) in enumerate(batch)]
        tree: Any = OmegaConf.to_container(composed(*needed, *written, name=name), resolve=False)
        for words, expected in batch:
            assert {key: select(tree, key) for key in expected} == expected, words
        said = [text for text in caplog.messages if "another version" in text]
        assert len(said) <= 1
        for _, expected in batch:
            changed = [key for key, value in expected.items() if value is not None]
            assert [key for key in changed if key not in said[0]] == []


MEGATRON_EFFECTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"{node}.megatron.vanilla_mbridge=true", {f"{node}.megatron.use_mbridge": True})
        for node in (ACTOR, REF, "critic")
    ),
    (f"{ACTOR}.optim.optimizer=AdamW", {f"{ACTOR}.optim.optimizer": "adam"}),
]


def test_a_translated_key_of_megatron_has_the_effect_of_ours() -> None:
    config = composed("model_engine=megatron", *(words for words, _ in MEGATRON_EFFECTS))
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    for words, expected in MEGATRON_EFFECTS:
        assert {key: OmegaConf.select(config, key) for key in expected} == expected, words


SEPARATE_ASYNC = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async={parameter_sync_step:2,num_warmup_batches:2}",
    "trainer.v1.sampler={max_off_policy_threshold:3,max_off_policy_strategy:wait}",
]

COLOCATE_ASYNC = ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2"]


def test_every_translation_is_tried() -> None:
    tried = [leaves_of(words) for words, _ in [*EFFECTS, *MEGATRON_EFFECTS, *BUILT_EFFECTS]]
    tried += map(leaves_of, [*SEPARATE_ASYNC, *COLOCATE_ASYNC])
    untried = [
        row.key
        for row in ROWS
        if row.to is not None and not any(row.covers(key) or row.key.startswith(f"{key}.") for key in tried)
    ]
    assert untried == ["model_engine"]  # below


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (["model_engine=dp"], "fsdp"),
        (["model_engine=megatron"], "megatron"),
        (["model_engine=megatron", "--config-name=ppo_megatron_trainer"], "megatron"),
        (["model_engine=dp", f"{ACTOR}.strategy=fsdp2"], "fsdp2"),
    ],
)
def test_model_engine_chooses_the_files(words: list[str], strategy: str) -> None:
    assert composed(*words).actor_rollout_ref.actor.strategy == strategy


def test_model_engine_chooses_the_files_of_a_recipe() -> None:
    folder = str(ROOT / "recipe" / "dapo" / "config")
    config = composed("model_engine=megatron", name="dapo_trainer", folder=folder)
    assert config.actor_rollout_ref.actor.strategy == "megatron" and "overlong_buffer" in config.reward_model


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["model_engine=dp", "--config-name=ppo_megatron_trainer"], "contradicts the configuration file"),
        (["model_engine=megatron", "--config-name=ppo_trainer"], "contradicts the configuration file"),
        *(([f"model_engine={name}"], "write dp") for name in ("veomni", "torchtitan", "automodel")),
    ],
)
def test_other_engines_and_contradictions_are_refused(words: list[str], answer: str) -> None:
    assert answer in refusals(*words)["model_engine"]


def test_an_unknown_engine_suggests_no_length() -> None:
    assert "max_model_len" not in str(refusals("model_engine=veomni"))


# ---- accepted: only the value that this version has anyway


ACCEPTED: list[tuple[str, list[str], str | None]] = [
    ("trainer.use_v1", ["true", "false"], "maybe"),
    ("trainer.v1.trainer_mode", ["sync"], "other"),
    ("transfer_queue.enable", ["true", "false"], None),
    ("transfer_queue.backend.storage", ["x"], None),
    *((f"{node}.lora.merge", ["true", "false"], "maybe") for node in (MODEL, "critic.model", "model")),
    (f"{CHECKPOINT_ENGINE}.backend", ["naive", "nccl"], "nixl"),
    (f"{ROLLOUT}.logprobs_mode", ["processed_logprobs"], "raw_logprobs"),
    (f"{ACTOR}.calculate_entropy", ["true", "false"], "1"),
    (f"{ACTOR}.pad_to_length", ["false"], "512"),
    (f"{ACTOR}.checkpoint.strict", ["true"], "false"),
    ("critic.checkpoint.strict", ["true"], "false"),
    ("algorithm.filter_groups.max_inflight_gen_batches", ["1"], "2"),
]


@pytest.mark.parametrize("name", ["ppo_trainer", "sft_trainer_engine"])
def test_an_accepted_key_takes_the_value_of_this_version(name: str) -> None:
    rows = [row for row in ACCEPTED if command_of(row[0]) == name]
    plain = composed(name=name)
    for at in range(2):
        assert composed(*(f"{key}={values[at % len(values)]}" for key, values, _ in rows), name=name) == plain
    others = {key: other for key, _, other in rows if other is not None}
    answers = refusals(*(f"{key}={other}" for key, other in others.items()), name=name)
    assert [key for key in others if "write" not in answers[key]] == []


def test_accepted_keys_of_megatron() -> None:
    engines = [f"{node}.megatron" for node in (ACTOR, REF, "critic")]
    name = "ppo_megatron_trainer"
    accepted = [
        f"{engine}.{word}" for engine in engines for word in ("use_remove_padding=true", "dist_checkpointing_prefix=''")
    ]
    assert composed(*accepted, name=name) == composed(name=name)
    wrong = [
        f"{engine}.{word}"
        for engine in engines
        for word in ("use_remove_padding=false", "dist_checkpointing_prefix=model.")
    ]
    assert set(refusals(*wrong, name=name)) == {word.partition("=")[0] for word in wrong}
    changed = composed(*(f"{engine}.dtype=fp32" for engine in engines), name=name)
    assert [OmegaConf.select(changed, f"{engine}.dtype") for engine in engines] == ["fp32"] * 3


def test_arguments_of_ray_init_are_passed_on() -> None:
    config = composed(
        "ray_kwargs.ray_init.runtime_env.py_executable='uv run'", "ray_kwargs.ray_init.log_to_driver=false"
    )
    assert config.ray_kwargs.ray_init.runtime_env.py_executable == "uv run"
    assert config.ray_kwargs.ray_init.log_to_driver is False


# ---- built with the table, and its translations


BUILT_EFFECTS: list[tuple[str, dict[str, Any]]] = [
    ("reward.num_workers=3", {"reward_model.reward_kwargs.num_processes": 3}),
    (
        f"{CORRECTION}.bypass_mode=true",
        {
            f"{ACTOR}.use_rollout_log_probs": True,
            f"{ROLLOUT}.calculate_log_probs": True,
            "algorithm.rollout_is_threshold": None,
            "algorithm.rollout_is": False,
        },
    ),
]


def test_a_built_key_with_another_name_sets_ours() -> None:
    config = composed("reward.reward_manager.name=prime", NAME, *(words for words, _ in BUILT_EFFECTS))
    for words, expected in BUILT_EFFECTS:
        assert {key: OmegaConf.select(config, key) for key in expected} == expected, words


def test_the_processes_of_a_manager_that_has_one_are_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    assert composed("reward.num_workers=3") == composed()
    assert "one process scores here" in caplog.text


# ---- feature and refused: answered by name


@pytest.mark.parametrize("decision", ["feature", "refused"])
def test_what_is_not_here_is_answered_by_name(decision: str) -> None:
    for name in ("ppo_trainer", "sft_trainer_engine"):
        keys = [key for key in KEYS[decision] if command_of(key) == name]
        values = {key: "true" if key.endswith(("enable", "enabled", "enable_switch")) else "odd" for key in keys}
        answers = refusals(*(f"{key}={value}" for key, value in values.items()), name=name)
        for key in keys:
            row = row_of(key)
            assert row is not None and answers[key] == row.message
            assert "nearest" not in answers[key]
            if decision == "feature":
                assert "is not in this version yet" in answers[key]


def test_values_that_are_not_here_are_answered_by_name(composed_small: Any) -> None:
    from verl.trainer.config.validation import examined_config

    named = {key: names[-1] for key, names in VALUES["feature"].items()}
    rows: dict[str, Any] = {key: row_of(key, name) for key, name in named.items()}
    theirs = [f"{key}={name}" for key, name in named.items() if not rows[key].is_ours]
    answers = refusals(*theirs)
    config = composed_small(*(f"{key}={name}" for key, name in named.items() if rows[key].is_ours))
    with pytest.raises(ConfigError) as info:
        examined_config(config).checked()
    answers |= {each.key: each.expected for each in info.value.violations}
    assert [key for key, row in rows.items() if row.message not in answers[key]] == []


@pytest.fixture
def composed_small(request: pytest.FixtureRequest) -> Any:
    """The fixture ``composed`` of the folder, under another name."""
    return request.getfixturevalue("composed")


def test_what_is_switched_off_is_accepted() -> None:
    for name in ("ppo_trainer", "sft_trainer_engine"):
        plain = composed(name=name)
        keys = [key for keys in KEYS.values() for key in keys if command_of(key) == name]
        ours = [key for key in keys if row_of(key).is_ours]  # type: ignore[union-attr]
        nulls = [f"{key}=null" for key in keys if key not in ours]
        assert composed(*nulls, name=name) == plain
    plain = composed()
    switches = [f"{key}=false" for key in KEYS["refused"] + KEYS["feature"] if key.endswith(("enable", "enabled"))]
    switches = [each for each in switches if command_of(each) == "ppo_trainer"]
    assert len(switches) > 5 and composed(*switches) == plain
    nodes = ("reward", "skip", "distillation", "trainer.v1", CHECKPOINT_ENGINE, CORRECTION, f"{ROLLOUT}.prometheus")
    assert composed(*(f"{node}=null" for node in nodes)) == plain
    assert composed("distillation={enabled:false,teacher_key:source,distillation_loss:{topk:3}}") == plain
    assert composed(f"{ROLLOUT}.prometheus={{enable:false,port:9090}}", NAME) == composed(NAME)
    assert composed("~reward.num_workers", "~transfer_queue") == plain


# ---- files of the user, contradictions, commands of the user


def own_file(folder: Path, content: dict[str, Any]) -> list[str]:
    head = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    OmegaConf.save(OmegaConf.create(head | content), folder / "mine.yaml")
    return ["--config-path", str(folder), "--config-name", "mine"]


@pytest.mark.parametrize("engine, remedy", [("dp", "leave it out"), ("megatron", "name ppo_megatron_trainer")])
def test_a_group_of_files_of_another_version_is_told(tmp_path: Path, engine: str, remedy: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"defaults: [ppo_trainer, {{model_engine: {engine}}}, _self_]\n"
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
    )
    flags = ["--config-path", str(tmp_path), "--config-name", "mine"]
    with pytest.raises(MissingConfigException) as missing:
        prepare_arguments(flags, "ppo_trainer", CONFIG_DIR)
    told = missing_file(missing.value, "mine", CONFIG_DIR)
    assert f"model_engine: {engine}, a key of another version" in told and remedy in told


CONTENT: dict[str, Any] = {
    "model_engine": "dp",
    "reward": {"num_workers": 3, "reward_manager": {"name": "prime"}, "custom_reward_function": {"path": "a.py"}},
    "distillation": {"enabled": False, "distillation_loss": {"topk": 3}},
    "algorithm": {"rollout_correction": {"rollout_is": "token", "bypass_mode": False}},
    "actor_rollout_ref": {
        "rollout": {"checkpoint_engine": {"backend": "naive", "update_weights_bucket_megabytes": 64}},
        "model": {"lora": {"rank": 8}},
        "actor": {"optim": {"optimizer": "AdamW"}, "use_rollout_log_probs": False},
    },
}


def test_a_file_of_the_user_is_translated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = own_file(tmp_path, CONTENT)
    config = composed(*flags)
    assert "reward" not in config and "distillation" not in config and "model_engine" not in config
    assert "rollout_correction" not in config.algorithm and "checkpoint_engine" not in config.actor_rollout_ref.rollout
    assert config.reward_model.reward_manager == "prime" and config.reward_model.reward_kwargs.num_processes == 3
    assert config.custom_reward_function.path == "a.py"
    assert config.algorithm.rollout_is and config.algorithm.rollout_is_veto_threshold is None
    assert config.actor_rollout_ref.rollout.update_weights_bucket_megabytes == 64
    assert config.actor_rollout_ref.model.lora_rank == 8
    assert len([text for text in caplog.messages if "another version" in text]) == 1


def test_generation_on_devices_of_its_own_is_asynchronous_training() -> None:
    config = composed(*SEPARATE_ASYNC)
    assert config.async_training.mode == "fully_async" and config.async_training.require_batches == 2
    assert config.async_training.trigger_parameter_sync_step == 1
    assert config.async_training.staleness_threshold == 2
    assert config.async_training.max_off_policy_threshold == 3
    assert config.async_training.off_policy_strategy == "wait"
    shared = config.actor_rollout_ref
    assert not shared.hybrid_engine and shared.rollout.mode == "async" and shared.rollout.calculate_log_probs
    assert composed("trainer.v1.separate_async.parameter_sync_step=2").async_training.mode == "sync"


def test_generation_in_turns_on_the_same_devices_is_asynchronous_training() -> None:
    config = composed(*COLOCATE_ASYNC, "trainer.v1.separate_async.parameter_sync_step=2")
    options = config.async_training
    assert (options.mode, options.staleness_threshold, options.max_off_policy_threshold) == ("colocate_async", 2, 8)
    assert options.trigger_parameter_sync_step == 1 and options.require_batches == 1
    shared = config.actor_rollout_ref
    assert shared.hybrid_engine and shared.rollout.mode == "async" and shared.rollout.calculate_log_probs
    assert composed(COLOCATE_ASYNC[0]).async_training.staleness_threshold == 1


def test_the_command_line_wins_over_a_file_in_both_spellings(tmp_path: Path) -> None:
    flags = own_file(tmp_path, CONTENT)
    for words in ("reward.num_workers=5", "reward_model.reward_kwargs.num_processes=5"):
        assert composed(*flags, words).reward_model.reward_kwargs.num_processes == 5
    config = composed(*flags, f"{MODEL}.lora_rank=16", "algorithm.rollout_is_veto_threshold=0.01")
    assert config.actor_rollout_ref.model.lora_rank == 16 and config.algorithm.rollout_is_veto_threshold == 0.01


def test_a_file_of_the_user_is_answered_by_name(tmp_path: Path) -> None:
    content = {
        "distillation": {"enabled": True},
        "model_engine": "megatron",
        "actor_rollout_ref": {"model": {"mtp": {"enable": True}}},
    }
    assert set(refusals(*own_file(tmp_path, content))) == {
        "distillation.enabled",
        "model_engine",
        f"{MODEL}.mtp.enable",
    }


def test_one_setting_in_two_spellings() -> None:
    answer = refusals(f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank=16")
    assert f"contradicts {MODEL}.lora.rank=8" in answer[f"{MODEL}.lora_rank"]
    assert composed(f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank=8").actor_rollout_ref.model.lora_rank == 8


def test_values_that_cannot_be_translated() -> None:
    assert "low_high" in refusals(f"{CORRECTION}.rollout_is_threshold=much")[f"{CORRECTION}.rollout_is_threshold"]
    assert "token or sequence" in refusals(f"{CORRECTION}.rollout_is=word")[f"{CORRECTION}.rollout_is"]
    assert (
        "module.path" in refusals("reward.reward_manager={source:importlib,name:Mine}")["reward.reward_manager.source"]
    )
    assert "register" in refusals("reward.reward_manager.source=other")["reward.reward_manager.source"]


def test_a_sweep_over_an_alias(tmp_path: Path) -> None:
    arguments = prepare_arguments(["-m", f"{MODEL}.lora.rank=8,16"], "ppo_trainer", CONFIG_DIR)
    assert f"++{MODEL}.lora_rank=8,16" in arguments
    with pytest.raises(ConfigError, match="write one value"):
        prepare_arguments(["-m", f"{CORRECTION}.rollout_is=token,sequence"], "ppo_trainer", CONFIG_DIR)


def test_texts_of_files_survive(tmp_path: Path) -> None:
    texts = [
        "it's",
        'a "b"',
        "a,b",
        "x=y",
        "back\\slash",
        "\\'",
        "${trainer.project_name}",
        "[1",
        "ümlaut",
        "null",
        "1",
    ]
    content = {
        "reward": {"custom_reward_function": {"reward_kwargs": {f"key{at}": text for at, text in enumerate(texts)}}}
    }
    config = composed(*own_file(tmp_path, content))
    expected = ["verl_examples" if text.startswith("$") else text for text in texts]
    assert [*config.custom_reward_function.reward_kwargs.values()] == expected


def test_a_command_of_the_user_keeps_the_keys_of_its_files(tmp_path: Path) -> None:
    head = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    OmegaConf.save(OmegaConf.create(head | {"distillation": {"enabled": True}}), tmp_path / "mine.yaml")
    config = composed("distillation.enabled=false", name="mine", folder=str(tmp_path), is_own=True)
    assert config.distillation.enabled is False
    config = composed("+reward.mine=1", "+distillation.teacher_key=a", name="ppo_trainer", is_own=True)
    assert config.distillation.teacher_key == "a"


def test_help_answers_a_key_of_another_version() -> None:
    assert "lora_rank" in keys_help([f"{MODEL}.lora.rank"], "ppo_trainer", CONFIG_DIR)
    assert "is not in this version yet" in keys_help(["distillation.enabled"], "ppo_trainer", CONFIG_DIR)


@pytest.fixture(autouse=True)
def captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
