"""Check the interface that verl uses against the installed torch_npu, or else against a fake torch_npu.

Each test runs a subprocess, because a device cannot be unregistered from torch.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.torch_npu_calls import DEVICE

ROOT = Path(__file__).parents[3]
FAKES = ROOT / "tests" / "fakes"
IS_REAL = importlib.util.find_spec("torch_npu") is not None

TASKS = {
    "actor": ["actor_compute_log_prob", "actor_update", "rollout_generate"],
    "ref": ["ref_compute_log_prob"],
    "critic": ["critic_compute_values", "critic_update"],
    "reward_model": ["reward_model_score"],
}

SCRIPT = """
import json, os, sys
from pathlib import Path
import numpy as np, torch
import torch_npu
from verl.utils import device, distributed, flops_counter, memory_utils
from verl.utils.numerics import seeding
from verl.utils.observe import digest
from verl.utils.profiler import DistProfiler, ProfilerConfig
from verl.utils.profiler.config import NPUToolConfig
from verl.utils.profiler.ranges import marked_range
from verl.single_controller.base import Worker
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.workers.roles import accounting
from verl.workers.rollout.base import preserved_random_state

from tests.fakes.torch_npu_calls import all_missing

folder, tasks = Path(sys.argv[1]), json.loads(sys.argv[2])
said = {"missing": all_missing()}

# names
said["device"] = [device.get_device_name(), device.get_nccl_backend(), device.get_process_group_backend()]
said["variable"] = device.get_visible_devices_keyword()
Worker(cuda_visible_devices="1")
said["visible"] = [os.environ["ASCEND_RT_VISIBLE_DEVICES"], torch.npu.device_count()]
said["keys"] = Worker.env_keys()[-1]
said["tflops"] = flops_counter.get_device_flops()
device.set_expandable_segments(True)
device.set_expandable_segments(False)
said["segments"] = torch.npu.memory.settings

torch.save({"at": torch.device("npu", 1)}, folder / "device.pt")

# a process group
distributed.initialize_global_process_group_ray(timeout_second=77)
backend = torch.distributed.get_backend_config()
said["backend"] = sorted(str(backend).split(","))
said["timeout"] = distributed.group_timeout().total_seconds()

# random state
def draw():
    return torch.rand(2, generator=torch_npu.npu._state.generator).tolist()

seeding.seed_process(5, "actor", 0)
state, before = BaseCheckpointManager.get_rng_state(), digest.random_state_digest()
first = draw()
after = digest.random_state_digest()
with preserved_random_state():
    draw()
second = draw()
BaseCheckpointManager.load_rng_state(state)
said["state"] = [sorted(state), digest.random_state_digest() == before != after]
said["draws"] = [first == draw(), second == draw(), first == second]

# memory
torch.npu.memory.say(3 << 30)
accounting.begin_peak()
torch.npu.memory.say(5 << 30)
torch.npu.memory.say(1 << 30)
said["phase"] = accounting.memory_of("actor")
said["run"] = accounting.memory_metrics()
said["now"] = memory_utils.get_memory_info()["allocated_gb"]

# profiler: each rank of each role, in the order of a step, as the driver starts and stops it
class Role:
    def __init__(self, role, rank, discrete):
        config = ProfilerConfig(
            tool="npu", enable=role != "ref", ranks=[1], save_path=str(folder / str(discrete) / f"{role}_rank{rank}"),
            tool_config={"npu": NPUToolConfig(discrete=discrete, level="level0")},
        )
        self.profiler = DistProfiler(rank, config, role=role)

for discrete in (False, True):
    for role, names in tasks.items():
        for rank in (0, 1):
            worker = Role(role, rank, discrete)
            for step in (1, 2, 3):
                if step in (1, 3):
                    worker.profiler.start(role="e2e", profile_step=str(step))
                for name in names:
                    @DistProfiler.annotate(role=name)
                    def task(self):
                        if self.profiler.running:
                            with marked_range("mini_batch 0"):
                                pass
                    task(worker)
                if step in (1, 3):
                    worker.profiler.stop()
