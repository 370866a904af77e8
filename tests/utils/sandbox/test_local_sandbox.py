"""Real programs try what the sandbox allows and forbids, with the real kernel."""

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from verl.errors import SandboxError
from verl.utils.sandbox import Test, isolation_problem, local, run_tests
from verl.utils.sandbox.folder import empty_folder, is_too_full

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"no isolation here: {isolation_problem()}")


def run(code, stdin="", **limits):
    return run_tests(code, [Test(stdin)], **{"timeout_s": 5.0} | limits)[0]


def test_a_program_reads_writes_and_ends():
    result = run("import sys\nprint(int(input()) + 1, file=sys.stdout)\nprint('e', file=sys.stderr)", stdin="41\n")
    assert (result.status, result.stdout, result.stderr, result.code) == ("ok", "42\n", "e\n", 0)
    assert run("raise SystemExit(3)").code == 3 and run("raise SystemExit(3)").status == "runtime error"
    failing = run("print('before')\n1 / 0")
    assert failing.stdout == "before\n" and 'File "<solution>", line 2' in failing.stderr
    assert "supervisor" not in failing.stderr
    assert run("def f(:").status == "compile error"
    assert run("import ctypes; ctypes.string_at(0)").code == -11  # a crash is the program's own


def test_a_program_ends_as_python_does():
    """Threads that go on, functions for the end, a large recursion, text in UTF-8, sets in one order."""
    assert run("import threading, time\nthreading.Thread(target=lambda: print('late')).start()").stdout == "late\n"
    assert run("import atexit; atexit.register(print, 'end')").stdout == "end\n"
    assert (
        run("import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50000))").code == 0
    )
    assert run("print(input()[::-1])", stdin="äß☃").stdout == "☃ßä\n"
    order = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert run(order).stdout == run(order).stdout
    assert run("import numpy; print(numpy.arange(4).sum())").stdout == "6\n"


def system_call(call):
    """Return a program that makes a system call directly."""
    head = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    return f"{head}if libc.{call} < 0:\n    raise OSError(ctypes.get_errno(), 'refused')"


