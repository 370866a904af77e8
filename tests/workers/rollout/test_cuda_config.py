"""What vLLM turns on for our engine arguments on a CUDA machine, held against a golden file.

    UPDATE_GOLDEN=1 python -m pytest tests/workers/rollout/test_cuda_config.py

writes the file anew. It holds one version of vLLM, without flashinfer and without environment variables of vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout.cuda_config import LAYOUTS
from verl.utils.engine_versions import installed_version

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "vllm_on_cuda.json"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("families")
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    own |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    own["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("cache"))
    for step in ("write", "print"):
        command = [sys.executable, "-m", "tests.workers.rollout.cuda_config", step, str(folder)]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_on_is_as_before(found: Any) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if golden["vllm"] != installed_version():
        pytest.skip(f"the golden file is of vLLM {golden['vllm']}")
    assert found == golden


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_has_what_a_gpu_run_relies_on(found: Any, layout: str) -> None:
    """Graphs and compilation, and engines that sleep where the trainer needs their devices."""
    standalone, tensor_parallel = LAYOUTS[layout]
    families = [family for group in found[layout] for family in group["families"]]
    assert len(families) == len(set(families)) == 15
    for group in found[layout]:
        assert not group["eager"] and group["graphs"] != "NONE" and group["compilation"] == "VLLM_COMPILE"
        assert group["sleep"] is not standalone
        assert group["log-probs"] == "processed_logprobs" and group["dtype"] == "torch.bfloat16"
        several = "mp" if standalone else "external_launcher"
        assert group["executor"] == (several if tensor_parallel > 1 else "uni")
