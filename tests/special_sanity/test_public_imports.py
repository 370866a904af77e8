"""The names that users import exist, with the parameters that they pass."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "public_imports.txt"
NAME = re.compile(r"(\w+)(?:\(([^)]*)\))?")


def entries() -> list[tuple[str, list[tuple[str, list[str]]]]]:
    lines = [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    split = [line.split(": ", maxsplit=1) for line in lines]
    return [
        (module, [(name, re.findall(r"\w+", args)) for name, args in NAME.findall(names)]) for module, names in split
    ]


def test_the_golden_file_is_read() -> None:
    found = {(module, name): parameters for module, names in entries() for name, parameters in names}
    assert len(found) > 120
    assert found["verl.trainer.ppo.core_algos", "kl_penalty"] == ["logprob", "ref_logprob", "kl_penalty"]


@pytest.mark.parametrize(("module", "names"), entries(), ids=lambda value: value if isinstance(value, str) else "")
def test_public_names_exist(module: str, names: list[tuple[str, list[str]]]) -> None:
    loaded = importlib.import_module(module)
    wrong = []
    for name, parameters in names:
        if not hasattr(loaded, name):
            wrong.append(f"{name} is missing")
        elif parameters:
            found = [p for p in inspect.signature(getattr(loaded, name)).parameters if p != "self"]
            if found[: len(parameters)] != parameters:
                wrong.append(f"{name}{tuple(found)} does not begin with {tuple(parameters)}")
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("path", "package", "names"),
    [
        ("verl.workers.config.actor", "verl.workers.config", "ActorConfig FSDPActorConfig PolicyLossConfig"),
        ("verl.workers.config.critic", "verl.workers.config", "CriticConfig FSDPCriticConfig FSDPCriticModelCfg"),
        ("verl.workers.reward_manager.naive", "verl.workers.reward_manager", "NaiveRewardManager"),
        ("verl.workers.reward_manager.batch", "verl.workers.reward_manager", "BatchRewardManager"),
        ("verl.workers.reward_manager.dapo", "verl.workers.reward_manager", "DAPORewardManager"),
        ("verl.workers.reward_manager.prime", "verl.workers.reward_manager", "PrimeRewardManager"),
        ("verl.workers.reward_manager.registry", "verl.workers.reward_manager", "register get_reward_manager_cls"),
        ("verl.utils.profiler.performance", "verl.utils.profiler", "simple_timer reduce_timing"),
        ("verl.utils.dataset.rm_dataset", "verl.utils.dataset", "RMDataset"),
        ("verl.utils.seeding", "verl.utils.numerics.seeding", "derive_seed prompt_uids sampling_seeds seed_process"),
    ],
)
def test_paths_of_code_that_moved_give_the_same_objects(path: str, package: str, names: str) -> None:
    for name in names.split():
        assert getattr(importlib.import_module(path), name) is getattr(importlib.import_module(package), name)
