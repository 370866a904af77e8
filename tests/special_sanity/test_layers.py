"""The import layers: the contract can fail, covers what the linter cannot see, and is the one that the docs show."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
# Packages that may be absent, and the only places that may import them when they are imported themselves.
OPTIONAL_BACKENDS = {
    "vllm": "verl/workers/rollout/vllm_rollout/",
    "sglang": "verl/workers/rollout/sglang_rollout/",
    "megatron": (
        "verl/workers/engine/megatron/",
        "verl/models/mcore/gpt/",
        "verl/utils/megatron/dist_checkpointing.py",
        "verl/utils/megatron/offload.py",
        "verl/utils/megatron/optimizer.py",
        "verl/utils/checkpoint/megatron_checkpoint_manager.py",
    ),
    "triton": ("verl/utils/kernel/kernels.py", "verl/utils/kernel/merged_rows.py"),
    "flash_attn": None,
    "peft": None,
    "liger_kernel": None,
    "tensorboard": None,
    "wandb": None,
    "mlflow": None,
    "swanlab": None,
}


def modules_of(layer: str) -> list[str]:
    return re.findall(r"\w+", layer)


def imports_at_import_time(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports by being imported: not in functions, nor under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        else:
            yield from imports_at_import_time(node)


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with the modules of the contract and nothing in them."""
    root = tmp_path_factory.mktemp("skeleton")
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (root / "verl").mkdir()
    (root / "verl" / "__init__.py").touch()
    for contract in CONTRACTS:
        folder = root / contract["containers"][0].replace(".", "/")
        for layer in contract["layers"]:
            for module in modules_of(layer):
                (folder / module).mkdir(exist_ok=True)
                (folder / module / "__init__.py").touch()
        for ignored in contract.get("ignore_imports", []):  # the linter wants every exception to be in use
            importer, imported = ignored.split(" -> ")
            for name in (importer, imported):
                path = root / (name.replace(".", "/").replace("*", "any"))
                path.mkdir(parents=True, exist_ok=True)
                for parent in [path, *path.parents]:
                    if root in parent.parents:
                        (parent / "__init__.py").touch()
            source = root / importer.replace(".", "/").replace("*", "any") / "__init__.py"
            source.write_text(source.read_text() + f"import {imported}\n")
    return root


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", root / "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_skeleton_without_violations_passes(skeleton: Path) -> None:
    done = lint(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr


VIOLATIONS = [
    ("utils/bad.py", "import verl.trainer", "verl.utils.bad -> verl.trainer"),
    ("protocol/bad.py", "from verl import single_controller", "verl.protocol.bad -> verl.single_controller"),
    ("algos/bad.py", "import verl.models", "verl.algos.bad -> verl.models"),
    ("workers/config/bad.py", "import verl.workers.engine", "verl.workers.config.bad -> verl.workers.engine"),
    ("workers/engine/bad.py", "import verl.workers.rollout", "verl.workers.engine.bad -> verl.workers.rollout"),
    (
        "workers/roles/bad.py",
        "import verl.workers.fsdp_workers",
        "verl.workers.roles.bad -> verl.workers.fsdp_workers",
    ),
    ("brand_new.py", "", "verl.brand_new"),
]


@pytest.fixture(scope="module")
def complaints(skeleton: Path) -> str:
    """What the linter says of a package with all violations: one run for all tests."""
    for file, line, _ in VIOLATIONS:
        (skeleton / "verl" / file).write_text(line + "\n")
    try:
        done = lint(skeleton)
    finally:
        for file, _, _ in VIOLATIONS:
            (skeleton / "verl" / file).unlink()
    assert done.returncode == 1
    return done.stdout.replace("\n", " ")


@pytest.mark.parametrize("expected", [expected for _, _, expected in VIOLATIONS])
def test_violation_is_found(complaints: str, expected: str) -> None:
    assert expected in complaints


def test_architecture_page_shows_the_rows_of_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| (\d+) \| (.+) \|$", page, flags=re.MULTILINE)
    shown = [set(re.findall(r"`verl\.(\w+)`", cell)) for _, cell in table if "verl." in cell]
    assert shown == [set(modules_of(layer)) for layer in CONTRACTS[0]["layers"]]


def test_exceptions_give_a_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r'\s*"verl\S* -> verl\S*",', line):
            block = "\n".join(lines[max(0, number - 6) : number])
            assert "#" in block, f"pyproject.toml:{number + 1}: say above this exception why it is needed"


def library_files() -> list[Path]:
    return sorted((ROOT / "verl").rglob("*.py"))


def test_library_imports_nothing_from_recipes_tests_or_examples() -> None:
    for path in library_files():
        for name in imports_at_import_time(ast.parse(path.read_text())):
            assert name.split(".")[0] not in {"recipe", "tests", "examples", "scripts"}, f"{path}: {name}"


def test_optional_backends_are_imported_lazily() -> None:
    for path in library_files():
        relative = path.relative_to(ROOT).as_posix()
        for name in imports_at_import_time(ast.parse(path.read_text())):
            place = OPTIONAL_BACKENDS.get(name.split(".")[0], "")
            assert place == "" or (place is not None and relative.startswith(place)), f"{relative}: {name}"


IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(ABSENT))  # None there: cannot be found, cannot be imported
import verl
for module in pkgutil.walk_packages(verl.__path__, "verl."):
    path = module.name.replace(".", "/") + "/"
    if not path.startswith(BACKEND_PLACES):
        importlib.import_module(module.name)
"""


def test_every_module_imports_where_no_optional_backend_is_installed() -> None:
    places = tuple(
        p for place in OPTIONAL_BACKENDS.values() if place for p in ((place,) if isinstance(place, str) else place)
    )
    places = tuple(place.removesuffix(".py") for place in places)
    code = f"ABSENT = {set(OPTIONAL_BACKENDS)!r}\nBACKEND_PLACES = {places!r}\n{IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_launching_process_checks_without_torch() -> None:
    """It would take seconds more before a wrong key is answered."""
    code = "import sys, verl.trainer.main_ppo, verl.trainer.config.validation; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
