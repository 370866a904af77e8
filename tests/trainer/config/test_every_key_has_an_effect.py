"""No key is accepted and inert: each has a reader in the code, means the one implementation, or is refused."""

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.config.keys import is_under
from verl.trainer.config.rules.no_effect import IDLE, UNSUPPORTED
from verl.trainer.config.sft import MOVED
from verl.trainer.config.validation import validate_config

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("effects", Path(__file__).parent / "effects.py")
effects = importlib.util.module_from_spec(spec)
spec.loader.exec_module(effects)


def leaves(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


def keys_of(reader):
    nodes = (reader.nodes,) if isinstance(reader.nodes, str) else reader.nodes
    return [f"{node}.{name}" for node in nodes for name in reader.names.split()]


READ = {key for reader in effects.READERS for key in keys_of(reader)}
WHOLE = {key for reader in effects.PASSED_ON for key in keys_of(reader)}
ALL_READERS = [
    *effects.READERS,
    *effects.MEGATRON,
    *effects.SGLANG,
    *effects.PASSED_ON,
    *(reader for readers in effects.OFFLINE.values() for reader in readers),
]
ONE = {key for keys in effects.ONE_IMPLEMENTATION.values() for key in keys}
HELD = {f"{entry.node}.{name}" for entry in UNSUPPORTED if not entry.values for name in entry.names}
HELD |= effects.REFUSED.keys()


def test_the_table_is_complete_and_says_one_thing_of_each_key():
    tree = yaml.safe_load((ROOT / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
    keys = set(leaves(tree))
    passed_on = {key for key in keys if is_under(key, WHOLE)}
    parts = [READ, ONE, HELD, effects.FOLLOWED.keys()]
    explained = set().union(*parts)
    assert keys - explained - passed_on == set(), "keys that nothing reads or refuses"
    assert (explained - HELD) - keys == set(), "keys that the YAML no longer has"
    assert sum(map(len, parts)) == len(explained), "keys that stand in two tables"
    assert set(effects.FOLLOWED.values()) <= READ


def test_the_table_of_megatron_says_where_its_own_keys_take_effect():
    tree = yaml.safe_load((ROOT / "verl/trainer/config/_generated_ppo_megatron_trainer.yaml").read_text())
    keys = {key if not is_free(key) else is_free(key) for key in leaves(tree)}
    own = {key for reader in effects.MEGATRON for key in keys_of(reader)}
    one = {key for each in effects.MEGATRON_ONE.values() for key in each}
    refused = effects.MEGATRON_REFUSED.keys()
    assert (own | one) - keys == set(), "keys that the YAML does not have"
    assert sum(map(len, (own, one, refused))) == len(own | one | refused), "keys that stand in two tables"
    elsewhere = READ | ONE | HELD | effects.FOLLOWED.keys()
    unsaid = {key for key in keys - own - one - refused - elsewhere if not is_under(key, WHOLE)}
    assert unsaid == set(), "keys that nothing reads or refuses"


def is_free(key):
    """Return the mapping that is read as a whole and holds this key."""
    return next((node for node in effects.MEGATRON_WHOLE if key.startswith(f"{node}.")), None)


def comments(text):
    """Return the comment above each key of a YAML file, in one line."""
    found, above, path = {}, [], []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip(" #"))
        elif ":" in line:
            depth = (len(line) - len(line.lstrip())) // 2
            path[depth:] = [line.split(":")[0].strip()]
            found[".".join(path)], above = " ".join(above), []
    return found


def explained_elsewhere(name, key):
    """Whether a key is one of ``ppo_trainer``, or of the newer tree of supervised training, under another name."""
    if name == "sft_trainer":
        node = next((old for old in sorted(MOVED, key=len, reverse=True) if f"{key}.".startswith(f"{old}.")), None)
        moved = key if node is None else MOVED[node] + key.removeprefix(node)
        rows = {each for reader in effects.OFFLINE["sft_trainer_engine"] for each in keys_of(reader)}
        return moved in rows or explained_elsewhere("sft_trainer_engine", moved)
    node, _, rest = key.partition(".")
    same = f"{effects.SAME_NODES.get(node, node)}.{rest}"
    return name == "sft_trainer_engine" and node in effects.SAME_NODES and same in READ | ONE | HELD


@pytest.mark.parametrize("name", effects.OFFLINE)
def test_the_trees_without_a_training_loop(name, composed):
    """Each key has one reader, or says that it is kept for established commands."""
    text = (ROOT / f"verl/trainer/config/{name}.yaml").read_text(encoding="utf-8")
    keys = set(leaves(OmegaConf.to_container(composed(name=name, base=False), resolve=False)))
    read = [key for reader in effects.OFFLINE[name] for key in keys_of(reader)]
    kept = {key for key, line in comments(text).items() if key in keys and any(t in line.lower() for t in effects.KEPT)}
    assert len(read) == len(set(read)), "keys that stand in two rows"
    assert set(read) <= keys - kept
    assert {key for key in keys - kept - set(read) if not explained_elsewhere(name, key)} == set()


@cache
def reads(file):
    """Return what a file reads: name -> expressions of which it is an attribute, item, ``get`` or ``mapping_at``."""
    found = defaultdict(set)
    path = ROOT / file if file.startswith("recipe/") else ROOT / "verl" / file
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Load()):
                found[name].add(ast.unparse(owner))
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
                found[name].add(ast.unparse(owner))
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                found[name].add(ast.unparse(owner))
            case ast.Call(func=ast.Name(id="getattr" | "mapping_at"), args=[owner, ast.Constant(value=str(name)), *_]):
                found[name].add(ast.unparse(owner))
            case ast.Tuple(elts=items) | ast.Call(args=items) | ast.Dict(keys=items):
                for item in items:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        found[item.value].add(effects.LOOP)
    return found


def wrong_rows(readers):
    """Return what is wrong with rows of the table: names that a file does not read, and tests that do not exist."""
    found = [
        f"{reader.file} does not read {name!r} of {reader.expression!r}, but of {sorted(reads(reader.file)[name])}"
        for reader in readers
        for name in reader.names.split()
        if reader.expression not in reads(reader.file)[name]
    ]
    named = sorted({reader.test for reader in readers if reader.test})
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {test.split("::")[0] for test in named}}
    found += [f"no {test}" for test in named if f"\ndef {test.split('::')[1]}(" not in texts[test.split("::")[0]]]
    return found


