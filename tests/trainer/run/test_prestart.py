"""When a run has a fork server, and which."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.trainer.config.rules import fork_workers as rules
from verl.trainer.config.rules.fork_workers import fork_rules
from verl.trainer.config.run_config import TrainingRayConfig
from verl.trainer.run import prestart

CPU = ["trainer.device=cpu", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm"]
ON, OFF = ("ray_kwargs.fork_workers=true", "ray_kwargs.fork_workers=false")


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The servers that would have been started."""
    made = []

    class Server(SimpleNamespace):
        stopped = False

        def stop(self):
            self.stopped = True

    def make(environment, first, general, workers, *last, **options):
        made.append(Server(environment=environment, general=general, workers=workers, last=last, **options))
        return made[-1]

    monkeypatch.setattr(prestart, "ForkServer", make)
    monkeypatch.setattr(prestart, "_early", None)
    monkeypatch.setattr(sys, "platform", "linux")
    for module in (prestart, rules):
        monkeypatch.setattr(module, "has_accelerators", lambda: False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return made


ROLLOUT = {"name": "vllm", "mode": "sync", "multi_turn": {"enable": False}}


def config(*words):
    base = {
        "trainer": {"device": "cpu", "n_gpus_per_node": 1},
        "actor_rollout_ref": {"hybrid_engine": True, "rollout": ROLLOUT, "actor": {"strategy": "fsdp"}},
        "critic": {"strategy": "fsdp2"},
        "ray_kwargs": {"ray_init": {"num_cpus": None}, "fork_workers": None},
    }
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(words)))


def test_what_the_server_imports_is_there():
    """A name that is not there would be left out without a word."""
    for name in (*prestart._FIRST, *prestart._GENERAL, *prestart._VLLM):
        assert importlib.util.find_spec(name.partition(":")[0]), name


def test_the_server_has_the_environment_of_the_workers_and_their_modules(started):
    prestart.fork_server_of(config("trainer.n_gpus_per_node=2"))
    (server,) = started
    assert server.environment["OMP_NUM_THREADS"] and server.environment["NCCL_DEBUG"] == "INFO"
    assert server.last == (1, None) and "verl.workers.rollout.vllm_rollout.importing:import_vllm" in server.workers
    assert "verl.workers.megatron_workers" not in server.general
    prestart.fork_server_of(config("critic.strategy=megatron"))
    assert "verl.workers.megatron_workers" in started[1].general


@pytest.mark.parametrize(
    "word",
    [
        "ray_kwargs.fork_workers=false", "ray_kwargs.fork_workers=1", "trainer.device=npu",
        "ray_kwargs.ray_init.address=auto", "ray_kwargs.ray_init.runtime_env.pip=[x]",
        "ray_kwargs.ray_init.include_dashboard=true", "ray_kwargs.ray_init=3", "trainer=null",
    ],
)  # fmt: skip
def test_ray_starts_the_processes_where_forks_are_not_wanted_or_impossible(started, word):
    assert prestart.fork_server_of(config(word)) is None and not started


def test_without_room_for_its_sockets_ray_starts_the_processes(monkeypatch, caplog):
    def fail(*arguments, **options):
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(prestart, "ForkServer", fail)
    prestart.start_early(CPU)
    assert prestart.fork_server_of(config()) is None and "AF_UNIX path too long" in caplog.text


def refusals(**changes):
    chosen = {"fork_workers": True, "device": "cpu", "ray_init": {"address": "local", "num_cpus": 2}} | changes
    cluster = TrainingRayConfig(ray_init=chosen["ray_init"], fork_workers=chosen["fork_workers"])
    profiler = SimpleNamespace(tool=chosen.get("tool"))
    run = SimpleNamespace(
        ray_kwargs=cluster, trainer=SimpleNamespace(device=chosen["device"]), global_profiler=profiler
    )
    return [str(violation) for violation in fork_rules(run)]


