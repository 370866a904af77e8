"""The look-up of the engines' names finds what is missing, and nothing is in the versions that are installed."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import engine_attributes
from scripts.engine_attributes import ALLOWED, OBJECTS, WHEELS, Sources, Use, installed, problems, used_names

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "vllm/__init__.py": "def __getattr__(name): ...\n_PLACES = {'LLM': '.entry:LLM'}\n",
    "vllm/entry.py": "from .base import *\nclass LLM(Base):\n    def sleep(self, level=1): ...\n    width: int = 1\n",
    "vllm/base.py": "class Base:\n    def __init__(self):\n        self.engine = other.engine_of_another = 1\n"
    "    def wake(self, **tags): ...\n",
    "vllm/bare/part.py": "size = 1\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("module", "owner", "attribute", "missing"),
    [
        ("vllm", "LLM", None, None),
        ("vllm", "AsyncLLM", None, "vllm.AsyncLLM"),
        ("vllm.gone", "LLM", None, "vllm.gone.LLM"),
        ("vllm", "LLM", "sleep(level)", None),
        ("vllm", "LLM", "sleep(level,mode)", "vllm.LLM.sleep(mode)"),
        ("vllm", "LLM", "wake(tags)", None),
        ("vllm", "LLM", "width", None),
        ("vllm", "LLM", "engine", None),
        ("vllm", "LLM", "engine_of_another", "vllm.LLM.engine_of_another"),
        ("vllm", "LLM", "nap", "vllm.LLM.nap"),
        ("vllm.entry", "Base", "wake", None),
        ("vllm.bare", "part", "size", None),
        ("vllm.bare", "part", "weight", "vllm.bare.part.weight"),
    ],
)
def test_what_is_missing(sources: Sources, module: str, owner: str, attribute: str | None, missing: str | None) -> None:
    assert sources.problem(Use(module, owner, attribute, "sync", "here")) == missing


def test_a_mode_is_looked_up_from_its_lowest_version_on(sources: Sources) -> None:
    uses = [Use("vllm", "LLM", "nap", "async", "here")]
    assert problems("vllm", "0.27.1", sources.root, uses) == []
    assert problems("vllm", "0.28.0", sources.root, uses) == ["vllm 0.28.0 has no vllm.LLM.nap (async, here)"]
    assert problems("sglang", "0.5.21", sources.root, uses) == []


def test_imports_and_what_is_read_from_them_are_found() -> None:
    found = {use[:4] for use in used_names()}
    for use in (
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "_update_states", "cpu"),
        ("vllm.model_executor.models", "registry", "_run_in_subprocess", "sync"),
        ("vllm.v1.engine.async_llm", "AsyncLLM", "from_engine_args", "standalone"),
        ("sglang.srt.layers", "sampler", "Sampler", "sync"),
        ("megatron.core", "parallel_state", None, "sync"),
    ):
        assert use in found
    assert not any(use[0].startswith("vllm.config") and use[1] == "VllmConfig" for use in found)  # a type only


def test_the_installed_versions_lack_nothing() -> None:
    uses, seen = used_names(), []
    for package, version, root in installed():
        assert version in ALLOWED[package]
        assert problems(package, version, root, uses) == []
        seen.append(package)
    if not seen:
        pytest.skip("no engine is installed")


def test_the_versions_lie_within_the_bounds_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, package in (("vllm", "vllm"), ("sglang", "sglang"), ("mcore", "megatron")):
        (bounds,) = (Requirement(each).specifier for each in extras[extra])
        assert all(version in bounds for version in ALLOWED[package])
        lowest = next(each.version for each in bounds if each.operator == ">=")
        assert ALLOWED[package][0].startswith(lowest)
    (on_cpu,) = (Requirement(each).specifier for each in extras["cpu"])
    assert engine_attributes.LOWEST["cpu"] == next(each.version for each in on_cpu if each.operator == ">=")
    assert WHEELS.keys() == ALLOWED.keys() and OBJECTS
