"""Profiling with Nsight Systems makes the right calls to a fake program and package."""

import importlib.machinery
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import ray
import torch
from omegaconf import OmegaConf
from ray._private.runtime_env.nsight import NSIGHT_DEFAULT_CONFIG, parse_nsight_config
from ray.runtime_env import RuntimeEnv
from ray.runtime_env.runtime_env import _merge_runtime_env

from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.resource_pool import RayClassWithInitArgs
from verl.trainer.config.run_config import RunConfig
from verl.trainer.main_ppo import _controller_options
from verl.trainer.ppo.profiling import nsys_group_options
from verl.utils.profiler import (
    DistProfiler,
    ProfilerConfig,
    mark_annotate,
    mark_end_range,
    mark_start_range,
    marked_timer,
    ranges,
)
from verl.utils.profiler.captures import nsight_options
from verl.utils.profiler.config import NsightToolConfig
from verl.utils.ray_utils import without_nsight


@pytest.fixture
def events(monkeypatch):
    """Replace nvtx, cudaProfilerStart and cudaProfilerStop by fakes."""
    seen = []
    fake = types.ModuleType("nvtx")
    fake.__spec__ = importlib.machinery.ModuleSpec("nvtx", None)

    def start_range(message=None, color="blue", domain=None, category=None, payload=None):
        seen.append(("start_range", message, color, domain, category))
        return (len(seen), 0)  # nvtx: the identity of the range and the handle of its domain

    fake.start_range = start_range
    fake.end_range = lambda range_id: seen.append(("end_range", range_id[0]))
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.setattr(ranges, "is_nvtx_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("cudaProfilerStart"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("cudaProfilerStop"))
    ranges.marks.cache_clear()
    yield seen
    ranges.marks.cache_clear()


class Worker:
    def __init__(self, *profilers):
        self.profiler = profilers[0]

    @DistProfiler.annotate(color="red", role="actor_update")
    def update(self):
        with ranges.captured_range("optimizer"):
            return None


def nsys(discrete, rank=0):
    config = ProfilerConfig(
        tool="nsys", enable=True, ranks=[0], tool_config={"nsys": NsightToolConfig(discrete=discrete)}
    )
    return DistProfiler(rank, config)


UPDATE = [
    ("start_range", "actor_update", "red", None, None),
    ("start_range", "optimizer", None, None, None),
]


def test_captures_of_a_step_and_of_a_task(events):
    whole, other_role = nsys(discrete=False), nsys(discrete=False)
    worker = Worker(whole)
    for profiler in (whole, other_role):  # roles of one process share its capture
        profiler.start(profile_step="1")
    worker.update()
    for profiler in (whole, other_role):
        profiler.stop()
    worker.update()
    assert events == ["cudaProfilerStart", *UPDATE, ("end_range", 3), ("end_range", 2), "cudaProfilerStop"]

    del events[:]
    worker = Worker(nsys(discrete=True))
    worker.profiler.start(profile_step="1")
    assert events == []
    worker.update()
    worker.update()
    worker.profiler.stop()
    captures = [event for event in events if isinstance(event, str)]
    assert captures == ["cudaProfilerStart", "cudaProfilerStop"] * 2  # a database for each


def test_other_ranks_do_nothing(events):
    worker = Worker(nsys(discrete=False, rank=1))
    worker.profiler.start(profile_step="1")
    worker.update()
    worker.profiler.stop()
    assert events == []


def test_marks_and_timers_are_ranges(events):
    range_id = mark_start_range("a", color="green", domain="d", category="c")
    mark_end_range(range_id)

    @mark_annotate(color="red")
    def work(x):
        return x + 1

    timing = {}
    with marked_timer("gen", timing, color="blue"):
        assert work(1) == 2
    assert events == [
        ("start_range", "a", "green", "d", "c"),
        ("end_range", 1),
        ("start_range", "gen", "blue", None, None),
        ("start_range", "work", "red", None, None),
        ("end_range", 4),
        ("end_range", 3),
    ]
    assert timing["gen"] > 0


def test_without_a_library_marks_do_nothing_and_timers_time():
    assert mark_start_range("a") is None
    mark_end_range(None)
    timing = {"gen": 1.0}
    with pytest.raises(KeyError), marked_timer("gen", timing):
        raise KeyError
    assert timing["gen"] > 1.0


# ---- the runtime environment


def config_of(*changes):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["global_profiler.tool=nsys", "global_profiler.steps=[1,5]", *changes])