print("\\n" + json.dumps(said))
"""


def run(*words: str, **variables: str) -> Any:
    """Run Python with torch_npu on its path and return the JSON of its last line."""
    path = [ROOT] if IS_REAL else [ROOT, FAKES]
    there = {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | there | place | variables, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_torch_npu_has_what_is_used(request: pytest.FixtureRequest) -> None:
    """The one test that a machine with Ascend devices runs on its own torch_npu."""
    if IS_REAL:
        assert run("-m", "tests.fakes.torch_npu_calls") == []
    else:
        assert request.getfixturevalue("found")[0]["missing"] == []


def test_no_other_call_is_made() -> None:
    called = set()
    for file in (ROOT / "verl").rglob("*.py"):
        text = file.read_text()
        if "get_torch_device" in text:
            called |= set(re.findall(r"(?:get_torch_device\(\)|\bdevice)\.(\w+)\(", text))
    assert called - {"type"} <= DEVICE.keys() and len(called) > 10, called - DEVICE.keys()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the output of a process with the fake torch_npu, and the folder of its traces."""
    if IS_REAL:
        pytest.skip("the fake would hide the installed torch_npu")
    folder = tmp_path_factory.mktemp("npu")
    store = (folder / "store").as_uri()
    return run("-c", SCRIPT, str(folder), json.dumps(TASKS), DIST_INIT_METHOD=store), folder


def test_names_of_the_device(found: tuple[dict[str, Any], Path]) -> None:
    said, _ = found
    assert said["device"] == ["npu", "hccl", "cpu:gloo,npu:hccl"]
    assert said["variable"] == said["keys"] == "ASCEND_RT_VISIBLE_DEVICES"
    assert said["visible"] == ["1", 1]
    assert said["tflops"] == 354.0
    assert said["segments"] == ["expandable_segments:True", "expandable_segments:False"]


def test_a_merge_reads_the_names_of_the_device_where_there_is_no_torch_npu(found: tuple[dict[str, Any], Path]) -> None:
    """A checkpoint names the device of its tensors, which torch must know to read them onto another."""
    script = "import json, sys; from pathlib import Path; from verl.model_merger import fsdp\n"
    script += "fsdp._checked = lambda path, state: state\n"  # the file holds a device in place of its tensors
    script += "print(json.dumps(fsdp._read(Path(sys.argv[1]))['at'].type))"
    assert run("-c", script, str(found[1] / "device.pt"), PYTHONPATH=str(ROOT)) == "npu"


def test_a_group_of_both_kinds_of_tensors(found: tuple[dict[str, Any], Path]) -> None:
    assert found[0]["backend"] == ["cpu:gloo", "npu:hccl"] and found[0]["timeout"] == 77


def test_the_random_state_of_the_device_is_saved_restored_and_digested(found: tuple[dict[str, Any], Path]) -> None:
    said, _ = found
    assert said["state"] == [["cpu", "npu", "numpy", "random"], True]
    assert said["draws"] == [True, True, False]


def test_memory_of_a_phase_and_of_the_run(found: tuple[dict[str, Any], Path]) -> None:
    """The phase begins at 3 GiB, peaks at 5 and ends at 1."""
    said, _ = found
    assert (
        said["phase"]["perf/memory/actor/max_allocated_gb"] == 5 == said["phase"]["perf/memory/actor/max_reserved_gb"]
    )
    assert said["run"]["perf/max_memory_allocated_gb"] == 5
    assert said["now"] == 1


def test_traces_of_the_steps_ranks_and_tasks_that_are_asked_for(found: tuple[dict[str, Any], Path]) -> None:
    _, folder = found
    for discrete in (False, True):
        traces: dict[str, list[list[str]]] = {}
        for path in (folder / str(discrete)).rglob("trace.json"):
            role, step, task = path.relative_to(folder / str(discrete)).parts[:3]
            trace = json.loads(path.read_text())
            assert (trace["activities"], trace["level"], trace["steps"]) == (["NPU", "CPU"], "Level0", 1)
            traces.setdefault(f"{role}/{step}/{task}", []).append(trace["ranges"])
        wanted = {}
        for role in TASKS.keys() - {"ref"}:
            for step in (1, 3):
                if discrete:
                    wanted |= {f"{role}_rank1/step{step}/{name}": [ranges_of([name])] for name in TASKS[role]}
                else:
                    wanted[f"{role}_rank1/step{step}/e2e"] = [ranges_of(TASKS[role])]
        assert traces == wanted


def ranges_of(tasks: list[str]) -> list[list[str]]:
    """Return how the ranges of tasks with one mini-batch each open and close."""
    inner = [["start", "mini_batch 0"], ["end", "mini_batch 0"]]
    return [event for name in tasks for event in ([["start", name], *inner, ["end", name]])]
