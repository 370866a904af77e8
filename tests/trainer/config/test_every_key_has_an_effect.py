"""No key is accepted and inert: each has a reader in the code, or is refused when it is set."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import yaml

from verl.trainer.config.refusals import REFUSALS

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("effects", Path(__file__).parent / "effects.py")
effects = importlib.util.module_from_spec(spec)
spec.loader.exec_module(effects)

REFUSED = {refusal.key for refusal in REFUSALS}


def leaves(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}"


def read_keys():
    for file, nodes in effects.READERS.items():
        for node, names in nodes.items():
            for name in names.split():
                yield file, f"{node}.{name}"


def is_gated(key):
    return any(part in key for part in effects.GATED)


def test_the_table_is_complete():
    tree = yaml.safe_load((ROOT / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
    keys = set(leaves(tree))
    explained = {key for _, key in read_keys()} | REFUSED | effects.ONE_IMPLEMENTATION | effects.AWAITED
    assert {key for key in keys - explained if not is_gated(key)} == set(), "keys without a reader or a refusal"
    named = {key for _, key in read_keys()} | effects.ONE_IMPLEMENTATION | effects.AWAITED
    assert named - keys == set(), "keys that the YAML no longer has"


def test_readers_hold_the_name_of_what_they_read():
    for file, key in read_keys():
        path = ROOT / file
        assert path.is_file(), f"{key}: {file} does not exist"
        assert key.rsplit(".", 1)[-1] in path.read_text(encoding="utf-8"), f"{file} does not read {key}"


def test_switches_of_gated_options_are_refused():
    for part, gate in effects.GATED.items():
        assert any(key.endswith(gate) for key in REFUSED), f"{part}: {gate} is not refused"
