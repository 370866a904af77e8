import gc
import inspect
import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from omegaconf import OmegaConf

from tests.special_e2e.conftest import leftovers
from verl.base_config import ConfigError, Violation
from verl.errors import CallSite, MissingFile, WrongInput
from verl.single_controller.ray.worker_group import Seat, explain
from verl.trainer import constants_ppo, preflight
from verl.trainer.config.problems import brief
from verl.trainer.config.run_config import RayConfig, RunConfig
from verl.trainer.ppo.metric_utils import describe_step
from verl.trainer.ppo.utils import Role, _say_once, need_critic
from verl.trainer.run import environment as environment_checks
from verl.trainer.run import inputs, launch, refusal
from verl.trainer.run.clock import StartupClock
from verl.trainer.run.display import LocalDisplay, Progress, RemoteDisplay, Terminal, _Warnings
from verl.trainer.run.variables import MEGATRON_ENV_VARS
from verl.utils.device import get_device_name
from verl.utils.engine_arguments import ray_arguments
from verl.utils.observe.activity import Activity, ActivityFile
from verl.utils.process import lifetime
from verl.workers.config.model import path_problems


def test_the_launching_process_needs_neither_torch_nor_transformers():
    code = (
        "import sys, verl.trainer.main_ppo, verl.trainer.preflight, verl.trainer.run.launch\n"
        "print([name for name in ('torch', 'transformers', 'tensordict', 'vllm') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- files


def write_rows(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def data_config(train, val, **data):
    keys = {"train_files": train, "val_files": val, "prompt_key": "prompt", "train_batch_size": 2}
    return RunConfig.parse(OmegaConf.create({"data": keys | data}))


def check_training_files(run):
    findings = refusal.Findings()
    preflight.check_data(run.data, "data.train_files", run.data.train_paths, findings)
    findings.refuse()


def test_data_files_are_read_to_their_footer(tmp_path):
    good = write_rows(tmp_path / "good.parquet", prompt=["a", "b", "c"])
    for config in (data_config(good, [good]), data_config([good, good], None, train_batch_size=6)):
        check_training_files(config)
    check_training_files(data_config("hdfs://x/y.parquet", good))
    preflight.check_files(data_config("nowhere", None, custom_cls={"path": "my.py"}))
    (tmp_path / "text.parquet").write_text("no parquet")
    cases = [
        (str(tmp_path / "text.parquet"), "data.train_files=.*text.parquet: cannot be read as parquet"),
        (write_rows(tmp_path / "other.parquet", question=["a"]), r"no column 'prompt'.*\['question'\]"),
        (write_rows(tmp_path / "empty.parquet", prompt=pa.array([], pa.string())), "has no row"),
        (write_rows(tmp_path / "one.parquet", prompt=["a"]), "1 rows in all, fewer than data.train_batch_size=2"),
    ]
    for path, text in cases:
        with pytest.raises(WrongInput, match=text):
            check_training_files(data_config(path, good))


def write_safetensors(path, cut=0):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16)
    path.write_bytes(content[: len(content) - cut])


def test_model_folders_must_hold_whole_weights(tmp_path):
    key, weights = "actor_rollout_ref.model.path", tmp_path / "model.safetensors"
    inputs.check_model(key, "Qwen/Qwen2.5-0.5B")  # the hub is not asked
    with pytest.raises(MissingFile, match="holds no weights"):
        inputs.check_model(key, str(tmp_path))
    for cut, text in ((1, "is cut short: "), (30, "cut short in its header"), (1000, "not a safetensors file")):
        write_safetensors(weights, cut)
        with pytest.raises(WrongInput, match=text):
            inputs.check_model(key, str(tmp_path))
    write_safetensors(weights)
    inputs.check_model(key, str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(MissingFile, match=r"missing: \['gone.safetensors'\]"):
        inputs.check_model(key, str(tmp_path))


# ---- Ray


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": "float17"}, 'torch_dtype="float17", which must be one of float32'),
        ({"text_config": {"dtype": 16}}, "dtype=16, which must be one of float32"),
        ({"hidden_size": "large"}, 'hidden_size="large", which must be an integer of 1 or more'),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000, which must be"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3, which must divide"),
    ],
)
def test_a_config_that_no_model_can_have(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | changes))
    (problem,) = path_problems(str(tmp_path))
    assert f"{tmp_path}/config.json has {message}" in problem
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": "torch.bfloat16"}))
    assert not list(path_problems(str(tmp_path)))
    os.mkfifo(tmp_path / "model.safetensors")
    assert "is a named pipe" in next(path_problems(str(tmp_path)))


