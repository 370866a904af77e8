"""The tests of SGLang's engine, and those of images, with the other supported versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["0.5.21", "0.5.22"])
def test_another_version(version: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*install, f"sglang=={version}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no index has sglang {version}: {done.stderr[-200:]}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    asked = "from verl.utils.engine_versions import installed_version; print(installed_version('sglang'))"
    told = [sys.executable, "-c", asked]
    assert subprocess.run(told, cwd=ROOT, env=env, capture_output=True, text=True).stdout.strip() == version
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = ROOT / "tests" / "workers" / "rollout"
    parts = ([tests / "test_sglang_engine.py", "-m", "not full"], [tests / "test_vision_rollout.py", "-k", "sglang"])
    for part in parts:
        command = [*suite, *map(str, part)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
        assert " passed" in done.stdout