def shell_words(options):
    """Return Ray's command for the options, split like a shell does."""
    return shlex.split(" ".join(parse_nsight_config(options)))


def test_options_are_those_that_ray_makes_a_command_of(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    folder = tmp_path / "with space"
    runtime_env = _controller_options(config_of(f"global_profiler.save_path='{folder}'"))["runtime_env"]
    assert RuntimeEnv(**runtime_env).nsight() == runtime_env["nsight"]  # Ray's own class takes it
    assert folder.is_dir()
    # Ray joins the name to the folder of its logs, which leaves an absolute one as it is.
    options = dict(runtime_env["nsight"])
    options["o"] = str(Path("/session/logs/nsight") / options.get("o", NSIGHT_DEFAULT_CONFIG["o"]))
    assert shell_words(options) == [
        *("nsys", "profile", "--trace=cuda,nvtx,cublas,ucx", "--cuda-memory-usage=true", "--cuda-graph-trace=graph"),
        *("-o", f"{folder}/controller_%p"),
    ]
    assert _controller_options(config_of("global_profiler.steps=null")) == {}
    assert _controller_options(config_of("trainer.device=cpu")) == {}
    assert _controller_options(config_of("global_profiler.tool=torch")) == {}


def test_values_are_written_as_nsys_reads_them():
    """Hydra parses ``true``, ``[a,b]`` and ``5`` to Python values, which Ray would write in Python's form."""
    prefix = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    changes = ["cuda-memory-usage=false", "trace=[cuda,nvtx]", "kill=null"]
    config = config_of(*(f"{prefix}.{change}" for change in changes), f"+{prefix}.duration=5", f"+{prefix}.w=true")
    options = OmegaConf.to_container(config.global_profiler.global_tool_config.nsys.worker_nsight_options)
    assert shell_words(nsight_options(options, "/profiles", "worker")) == [
        *("nsys", "profile", "--trace=cuda,nvtx", "--cuda-memory-usage=false", "--cuda-graph-trace=graph"),
        *("--capture-range=cudaProfilerApi", "--duration=5", "-w", "true", "-o", "/profiles/worker_%p"),
    ]


def test_a_name_among_the_options_stays():
    for key in ("o", "output"):  # Ray adds -o to what it does not know as such, and nsys takes one of both
        assert nsight_options({key: "mine"}, "/profiles", "worker") == {"o": "mine"}
    assert nsight_options({"t": "cuda"}, None, "worker") == {"t": "cuda"}


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        (["actor_rollout_ref.actor.profiler.all_ranks=true"], None),
        (["actor_rollout_ref.actor.profiler.ranks=[1]"], [1]),
        (
            ["actor_rollout_ref.actor.profiler.ranks=[1]", "critic.profiler.enable=true", "critic.profiler.ranks=[0]"],
            [0, 1],
        ),
    ],
)
def test_only_profiled_ranks_are_wrapped(changes, ranks):
    config = config_of("actor_rollout_ref.actor.profiler.enable=true", "global_profiler.save_path=/profiles", *changes)
    options = nsys_group_options(RunConfig.parse(config), ["actor_rollout", "critic"])
    assert options["profile_ranks"] == ranks
    unused = RunConfig.parse(config_of("global_profiler.tool=torch"))
    assert nsys_group_options(unused, ["actor_rollout"]) == {}

    group = object.__new__(RayWorkerGroup)
    group._kwargs, group.device_name, group.name_prefix = options, "cuda", "ab12"
    pool, cia = RayResourcePool([2], name_prefix="global_pool"), RayClassWithInitArgs(cls=object)
    wrapped, of_driver = {}, RuntimeEnv(nsight={"o": "controller_%p"})
    for rank in (0, 1):
        runtime_env = group._actor_options(cia, pool, "name", {"RANK": str(rank)}, False)["runtime_env"]
        cia.update_options({"runtime_env": runtime_env})
        taken = _merge_runtime_env(of_driver, RuntimeEnv(**runtime_env), override=True)["_nsight"]
        if taken is not None:
            wrapped[rank] = shell_words(taken)
    assert sorted(wrapped) == (ranks or [0, 1])
    for rank, words in wrapped.items():
        assert words == [
            *("nsys", "profile", "--trace=cuda,nvtx,cublas,ucx", "--cuda-memory-usage=true"),
            *("--cuda-graph-trace=graph", "--capture-range=cudaProfilerApi"),
            *("--capture-range-end=repeat-shutdown:12", "--kill=none"),
            *("-o", f"/profiles/worker_global_pool_rank{rank}_%p"),
        ]