@pytest.mark.parametrize(
    "options, environment, expected",
    [
        ({}, None, {"address": "local", "include_dashboard": False}),
        ({"num_cpus": 3, "include_dashboard": True}, None, {"num_cpus": 3, "include_dashboard": True}),
        ({"address": "10.0.0.1:6379", "num_cpus": None}, None, {"address": "10.0.0.1:6379"}),
        ({}, "10.0.0.1:6379", {"address": None}),
    ],
)
def test_ray_is_local_unless_an_address_is_given(monkeypatch, tmp_path, options, environment, expected):
    seen = {}
    monkeypatch.setattr(launch.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launch.ray, "init", lambda **kwargs: seen.update(kwargs))
    monkeypatch.setattr(launch, "LogForwarder", lambda: seen.update(forwards_lines=True))
    monkeypatch.setattr(launch, "_log_forwarder", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(environment_checks.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert launch.start_ray("cpu", RayConfig(ray_init=options))
    private = tmp_path / f"verl-{os.getuid()}"
    assert seen.get("_temp_dir") == (str(private / "ray") if seen["address"] == "local" else None)
    assert private.exists() == (seen["address"] == "local")
    assert {name: seen[name] for name in expected} == expected
    assert ("num_cpus" in seen) == (options.get("num_cpus") is not None)
    assert ("forwards_lines" in seen) == (seen["address"] == "local" and not seen["include_dashboard"])


def test_an_argument_that_ray_does_not_take_is_named():
    assert ray_arguments() == inspect.signature(ray.init).parameters.keys() - {"kwargs"}
    RayConfig(ray_init={"num_cpus": 1, "runtime_env": {}, "_temp_dir": "x"})
    with pytest.raises(ValueError, match="ray_init.num_cpu=1: is no argument of ray.init; the nearest: num_cpus"):
        RayConfig(ray_init={"num_cpu": 1})


def test_the_established_path_gives_the_same_environment(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = constants_ppo.get_ppo_ray_runtime_env()
    assert environment == launch.runtime_env(get_device_name(), {}) and "NCCL_DEBUG" not in environment["env_vars"]
    assert constants_ppo.PPO_RAY_RUNTIME_ENV["env_vars"]["NCCL_DEBUG"] == "WARN"


def test_the_runtime_environment_yields_to_the_process_and_to_the_user(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = launch.runtime_env("cpu", {"env_vars": {"VLLM_LOGGING_LEVEL": "INFO"}, "pip": []})
    assert "NCCL_DEBUG" not in env["env_vars"] and env["pip"] == [] and env["working_dir"] is None
    assert env["env_vars"]["VLLM_LOGGING_LEVEL"] == "INFO" and env["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in launch.runtime_env("cuda", {})["env_vars"]


def test_only_megatron_has_one_queue_of_kernels(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in launch.runtime_env("cuda", {})["env_vars"]
    for_megatron = launch.runtime_env("cuda", {}, MEGATRON_ENV_VARS)
    assert for_megatron["env_vars"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    chosen = {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}}
    assert (
        launch.runtime_env("cuda", chosen, MEGATRON_ENV_VARS)["env_vars"]
        == for_megatron["env_vars"] | chosen["env_vars"]
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in launch.runtime_env("cuda", {}, MEGATRON_ENV_VARS)["env_vars"]
    of_jobs = yaml.safe_load((Path(launch.__file__).parents[1] / "runtime_env.yaml").read_text())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in of_jobs["env_vars"]  # it would count as the user's


def test_the_ports_of_a_user_reach_other_nodes(monkeypatch):
    monkeypatch.setenv("VERL_PORT_RANGE", "21000-21999")
    assert launch.runtime_env("cuda", {})["env_vars"]["VERL_PORT_RANGE"] == "21000-21999"


def test_ray_processes_collect_garbage_rarely_unless_the_user_has_a_hook():
    before = gc.get_threshold()
    try:
        resolve_name(launch.runtime_env("cpu", {})["worker_process_setup_hook"])()
        assert gc.get_threshold() == (50_000, *before[1:])
    finally:
        gc.set_threshold(*before)
    chosen = {"worker_process_setup_hook": "their.hook"}
    assert launch.runtime_env("cpu", chosen)["worker_process_setup_hook"] == "their.hook"


@pytest.mark.parametrize("is_started", [False, True], ids=["not started", "started, without guard"])
def test_an_interrupted_start_leaves_no_process(is_started):
    """An agent, here the grandchild, ignores the end of the raylet for a minute.

    What the caller had started before, and the guard of a folder, stay.
    """
    code = """
import subprocess, sys, psutil
from verl.trainer.run import launch
from verl.utils.process import lifetime
own = subprocess.Popen(["sleep", "600"])
earlier = lifetime.descendants()
lifetime.end_with_this_process([])
raylet = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", raylet], stdout=subprocess.PIPE)
child.stdout.readline()
below = psutil.Process(child.pid).children()
assert len(below) == 1
launch.ray.is_initialized = lambda: sys.argv[1] == "True"
launch.ray.shutdown = lambda: None
assert launch.stop_ray(earlier)
child.wait(60)
psutil.wait_procs(below, 60)
guards = [guard.poll() for guard in lifetime._guards]
print([each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below], guards, own.poll())
own.kill()
"""
    done = subprocess.run([sys.executable, "-c", code, str(is_started)], capture_output=True, text=True)
    assert done.stdout == "[False] [None] None\n", done.stderr


def test_a_failure_is_told_by_its_cause(tmp_path):
    cause = ValueError("data.train_files: no such file")
    cause.add_note("in training step 3 of 7")
    cause.add_note("--- in the worker\n  File x")
    inner = launch.ray.exceptions.RayTaskError("work", "inner trace", cause)
    outer = launch.ray.exceptions.RayTaskError("run", "Traceback\nouter trace", inner)
    message = launch.report_failure(outer, tmp_path)
    log = tmp_path / "error.log"
    assert message.splitlines() == [
        "Error: ValueError: data.train_files: no such file",
        "in training step 3 of 7",
        f"The whole trace is in {log}",
    ]
    assert "outer trace" in log.read_text()


def test_a_message_has_at_most_five_lines():
    assert brief("one\n\ntwo") == "one\ntwo"
    assert brief("\n".join(map(str, range(20)))).splitlines() == ["0", "1", "2", "3", "  ... and 16 more lines"]
    assert len(brief("x" * 5000)) < 1100


def test_a_module_that_is_not_there_ends_a_command_with_one_line():
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "no_such_module"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "VERL_USE_EXTERNAL_MODULES=no_such_module" in done.stderr and "PYTHONPATH" in done.stderr


def test_what_the_constructor_of_a_worker_raised_is_told():
    """Ray's text begins with the stack, and the exception at hand stands behind those that came before it."""
    try:
        try:
            open("/nowhere/model")
        except OSError as error:
            raise ConfigError([Violation("a", 1, "wrong"), Violation("b", 2, "wrong")]) from error
    except ConfigError as error:
        cause = launch.ray.exceptions.RayTaskError("Worker.__init__", traceback.format_exc(), error)
    error = explain(
        CallSite("pool", "actor", "init_model"),
        [Seat(0, "worker_0", None)],
        [None],
        0,
        launch.ray.exceptions.ActorDiedError(cause),
    )
    lines = launch.describe(error).splitlines()
    assert "rank 0" in lines[0] and lines[0].endswith("ConfigError: 2 problems:")
    assert lines[1:] == ["  - a=1: wrong", "  - b=2: wrong"]
    assert "/nowhere/model" in str(error)  # of the log
    assert error.args == (str(error),) and repr(error) == f"WorkerDiedError({str(error)!r})"
    again = pickle.loads(pickle.dumps(error))
    assert (again.args, again.ranks) == (error.args, (0,))
    assert [again.group, again.role, again.method] == ["pool", "actor", "init_model"]
    assert again.phase is None and again.step is None


def test_a_worker_that_the_system_killed_for_lack_of_memory_has_died(monkeypatch):
    """Ray's monitor tells its reason; the kernel only counts."""
    seats, site = [Seat(0, "worker_0", None)], CallSite("pool", "actor", "update_actor")
    monitor = launch.ray.exceptions.OutOfMemoryError("Memory on the node was 14.9GB / 15.6GB (0.955)")
    assert launch.describe(explain(site, seats, [None], 0, monitor)).startswith("WorkerDiedError: worker rank 0")
    death = launch.ray.exceptions.ActorDiedError()
    monkeypatch.setattr(lifetime, "oom_kills", lambda: 7)
    told = launch.describe(explain(site, seats, [None], 0, death, killed_before=6))
    assert told.endswith("; since then the kernel has killed a process on this machine because memory ran out")
    assert "memory" not in launch.describe(explain(site, seats, [None], 0, death, killed_before=7))


def test_stack_traces_of_other_processes_are_left_to_the_log():
    error = RuntimeError("worker rank 1 raised: RuntimeError: no\nTraceback (most recent call last):\n  File x\nlast")
    assert launch.describe(error) == "RuntimeError: worker rank 1 raised: RuntimeError: no"
    assert launch.describe(ValueError("2 problems:\n  - a\n  - b")) == "ValueError: 2 problems:\n  - a\n  - b"


# ---- what a person sees


KV = "ray.experimental.internal_kv._internal_kv"
STEP = {"critic/score/mean": 0.5, "perf/total_num_tokens": 3000, "perf/time_per_step": 2.0, "timing_s/step": 2.0}


def test_progress_lines(capsys, monkeypatch):
    monkeypatch.setenv("VERL_PROGRESS", "lines")
    clock = iter([0.0, 10.0, 13.0])
    monkeypatch.setattr("verl.trainer.run.display.time.monotonic", lambda: next(clock))
    progress = Progress(10, 4, describe_step)
    progress.note({"val-core/gsm8k/acc/mean@1": 0.25})
    progress.update(5, STEP)
    assert capsys.readouterr().out == (
        "step 5/10 | reward 0.500 | validation 0.250 | 1,500 tokens/s | 2.00 s | 0:00:15 left\n"
    )
    monkeypatch.setenv("VERL_PROGRESS", "loud")
    with pytest.raises(ValueError, match="VERL_PROGRESS='loud'"):
        LocalDisplay()


def test_a_bar_moves_below_the_lines(capsys, monkeypatch):
    monkeypatch.setenv("VERL_PROGRESS", "bar")
    display = LocalDisplay()
    monkeypatch.setattr("verl.trainer.run.display._display", display)
    progress = Progress(10, 4, describe_step)
    display.write("a line")
    progress.update(5, STEP)
    progress.close()
    display.write("another")
    out, err = capsys.readouterr()
    assert "a line" in out and out.endswith("another\n")
    last = err.split("\r")[-1]
    assert "training  50% |" in last and "5/10" in last and "left, reward 0.500 | 1,500 tokens/s" in last


WRITING = """
import sys
from verl.trainer.run.display import LocalDisplay
from verl.utils.observe.console import get_console, write_line
for mode in ("lines", "bar"):
    display = LocalDisplay(mode)
    for step in range(3):
        display.progress(step, 2, 0, "x", 1.0)
        display.write("a line")
    get_console().info("a line of the console")
    display.close()
write_line("the last words", "stderr")
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("streams", "place"),
    [("1", "/dev/full"), ("2", "/dev/full"), ("12", "/dev/full"), ("1", "pipe:"), ("12", "closed")],
)
def test_a_line_that_cannot_be_written_does_not_end_a_run(streams, place):
    """The process goes on and ends with its own code; a warning names the path, if any stream can show it."""
    reader, broken = os.pipe()
    os.close(reader)
    words = {"/dev/full": ">/dev/full", "pipe:": f">&{broken}", "closed": ">&-"}
    redirected = " ".join(f"{number}{words[place]}" for number in streams)
    command = ["bash", "-c", f'exec "$@" {redirected}', "bash", sys.executable, "-c", WRITING]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=[broken])
    os.close(broken)
    assert done.returncode == 7, done.stderr
    if streams == "1":
        assert "Traceback" not in done.stderr and "the last words" in done.stderr
        warnings = [line for line in done.stderr.splitlines() if "some lines cannot be written to" in line]
        assert len(warnings) == 2 and all(f"written to {place}" in line for line in warnings)  # one for each display
    if streams == "2":
        assert done.stdout.count("a line\n") == 6


def test_a_note_of_the_phase_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    notes = ActivityFile(tmp_path / "activity.json")
    notes.write(Activity(1, "host", "in phase generate"))
    (tmp_path / "activity.new").symlink_to("/dev/full")
    for phase in ("a", "b"):
        notes.write(Activity(1, "host", phase))
    assert notes.read() == Activity(1, "host", "in phase generate")
    assert caplog.text.count(f"{tmp_path / 'activity.new'} cannot be written (No space left on device)") == 1


def test_the_log_of_an_earlier_failure_does_not_stay_beside_a_success(tmp_path):
    launch.set_error_log_aside(tmp_path)
    launch.report_failure(ValueError("x"), tmp_path)
    launch.set_error_log_aside(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["error.previous.log"]


def test_what_the_trainer_sends_arrives_in_order(capsys, monkeypatch):
    store = {}
    monkeypatch.setenv("VERL_PROGRESS", "lines")
    monkeypatch.setattr(f"{KV}_put", lambda key, value, namespace: store.update({key: value}))
    monkeypatch.setattr(f"{KV}_get", lambda key, namespace: store.get(key))
    monkeypatch.setattr(f"{KV}_del", lambda key, namespace: store.pop(key))
    receiver = Terminal(LocalDisplay())
    sender = RemoteDisplay(receiver.name)
    handler = _Warnings(sender)
    sender.write("one")
    handler.handle(logging.LogRecord("verl.x", logging.WARNING, "x.py", 1, "two %d", (2,), None))
    handler.handle(logging.LogRecord("verl.x", logging.ERROR, "x.py", 1, "the end", (), None))
    receiver.show()
    sender.progress(5, 10, 4, "reward 0.5", 2.0)
    receiver.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["one", "WARNING: two 2"] and lines[2].startswith("step 5/10 | reward 0.5 | 2.00 s")
    assert len(lines) == 3 and not store


def test_lines_of_two_threads_do_not_overwrite_each_other(monkeypatch):
    """The second line comes while the first is on its way to the store, and waits for it."""
    store, second = {}, []

    def put(key, value, namespace):
        if not second:
            second.append(threading.Thread(target=sender.write, args=("two",)))
            second[0].start()
            second[0].join(timeout=0.2)
        store[key] = value

    monkeypatch.setattr(f"{KV}_put", put)
    sender = RemoteDisplay("x")
    sender.write("one")
    second[0].join()
    assert sorted(store) == [b"x:0", b"x:1"]


def test_startup_parts_add_up(capsys):
    clock = StartupClock()
    for name, at in (("launch", 10.0), ("imports", 11.5), ("workers", 15.0), ("first_step", 18.0)):
        clock.mark(name, at)
    spans = clock.report()
    assert spans == {f"timing_s/startup/{n}": s for n, s in zip(("imports", "workers", "first_step", "total"),
                                                               (1.5, 3.5, 3.0, 8.0), strict=True)}  # fmt: skip
    assert "8.0 s (imports 1.5, workers 3.5, first_step 3.0)" in capsys.readouterr().out
    clock.mark("first_step")
    assert clock.report() == {}


# ---- roles


def test_roles_and_their_names():
    assert [str(role) for role in Role] == "actor rollout actor_rollout critic ref rm actor_rollout_ref".split()
    assert [role.value for role in Role] == list(range(7))
    assert Role.from_string("Actor_Rollout") is Role.ActorRollout
    with pytest.raises(ValueError, match="no role 'judge'"):
        Role.from_string("judge")


@pytest.mark.parametrize(
    "enable, estimator, needed", [(None, "gae", True), (None, "grpo", False), (True, "grpo", True)]
)
def test_who_needs_a_critic(enable, estimator, needed, caplog):
    config = SimpleNamespace(critic=SimpleNamespace(enable=enable), algorithm=SimpleNamespace(adv_estimator=estimator))
    _say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert need_critic(config) is needed
    assert ("no critic" in caplog.text) is (not needed)


def test_the_token_of_ray_is_private(tmp_path, monkeypatch):
    """In the home folder, or in the environment where there is none."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    launch.protect_token()
    made = file.read_text()
    file.chmod(0o644)  # as Ray makes it
    launch.protect_token()
    assert file.read_text() == made and len(made) == 64 and file.stat().st_mode & 0o777 == 0o600
    assert [file] == [*file.parent.iterdir()] and "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setenv("HOME", "/dev/null/none")
    monkeypatch.setattr(launch.envs, "write", lambda values: [monkeypatch.setenv(*pair) for pair in values.items()])
    launch.protect_token()
    token = os.environ["RAY_AUTH_TOKEN"]
    launch.protect_token()
    assert len(token) == 64 and os.environ["RAY_AUTH_TOKEN"] == token


def test_a_local_cluster_inherits_secrets_instead_of_writing_them_down(monkeypatch):
    written = {}
    monkeypatch.setattr(launch.envs, "write", written.update)
    env_vars = {"HF_TOKEN": "abcdef", "NCCL_DEBUG": "WARN", "PROXY": "http://me:password@host"}
    launch.inherit_secrets(env_vars)
    assert env_vars == {"NCCL_DEBUG": "WARN"} and written["HF_TOKEN"] == "abcdef" and "password" in written["PROXY"]


@pytest.mark.parametrize("place", ["_temp_dir", "RAY_TMPDIR", "TMPDIR"])
def test_a_folder_that_the_user_has_chosen_is_that_of_ray(monkeypatch, tmp_path, place):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert environment_checks.private_ray_folder(RayConfig(ray_init={})) is not None
    if place != "_temp_dir":
        monkeypatch.setenv(place, str(tmp_path))
    options = {"_temp_dir": str(tmp_path)} if place == "_temp_dir" else {}
    assert environment_checks.private_ray_folder(RayConfig(ray_init=options)) is None


def test_the_folder_around_that_of_ray_is_closed_to_others(monkeypatch, tmp_path):
    folder = tmp_path / "verl-1"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for _ in range(2):  # an open one, and one that is closed already
        environment_checks.make_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    other = tmp_path / "other"
    environment_checks.make_private(other)
    assert other.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(WrongInput, match=f"{name}, where Ray would keep its files, is no folder of this user: rem"):
            environment_checks.make_private(tmp_path / name)
    monkeypatch.setattr(environment_checks.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(WrongInput, match="is no folder of this user"):
        environment_checks.make_private(folder)
    with pytest.raises(WrongInput, match="set RAY_TMPDIR to a folder of your own"):
        environment_checks.make_private(tmp_path / "missing" / "verl-1")
    monkeypatch.setattr(environment_checks.tempfile, "gettempdir", lambda: f"/tmp/{'x' * 120}")
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WrongInput, match="bytes too long: Ray keeps sockets in it"):
        environment_checks.check_ray_folder(RayConfig(ray_init={}))


@pytest.mark.slow
def test_a_local_cluster_uses_the_memory_of_a_freed_object_at_once():
    """Without waiting for others, or for the period after which Ray frees what it has collected (an hour here)."""
    code = (
        "import time, numpy, ray\n"
        "from verl.trainer.config.run_config import RayConfig\n"
        "from verl.trainer.run.launch import start_ray\n"
        "system = {'free_objects_period_milliseconds': 3_600_000}\n"
        "start_ray('cpu', RayConfig(ray_init={'num_cpus': 1, '_system_config': system}))\n"
        "used = []\n"
        "while len(used) == len(set(used)) < 50:\n"
        "    used.append(ray.get(ray.put(numpy.zeros(2**20))).ctypes.data)\n"
        "    time.sleep(0.1)\n"
        "ray.shutdown()\n"
        "assert len(set(used)) < 50, used\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_local_cluster_is_closed_to_others_and_ends_with_its_launch():
    """All that listens is on 127.0.0.1 only. After SIGKILL, Ray's agents alone would stay for a minute.

    It has only the processes that a run uses, and the launching process shows what its workers write.
    """
    code = (
        "import json, os, psutil, ray, sys, threading\n"
        "from ray._private.ray_logging import global_worker_stdstream_dispatcher\n"
        "from verl.trainer.config.run_config import RayConfig\n"
        "from verl.trainer.run.launch import start_ray\n"
        "start_ray('cpu', RayConfig(ray_init={'num_cpus': 1, 'include_dashboard': False}))\n"
        "seen = threading.Event()\n"
        "told = lambda batch: 'a line of a worker' in batch['lines'] and seen.set()\n"
        "global_worker_stdstream_dispatcher.add_handler('test', told)\n"
        "ray.get(ray.remote(lambda: print('a line of a worker')).remote())\n"
        "assert seen.wait(300)\n"
        "family = [psutil.Process(), *psutil.Process().children(recursive=True)]\n"
        "ports = [(each.laddr.ip, process.name()) for process in family for each in process.net_connections()\n"
        "         if each.status == psutil.CONN_LISTEN]\n"
        "heavy = sorted({'pyarrow', 'numpy', 'grpc', 'aiohttp', 'opentelemetry', 'torch'} & {*sys.modules})\n"
        "folder = os.path.dirname(ray._private.worker._global_node.get_session_dir_path())\n"
        "private = os.path.dirname(folder)\n"
        "assert folder.endswith(f'/verl-{os.getuid()}/ray') and os.stat(private).st_mode & 0o777 == 0o700\n"
        "print(json.dumps([ports, [' '.join(each.cmdline()) for each in family[1:]], heavy]))\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    pipe = subprocess.PIPE
    usual = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "RAY_TMPDIR")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, start_new_session=True, env=usual
    ) as run:
        out, errors = run.communicate()
    assert run.returncode == -9, errors.decode()
    assert not leftovers(run.pid, patience_s=15)
    ports, commands, heavy = json.loads(out.splitlines()[-1])
    assert not heavy, "the launching process only waits"
    unused = ("dashboard", "log_monitor", "autoscaler", "DashboardAgent")
    assert not [each for each in commands if any(name in each for name in unused) and "raylet" not in each], commands
    assert ports and {ip.removeprefix("::ffff:") for ip, _ in ports} == {"127.0.0.1"}, ports


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("data.seed=x: is no number"), 2, "error in the configuration: data.seed=x: is no number"),
        (
            FileNotFoundError("train.parquet: is not there"),
            2,
            "error in the configuration: train.parquet: is not there",
        ),
        (KeyError("seed"), 1, "Error: a check before the start has a bug, please report it: KeyError: 'seed'"),
    ],
)
def test_a_bug_of_a_check_is_not_called_a_wrong_input(capsys, error, code, message):
    def check():
        raise error

    with pytest.raises(SystemExit) as left:
        refusal.checked(check)
    told = capsys.readouterr().err
    assert left.value.code == code
    assert told.strip().splitlines()[-1] == message
    assert ("Traceback" in told) == (code == 1)