REFUSED = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "datagram": "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "raw socket call": system_call("syscall({socket}, 2, 1, 0)"),
    "io_uring": system_call("syscall(425, 8, bytes(200))"),
    "fork": "import os; os.fork()",
    "fork bomb": "import os\nwhile True: os.fork()",
    "processes": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "read": "open({secret!r}).read()",
    "read a system file": "open('/etc/passwd').read()",
    "list": "import os; os.listdir('/')",
    "write": "open({secret!r} + 'x', 'w').write('x')",
    "append": "open({secret!r}, 'a').write('x')",
    "remove": "import os; os.unlink({secret!r})",
    "link": "import os; os.link({secret!r}, 'link')",
    "symbolic link": "import os; os.symlink({secret!r}, 'link'); open('link').read()",
    "chmod": "import os; os.chmod({secret!r}, 0o777)",
    "kill": "import os; os.kill({pid}, 9)",
    "kill a thread": system_call("syscall({tgkill}, {pid}, {pid}, 9)"),
    "limits": "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
    "privileges": "import os; os.setuid(12345); os.chroot('.')",
    "outlive the supervisor": system_call("prctl(1, 0, 0, 0, 0)"),
    "namespaces": system_call("unshare(0x10000000)"),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A file, a process and a server that no program may reach."""
    import socket

    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        x86 = os.uname().machine == "x86_64"
        yield {
            "secret": str(secret),
            "pid": sleeper.pid,
            "port": server.getsockname()[1],
            "socket": 41 if x86 else 198,
            "tgkill": 234 if x86 else 131,
        }
    assert secret.read_text() == "secret" and os.listdir(secret.parent) == ["secret"]
    assert sleeper.poll() is None, "a program has ended another process"
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses(name, outside):
    result = run(REFUSED[name].format(**outside))
    last = result.stderr.strip().splitlines()[-1]
    assert result.status == "runtime error" and last.startswith(
        ("PermissionError", "OSError: [Errno 1]", "OSError: [Errno 18]")
    ), result


def test_a_folder_of_its_own_is_emptied_between_runs():
    code = "import os\nprint(os.listdir('.'))\nos.mkdir('d')\nopen('d/f', 'w').write('x')\nprint(open('d/f').read())"
    assert [each.stdout for each in run_tests(code, [Test(), Test()])] == ["[]\nx\n"] * 2


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("try:\n    while True: pass\nexcept BaseException:\n    pass", "timeout"),
        ("import signal\nfor s in range(1, 32):\n    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
         "while True: pass", "timeout"),
        ("bytearray(400 << 20)", "runtime error"),
        ("x = []\nwhile True: x.append(bytearray(10 << 20))", "runtime error"),
        ("import mmap; mmap.mmap(-1, 400 << 20)", "runtime error"),
        ("while True: print('x' * 100000)", "output limit"),
        ("import sys\nwhile True: sys.stderr.write('x' * 100000)", "runtime error"),
        ("f = open('f', 'w')\nwhile True: f.write('x' * 100000)", "runtime error"),
        ("i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 100000)\n    i += 1", "output limit"),
        ("import os, itertools\nfor i in itertools.count(): os.mkdir(str(i))", "output limit"),
        ("import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", "output limit"),
        ("import os\nname = 'd' * 250\nfor _ in range(20):\n    os.mkdir(name)\n    os.chdir(name)", "output limit"),
        ("import threading\nwhile True: threading.Thread(target=threading.Event().wait, daemon=True).start()",
         "runtime error"),
    ],
    ids=["loop", "sleep", "catches all", "ignores signals", "memory", "more memory", "mapped memory", "output",
         "errors", "file", "files", "folders", "nested folders", "hidden folders", "threads"],
)  # fmt: skip
def test_limits(code, status):
    timeout_s = 0.5 if status == "timeout" else 10.0  # where other work slows the machine down, the limit still comes
    result = run(code, timeout_s=timeout_s, memory_limit_mb=256)
    assert result.status in (status, "output limit" if status == "runtime error" else status), result
    assert result.memory_mb < 300 and result.seconds < 10 + 2 * timeout_s


@pytest.mark.parametrize("folders", ["", "import os\nfor i in range(1200): os.mkdir('d'); os.chdir('d')"])
def test_folders_of_a_program_that_ended_are_counted_and_removed(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wanted = ["output limit" if folders else "ok"] * 2
    assert [each.status for each in run_tests(folders, [Test(), Test()])] == wanted
    assert os.listdir(tmp_path) == []


def test_the_folder_of_a_program_is_emptied_whatever_it_holds(tmp_path):
    """Nested deeper than paths are long, without permissions, full of what is no file, with links that lead outside."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder.mkdir()
    deep = os.open(folder, os.O_DIRECTORY)
    for _ in range(1200):
        os.mkdir("d" * 200, dir_fd=deep)
        below = os.open("d" * 200, os.O_DIRECTORY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.symlink(outside, "link", dir_fd=deep)
    os.close(deep)
    for name in ("0", "1", "2"):  # names that the clean-up may want
        (folder / name / "0").mkdir(parents=True)
        (folder / name / "0" / "file").write_text("x")
        (folder / name / "0").chmod(0)
        (folder / name).chmod(0)
    os.symlink(outside, folder / "link")
    os.symlink("nowhere", folder / "broken")
    os.mkfifo(folder / "fifo")
    assert is_too_full(str(folder), 1 << 30)
    empty_folder(str(folder))
    assert os.listdir(folder) == [] and os.listdir(outside) == ["kept"]
    (folder / "file").write_text("x" * 100)
    assert is_too_full(str(folder), 4195) and not is_too_full(str(folder), 4196)


def test_a_limit_of_one_run_leaves_the_others_alone():
    code = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    runs = run_tests(code, [Test(str(i)) for i in range(4)], timeout_s=0.5)
    assert [each.status for each in runs] == ["ok", "ok", "timeout", "ok"]
    runs = run_tests(code, [Test(str(i)) for i in range(4)], timeout_s=0.5, stop_at_failure=True)
    assert [each.status for each in runs] == ["ok", "ok", "timeout"]
    assert len(run_tests("def f(:", [Test()] * 3)) == 1


def test_nothing_is_inherited():
    os.environ["VERL_TEST_SECRET"] = "secret"
    handle = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(handle, True)
    try:
        code = "import os\nprint('VERL_TEST_SECRET' in os.environ)\nfor fd in range(3, 64):\n"
        result = run(code + "    try: print(fd, os.fstat(fd).st_size)\n    except OSError: pass")
    finally:
        os.close(handle)
        del os.environ["VERL_TEST_SECRET"]
    assert result.stdout == "False\n3 0\n"  # where a function's value goes


def test_the_end_of_the_caller_is_the_end_of_the_program(tmp_path):
    """A scorer that is killed leaves neither supervisor nor program behind."""
    code = f"from verl.utils.sandbox import *; run_tests('while True: pass  # {os.getpid()}', [Test()], timeout_s=60.0)"
    caller = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    parent, deadline = psutil.Process(caller.pid), time.monotonic() + 120  # the cores may be taken
    while len(below := parent.children(recursive=True)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    assert len(below) == 2
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_many_at_once():
    results = [None] * 6

    def work(i):
        results[i] = run("print(int(input()) ** 2)", stdin=str(i)).stdout

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [f"{i * i}\n" for i in range(6)]


def test_a_supervisor_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(local, "SUPERVISOR", Path("/nowhere/supervisor.py"))
    with pytest.raises(SandboxError, match=r"sandbox supervisor failed: .*nowhere"):
        run("print(1)")


def test_a_checker_that_is_killed_while_it_reports_costs_its_report_only(monkeypatch):
    """Reports of many tests, made long by the program, go over the limit of a file."""
    monkeypatch.setattr(local, "OUTPUT_LIMIT_BYTES", 100_000)
    code = "def f(x): raise ValueError(chr(0x1F600) * 4000)"
    runs = run_tests(code, [Test(code_after="f(1)")] * 3 + [Test(code_after="1")])
    assert [run.status for run in runs] == ["runtime error"] * 3 + ["ok"]
    half = io.BytesIO(b'[0, "whole"]\n[1, "ha')
    assert local._reasons(half) == {0: "whole"}


def test_only_the_end_of_long_errors_is_kept():
    result = run("import sys\nsys.stderr.write('x' * 10**6 + 'end')")
    assert result.status == "ok" and len(result.stderr) == 1 << 16 and result.stderr.endswith("end")