def test_readers_read_what_they_are_said_to_and_their_tests_exist():
    assert not wrong_rows(ALL_READERS), "\n".join(wrong_rows(ALL_READERS))


def test_what_vllm_reads_is_read_or_refused_with_sglang():
    of_vllm = {key for reader in effects.READERS if "/vllm_rollout/" in reader.file for key in keys_of(reader)}
    of_sglang = {key for reader in effects.SGLANG for key in keys_of(reader)}
    engine = f"{effects.ROLLOUT}.name"
    idle = {
        f"{entry.node}.{name}"
        for entry in IDLE
        if (entry.switch, entry.off) == (engine, "sglang")
        for name in entry.names
    }
    refused = set(effects.REFUSED_BY_SGLANG)
    assert of_vllm - of_sglang - refused == of_vllm & idle, "keys that SGLang neither reads nor refuses"
    assert not of_sglang & idle


@pytest.mark.parametrize(("key", "value"), effects.REFUSED_BY_SGLANG.items())
def test_what_sglang_cannot_do_is_refused_before_the_start(base, key, value):
    config = base.copy()
    OmegaConf.update(config, "actor_rollout_ref.rollout.name", "sglang")
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError, match=re.escape(key)):
        validate_config(config, use_reference_policy=True, use_critic=True)


@pytest.mark.parametrize(("key", "value"), effects.IDLE_WITH_SGLANG.items())
def test_what_sglang_does_not_read_is_told(base, key, value, caplog):
    config = base.copy()
    OmegaConf.update(config, "actor_rollout_ref.rollout.name", "sglang")
    OmegaConf.update(config, key, value, force_add=True)
    with caplog.at_level("WARNING", logger="verl.trainer.config.validation"):
        validate_config(config, use_reference_policy=True, use_critic=True)
    assert re.search(rf"{re.escape(key)}\S*=.*actor_rollout_ref.rollout.(name=sglang|mode=sync)", caplog.text)


def test_one_implementation_is_documented_above_the_key():
    for file, keys in [*effects.ONE_IMPLEMENTATION.items(), *effects.MEGATRON_ONE.items()]:
        text = (ROOT / "verl" / file).read_text(encoding="utf-8")
        for name in {key.rsplit(".", 1)[-1] for key in keys}:
            (comment,) = re.findall(rf"((?:^ *#.*\n)+) *{name}:", text, re.MULTILINE)
            assert "no effect" in re.sub(r"\s*#?\s+", " ", comment.lower()), f"{file}: {name}"


@pytest.fixture(scope="module")
def base(composed):
    return composed()


@pytest.fixture(scope="module")
def base_of_megatron(composed):
    reward = ["reward_model.enable=true", "reward_model.micro_batch_size_per_gpu=2", "data.return_raw_chat=true"]
    return composed(*reward, name="ppo_megatron_trainer")


@pytest.mark.parametrize(("key", "value"), effects.REFUSED.items())
def test_what_a_rule_holds_at_its_default_is_refused(base, key, value):
    config = base.copy()
    OmegaConf.update(config, key, value)
    with pytest.raises(ConfigError, match=re.escape(key)):
        validate_config(config, use_reference_policy=True, use_critic=True)


@pytest.mark.parametrize(("key", "value"), effects.MEGATRON_REFUSED.items())
def test_what_megatron_holds_at_its_default_is_refused(base_of_megatron, key, value):
    config = base_of_megatron.copy()
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError, match=re.escape(key)):
        validate_config(config, use_reference_policy=True, use_critic=True)
