"""Style rules that no linter knows, licence, size of tracked files, declared dependencies."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "verl").rglob("*.py"))
# Imported only if installed: no dependency declares them.
OPTIONAL = {
    "av",
    "bm25s",
    "clearml",
    "einops",
    "flash_attn",
    "hdfs",
    "httpx2",
    "liger_kernel",
    "math_verify",
    "mathruler",
    "mbridge",
    "mcp",
    "megatron",
    "mlflow",
    "modelscope",
    "nvtx",
    "opentelemetry",
    "qwen_vl_utils",
    "rich",
    "sglang",
    "swanlab",
    "tensorboard",
    "torch_npu",
    "trackio",
    "triton",
    "trl",
    "verifiers",
    "vllm",
    "volcengine_ml_platform",
    "wandb",
    "weave",
    "zmq",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tracked_text_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"git ls-files: {done.stderr}")
    suffixes = {".py", ".sh", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ""}
    return [
        ROOT / line for line in done.stdout.splitlines() if Path(line).suffix in suffixes and (ROOT / line).is_file()
    ]


@pytest.mark.parametrize(
    ("rule", "pattern", "exempt"),
    [
        ("use logging, not print", r"^\s*print\(", set()),
        ("no open ends", r"#\s*(TODO|FIXME|XXX|HACK)", set()),
        (
            "environment variables only through verl/utils/envs.py",
            r"\bos\.(environ|getenv|putenv)\b",
            # The last two pass a whole environment on, and start before verl can be imported.
            {"verl/utils/envs.py", "verl/utils/fork_server/client.py", "verl/utils/fork_server/server.py"},
        ),
        (
            "time.monotonic or time.perf_counter, since the wall clock may jump; these need the date",
            r"\btime\.time\(|datetime\.(now|utcnow|today)\(",
            {
                "verl/experimental/agent_loop/attempts.py",  # the account of a run, which has several processes
                "verl/experimental/agent_loop/endpoint/history.py",  # the date of an answer
                "verl/trainer/run/clock.py",  # moments of several processes
                "verl/utils/checkpoint/files.py",  # compared with an expiry that the platform announces
                "verl/utils/observe/timeline.py",  # moments of several hosts
                "verl/utils/faults.py",  # read by a test in another process
                "verl/workers/rollout/vllm_rollout/patch.py",  # compared with times of files
                "verl/workers/rollout/sglang_rollout/leftovers.py",  # likewise
            },
        ),
    ],
)
def test_library_style(rule: str, pattern: str, exempt: set[str]) -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in LIBRARY
        if name(path) not in exempt
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert not found, f"{rule}:\n" + "\n".join(found)


def waits_with_a_limit(tree: ast.AST) -> list[int]:
    """Return the lines that call ``subprocess.run`` with a limit, or ask how much time has passed by the wall clock."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.run":
            found += [node.lineno for keyword in node.keywords if keyword.arg == "timeout"]
        if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE):
            if re.search(r"(monotonic|perf_counter|time\.time)\(\) - ", ast.unparse(node)):
                found.append(node.lineno)
    return found


def test_tests_do_not_depend_on_the_speed_of_the_machine() -> None:
    """What hangs meets the limit that pyproject.toml has for each test; see tests/waiting.py for what takes a while."""
    exempt = {
        "tests/utils/profiler/test_profile.py",  # the costs of the profiler, in the full matrix only
    }
    found = [
        f"{name(path)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if name(path) not in exempt
        for line in waits_with_a_limit(ast.parse(path.read_text()))
    ]
    assert not found, f"a busy machine may need more time: wait for an event, or compare CPU time or an order: {found}"


def test_broad_excepts_reraise_or_say_why() -> None:
    bad = []
    for path in LIBRARY:
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "" if node.type is None else ast.unparse(node.type)
            if caught not in {"", "Exception", "BaseException"}:
                continue
            around = "\n".join(lines[node.lineno - 2 : node.end_lineno])
            if "#" not in around and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                bad.append(f"{name(path)}:{node.lineno}")
    assert not bad, f"neither raised again nor explained: {bad}"


def test_no_path_of_a_developers_machine() -> None:
    pattern = re.compile(
        "|".join(["/" + "work/", "/" + "root/", "/home/[a-z]", "/Users/[a-z]", "/" + "opt/(wheels|pypi)"])
    )
    found = [
        f"{name(path)}:{number}: {line.strip()[:100]}"
        for path in tracked_text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line) and path != Path(__file__)
    ]
    assert not found, "\n".join(found)


def test_tracked_files_are_small() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = {line: (ROOT / line).stat().st_size for line in done.stdout.split("\0") if line and (ROOT / line).is_file()}
    assert not {line: size for line, size in sizes.items() if size > 500_000}


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text) and "END OF TERMS AND CONDITIONS" in text
    assert text.count("\n") == 201
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and "LICENSE" in project["license-files"]


def third_party_imports() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for module in modules:
                found.setdefault(module.split(".")[0], name(path))
    ours = {"verl", "_typeshed"}  # the second exists for type checkers only
    return {top: where for top, where in found.items() if top not in sys.stdlib_module_names | ours}


def normalised(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {normalised(requirement) for requirement in project["dependencies"]}
    distributions = packages_distributions()
    missing = {
        top: where
        for top, where in third_party_imports().items()
        if top not in OPTIONAL and not {normalised(d) for d in distributions.get(top, [top])} & declared
    }
    assert not missing, f"imported by the library, but not among the dependencies of pyproject.toml: {missing}"


def test_pyproject_is_the_only_source_of_requirements() -> None:
    assert {path.name for path in ROOT.glob("requirements*") if path.is_file()} == {
        "requirements.txt",
        "requirements-cpu.lock",
    }
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-e ."]


def test_constraints_satisfy_the_bounds_of_the_project() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.strip().split("==")
        for line in (ROOT / "requirements-cpu.lock").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pins = {normalised(key): version for key, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = ("cpu", "mcore", "math", "geo", "tools", "langgraph", "test", "docs")
    assert f'EXTRAS="{",".join(installed)}"' in (ROOT / "scripts" / "setup_env.sh").read_text()
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for extra in installed for text in extras[extra]]
    for requirement in wanted:
        version = pins[normalised(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"