def test_what_is_refused_by_name(monkeypatch):
    assert not refusals()
    joined = {"address": "10.0.0.1:6379"}
    cases = [
        ({"device": "npu"}, "needs trainer.device=cpu or cuda, not npu: write false or null"),
        ({"device": "cuda", "tool": "nsys"}, "and global_profiler.tool=nsys: write false or null"),
        ({"ray_init": joined}, "ray_kwargs.ray_init.address=10.0.0.1:6379 names a cluster: write false or null"),
        ({"ray_init": {"runtime_env": {"pip": ["x"]}}}, "or remove ray_kwargs.ray_init.runtime_env"),
        ({"ray_init": {"_system_config": {"a": 1}}}, "or remove ray_kwargs.ray_init._system_config"),
        ({"ray_init": {"include_dashboard": True}}, "or remove ray_kwargs.ray_init.include_dashboard"),
    ]
    for changes, message in cases:
        (found,) = refusals(**changes)
        assert message in found and "ray_kwargs.fork_workers" in found
        assert not refusals(**changes, fork_workers=False) and not refusals(**changes, fork_workers=None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    (found,) = refusals(ray_init=None)
    assert "environment variable RAY_ADDRESS=auto names a cluster" in found and not refusals()
    monkeypatch.setattr(rules, "has_accelerators", lambda: True)
    assert "needs a machine without accelerators" in refusals()[0] and not refusals(device="cuda")
    monkeypatch.setattr(rules, "has_accelerators", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in refusals()[0]
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    (found,) = refusals()
    assert "this process has started Ray before" in found


@pytest.mark.parametrize(
    ("word", "has_engine", "last"),
    [
        (ON, True, (1, 1)),
        ("actor_rollout_ref.rollout.mode=async", True, (None, 1)),  # agent loops are processes too
        ("actor_rollout_ref.rollout.name=sglang", False, (None, 1)),
        ("actor_rollout_ref.hybrid_engine=false", False, (None, None)),  # the engines are in other worker groups
        ("reward_model.enable_resource_pool=true", True, (None, None)),
    ],
)
def test_other_engines_and_pools(started, word, has_engine, last):
    assert prestart.fork_server_of(config(word)) is started[0]
    assert bool(started[0].workers) == has_engine and started[0].last == last
    assert prestart.fork_server_of(config(word), has_own_runner=True).last == (None, None)


def test_on_a_gpu_only_the_trainer_starts_from_the_server(started, monkeypatch, caplog):
    monkeypatch.setattr(rules, "has_accelerators", lambda: True)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cuda = "trainer.device=cuda"
    server = prestart.fork_server_of(config(cuda, "actor_rollout_ref.actor.strategy=megatron"))
    assert server.only_first and not server.workers and server.last == (None, None)
    assert server.assumed == {"OMP_NUM_THREADS": "1"} and "OMP_NUM_THREADS" not in server.environment
    assert "verl.workers.megatron_workers" in server.general
    for word in (OFF, "global_profiler.tool=nsys"):  # nsys starts the trainer
        assert prestart.fork_server_of(config(cuda, word)) is None
    assert prestart.fork_server_of(config(cuda), has_own_runner=True) is None and not caplog.text
    assert prestart.fork_server_of(config(cuda, ON), has_own_runner=True) is None
    assert "ray_kwargs.fork_workers=true has no effect" in caplog.text
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # Ray would hide the devices from the trainer
    assert prestart.fork_server_of(config(cuda)) is None and len(started) == 1
    assert "unset the environment variable RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" in refusals(device="cuda")[0]


def test_an_early_start_is_used_if_the_configuration_agrees(started, monkeypatch):
    prestart.start_early(CPU)
    assert prestart.fork_server_of(config()) is started[0] and len(started) == 1
    prestart.start_early(CPU)
    assert prestart.fork_server_of(config("trainer.n_gpus_per_node=2")) is started[2] and started[1].stopped
    prestart.start_early(CPU)
    assert prestart.fork_server_of(config("trainer.device=npu")) is None and started[3].stopped
    prestart.start_early([*CPU, ON])
    assert prestart.fork_server_of(config(ON)) is started[4] and not started[4].stopped
    served = "actor_rollout_ref.rollout.mode=async"
    for words in ([], CPU[:-1], CPU[1:], [*CPU, OFF], [*CPU, served], [*CPU, "--help"]):
        prestart.start_early(words)
    monkeypatch.setattr(prestart, "has_accelerators", lambda: True)
    prestart.start_early(CPU)
    assert len(started) == 5
