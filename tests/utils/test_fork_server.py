"""The fork server with small modules: what a fork is, when the process starts by itself, and when the server ends."""

import contextlib
import json
import os
import resource
import subprocess
import sys

import psutil
import pytest

from tests.waiting import wait_until
from verl.utils.fork_server import client
from verl.utils.fork_server.starter import ForkServer

REPORT = """
import json, os, resource, signal, sys
def inherits(handle):
    try:
        return os.get_inheritable(handle)
    except OSError:
        return False
json.dump({
    "parent": os.getppid(), "group": os.getpgid(0), "argv": sys.argv, "folder": os.getcwd(), "main": __name__,
    "file": sys.modules["__main__"].__file__, "path": sys.path, "environment": dict(os.environ),
    "has": "preloaded" in sys.modules, "read": getattr(sys.modules.get("preloaded"), "READ", None),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "inherited": [handle for handle in range(3, 100) if inherits(handle)],
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
}, sys.stdout)
sys.stdout.flush()
if sys.argv[-1] == "exit": sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the modules ``preloaded`` and ``threaded`` and the scripts of a worker."""
    (tmp_path / "preloaded.py").write_text("import os\nREAD = os.environ.get('READ_AT_IMPORT')\n")
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "ray.py").write_text("import os\nJOB = os.environ['RAY_JOB_ID']\n")
    (tmp_path / "default_worker.py").write_text(REPORT)
    (tmp_path / "setup_worker.py").write_text("raise SystemExit('Ray would set up the environment here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def command(started, folder, *words):
    return [*started.worker_command(), str(folder / "default_worker.py"), *words]


def report_of(words, cwd, **variables):
    """Run a command whose output outlives it: the fork writes it, and the client ends before."""
    environment = {**os.environ, "RAY_JOB_ID": "1", **variables}
    with subprocess.Popen(words, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, errors = process.communicate()  # until the fork has closed the streams too
    assert out, errors.decode()
    return json.loads(out)


def wait_for_end(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_fork_is_what_the_command_would_have_become(folder):
    with ForkServer(os.environ, ["preloaded"], ["ray"]) as started:
        got = report_of(command(started, folder, "--a=b"), folder, RANK="3", RAY_LOCAL_WORLD_SIZE="2")
        assert got["has"] and got["parent"] == started._process.pid != got["group"]
        assert got["argv"] == [str(folder / "default_worker.py"), "--a=b"] and got["main"] == "__main__"
        assert got["file"] == got["argv"][0] and got["path"][0] == str(folder)
        assert got["folder"] == str(folder) and got["environment"]["RANK"] == "3"
        assert got["interrupt"] and got["terminate"] and got["blocked"] == []
        plain = report_of([sys.executable, *got["argv"]], folder, RANK="3", RAY_LOCAL_WORLD_SIZE="2")
        for report in (got, plain):
            report["environment"].pop("PWD", None)  # the shell sets it
        assert got["environment"] == plain["environment"]
        assert set(plain["path"]) <= set(got["path"])


@pytest.mark.parametrize(
    ("first", "variables"),
    [(["preloaded"], {"READ_AT_IMPORT": "1"}), (["preloaded"], {"RAY_JOB_ID": "2"}), (["threaded"], {})],
    ids=["a variable", "another cluster", "a thread"],
)
def test_a_process_that_no_fork_can_stand_for_starts_by_itself(folder, first, variables):
    with ForkServer(os.environ, first, ["ray"]) as started:
        words = command(started, folder)
        assert report_of(words, folder)["has"] == ("threaded" not in first)  # the first one settles the cluster
        got = report_of(words, folder, **variables)
        assert not got["has"] and got["parent"] != started._process.pid
        assert all(got["environment"][name] == value for name, value in variables.items())
    got = report_of([sys.executable, client.__file__, "/nowhere", sys.executable, words[-1]], folder)
    assert not got["has"], "without a server"


def test_forks_have_what_a_process_has(folder):
    """Variables with names that no shell assigns to, limits of the process that Ray has started, what imports set."""
    (folder / "preloaded.py").write_text("import os\nos.environ.update(SET_AT_IMPORT='1', GIVEN='2')\n")
    odd = {"my.setting": "1", "BASH_FUNC_module%%": "() { :; }", "GIVEN": "3"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ForkServer({**os.environ, **odd}, ["preloaded"], ["ray"]) as started:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            got = report_of(command(started, folder), folder, **odd)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert got["has"] and got["files"] == [soft - 1, hard] and got["inherited"] == []
        assert {name: got["environment"].get(name) for name in odd} == odd
        assert got["environment"]["SET_AT_IMPORT"] == "1"


def test_forks_draw_random_numbers_of_their_own(folder):
    draws = "import json, os, random, numpy, torch\n"
    draws += "numbers = [random.random(), numpy.random.rand(), torch.rand(()).item()]\n"
    draws += "print(json.dumps({'numbers': numbers, 'parent': os.getppid()}), flush=True)\n"
    (folder / "default_worker.py").write_text(draws)
    with ForkServer(os.environ, ["torch", "numpy"], ["ray"]) as started:
        first, second = (report_of(command(started, folder), folder) for _ in range(2))
        assert first["parent"] == second["parent"] == started._process.pid
    assert not set(first["numbers"]) & set(second["numbers"])


def test_a_process_starts_by_itself_where_the_system_refuses_a_fork(folder):
    (folder / "full.py").write_text("import os\ndef fork():\n    raise BlockingIOError\nos.fork = fork\n")
    with ForkServer(os.environ, ["full"], ["ray"]) as started:
        for _ in range(2):
            got = report_of(command(started, folder), folder)
            assert not got["has"] and got["parent"] == os.getpid()
        assert started._process.poll() is None


def test_a_server_with_threads_ends(folder):
    with ForkServer(os.environ, ["threaded"], ["ray"], ["preloaded"]) as started:
        started._process.wait()
        got = report_of(command(started, folder), folder, WG_BACKEND="ray")
        assert not got["has"] and got["parent"] == os.getpid()


def test_workers_come_from_a_server_that_has_imported_more(folder):
    with ForkServer(os.environ, [], ["ray"], ["preloaded"]) as started:
        words = command(started, folder)
        general = report_of(words, folder)
        worker = report_of(words, folder, WG_BACKEND="ray")
    assert not general["has"] and worker["has"]
    assert general["parent"] == started._process.pid != worker["parent"]
    wait_for_end(worker["parent"])  # with the other server


def test_what_every_process_needs_is_imported_once(folder):
    """Before the servers part, so that their processes share it; and whoever asks first."""
    (folder / "shared.py").write_text(
        "import os\nopen(os.path.join(os.path.dirname(__file__), 'imports'), 'a').write('x')\n"
    )
    for first in ("general", "workers"):
        (folder / "imports").unlink(missing_ok=True)
        with ForkServer(os.environ, [], ["ray", "shared"], ["preloaded"]) as started:
            words = command(started, folder)
            kinds = {"general": {}, "workers": {"WG_BACKEND": "ray"}}
            got = {
                kind: report_of(words, folder, **kinds[kind]) for kind in sorted(kinds, key=lambda kind: kind != first)
            }
            assert got["workers"]["has"] and not got["general"]["has"]
            assert got["general"]["parent"] == started._process.pid
        assert (folder / "imports").read_text() == "x"


def test_a_server_becomes_the_last_of_its_workers(folder):
    with ForkServer(os.environ, [], ["ray"], ["preloaded"], last_of_workers=2) as started:
        words = command(started, folder)
        first, last, late = (report_of(words, folder, WG_BACKEND="ray", RANK=rank) for rank in "012")
    assert first["has"] and last["has"] and not late["has"]
    assert last["parent"] == started._process.pid != first["parent"] and late["parent"] == os.getpid()
    assert [each["environment"]["RANK"] for each in (first, last, late)] == ["0", "1", "2"]
    assert last["interrupt"] and last["terminate"] and last["argv"] == first["argv"]


def test_a_server_becomes_the_last_of_all_other_processes_too(folder):
    with ForkServer(os.environ, ["preloaded"], ["ray"], ["threaded"], last_of_general=1) as started:
        words = command(started, folder)
        last, late = (report_of(words, folder, RANK=rank) for rank in "01")
    assert last["has"] and last["parent"] == os.getpid() and not late["has"]


def test_a_server_for_the_first_process_becomes_it(folder):
    """It may have threads, and has imported with variables that Ray sets later, if the process does."""
    for given, read in (({}, "assumed"), ({"READ_AT_IMPORT": "given"}, "given")):
        environment = {**os.environ, **given}
        only_first = {"only_first": True, "assumed": {"READ_AT_IMPORT": "assumed"}}
        with ForkServer(environment, ["preloaded", "threaded"], ["ray"], **only_first) as started:
            words = command(started, folder)
            first, late = (report_of(words, folder, RANK=rank, **given) for rank in "01")
            assert started._process.wait() == 0
        assert (
            first["has"]
            and first["read"] == read
            and first["environment"].get("READ_AT_IMPORT") == given.get("READ_AT_IMPORT")
        )
        assert first["parent"] == late["parent"] == os.getpid() and not late["has"]
        assert first["environment"]["RANK"] == "0" and first["interrupt"] and first["terminate"]


@pytest.mark.parametrize("variables", [{"READ_AT_IMPORT": "1"}, {"WG_BACKEND": "ray"}], ids=["a variable", "a worker"])
def test_a_server_for_the_first_process_is_not_there_for_another(folder, variables):
    with ForkServer(os.environ, ["preloaded"], ["ray"], only_first=True) as started:
        words = command(started, folder)
        assert not report_of(words, folder, **variables)["has"]
        assert started._process.wait() == 0
        assert not report_of(words, folder)["has"]


def test_what_is_absent_is_there_when_a_process_starts(folder):
    (folder / "asks.py").write_text("try:\n    import preloaded\nexcept ImportError:\n    FOUND = False\n")
    (folder / "default_worker.py").write_text(
        "import asks, json, preloaded, sys\nprint(json.dumps([asks.FOUND, preloaded.__name__]), flush=True)\n"
    )
    with ForkServer(os.environ, ["asks"], ["ray"], absent=["preloaded"]) as started:
        assert report_of(command(started, folder), folder) == [False, "preloaded"]


def test_the_servers_end_with_the_raylet_and_take_those_along_that_ask_for_it(folder):
    (folder / "default_worker.py").write_text(
        "import os, time\nfrom verl.utils.process.lifetime import die_with_parent\n"
        "die_with_parent()\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)\n"
    )
    raylet = "import subprocess, sys, time\nsubprocess.Popen(sys.argv[1:])\ntime.sleep(600)\n"
    with ForkServer(os.environ, ["verl.utils.process.lifetime"], ["ray"]) as started:
        words = [sys.executable, "-c", raylet, *command(started, folder)]
        environment = {**os.environ, "RAY_JOB_ID": "1"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=folder) as fake:
            fork, parent = map(int, fake.stdout.readline().split())
            assert parent == started._process.pid
            fake.kill()
        started._process.wait()
        wait_for_end(fork)


def test_what_the_client_reads_of_a_runtime_environment():
    python = "/usr/bin/python"

    def parsed(**context):
        words = [python, "/ray/setup_worker.py", "/ray/default_worker.py", "--x=1", "--language=PYTHON"]
        return client.plain_worker([*words, client._CONTEXT + json.dumps(context)])

    plain = {"command_prefix": [], "env_vars": {"A": "1"}, "py_executable": python, "override_worker_entrypoint": None}
    assert parsed(**plain) == (["/ray/default_worker.py", "--x=1"], {"A": "1"})
    assert client.plain_worker([python, "/ray/default_worker.py"]) == (["/ray/default_worker.py"], {})
    assert parsed(**plain | {"command_prefix": ["conda"]}) is None
    assert parsed(**plain | {"py_executable": "/other/python"}) is None
    assert client.with_variables({"A": "0"}, {"A": "${A}:1"}) is None
    assert client.with_variables({"A": "0"}, {"A": "1"}) == {"A": "1"}


def test_the_folder_goes_when_the_launching_process_is_killed(folder):
    code = (
        "import os, psutil, sys, time\nfrom verl.utils.fork_server.starter import ForkServer\n"
        "from verl.utils.process.lifetime import end_with_this_process\n"
        "started = ForkServer(os.environ, [])\n"
        "end_with_this_process(psutil.Process().children(recursive=True))\n"  # as a launch ends its Ray
        "print(started._folder.path, started._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        place, server = process.stdout.readline().split()
        assert os.path.exists(place)
        process.kill()
    wait_for_end(int(server))
    wait_until(lambda: not os.path.exists(place))