def test_what_the_driver_starts_beside_workers_is_not_wrapped(monkeypatch):
    assert without_nsight() == {}  # where Ray does not run
    of_driver = RuntimeEnv(nsight={"o": "controller_%p"})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: types.SimpleNamespace(runtime_env=of_driver))
    child = RuntimeEnv(**without_nsight()["runtime_env"])
    assert child, "Ray takes an empty environment for that of the parent"
    assert _merge_runtime_env(of_driver, child, override=True)["_nsight"] is None


# ---- Ray itself, with a program in place of nsys

NSYS = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open("{folder}/calls", "a") as file:
    print(json.dumps(arguments), file=file)
assert arguments.pop(0) == "profile"
while arguments[0].startswith("-"):
    arguments = arguments[1:] if arguments[0].startswith("--") else arguments[2:]
os.environ["UNDER_NSYS"] = "1"
os.execvp(arguments[0], arguments)
"""

DRIVER = """
import json, os, ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.profiler.captures import nsight_options
from verl.utils.ray_utils import without_nsight

class Wrapped(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def command(self):
        return os.environ.pop("UNDER_NSYS", None)

@ray.remote(num_cpus=0)
def helper():
    return os.environ.get("UNDER_NSYS")

class Runner:
    def run(self, kwargs):
        pool = RayResourcePool([2], max_colocate_count=1, name_prefix="pool")
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Wrapped)), **kwargs)
        return os.environ.get("UNDER_NSYS"), group.command(), ray.get(helper.options(**without_nsight()).remote())

folder = "{folder}"
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
options = nsight_options({{"w": True, "kill": None}}, folder + "/a b", "controller")
runner = ray.remote(num_cpus=0)(Runner).options(runtime_env={{"nsight": options}}).remote()
kwargs = dict(device_name="cuda", profile_steps=[1, 2], profile_ranks=[1], profile_save_path=folder + "/a b")
kwargs["worker_nsight_options"] = {{"capture-range": "cudaProfilerApi"}}
print(json.dumps(ray.get(runner.run.remote(kwargs), timeout=120)))
"""


@pytest.mark.full
@pytest.mark.slow
def test_ray_wraps_the_driver_and_the_profiled_ranks_and_nothing_else():
    folder = tempfile.mkdtemp(prefix="nsys")  # sockets live below it, and paths of them must be short
    try:
        program = Path(folder, "nsys")
        program.write_text(NSYS.format(python=sys.executable, folder=folder))
        program.chmod(0o755)
        search = os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": search, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        command = [sys.executable, "-c", DRIVER.format(folder=folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == ["1", [None, "1"], None]
        calls = [json.loads(line) for line in Path(folder, "calls").read_text().splitlines()]
        started = [call[: call.index("python")] for call in calls if "python" in call]  # the others are Ray's trials
        assert started == [
            ["profile", "-o", f"{folder}/a b/controller_%p", "-w", "true"],
            [
                *("profile", "--capture-range=cudaProfilerApi", "--capture-range-end=repeat-shutdown:12"),
                *("-o", f"{folder}/a b/worker_pool_rank1_%p"),
            ],
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
