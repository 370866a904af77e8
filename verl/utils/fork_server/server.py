"""Import the modules that the processes of a run need, then fork a process for each request of ``client.py``.

``python server.py SETTINGS``, a JSON object with ``parent`` (id of the launching process), ``listeners`` (handles of
the sockets for all processes, and perhaps for workers), ``path`` (``sys.path`` of the launching process) and lists of
modules to import: ``first``, ``general``, which may import ray, and ``workers``, which only the workers of a worker
group need; these are imported in a second server, a fork of the first. ``module:function`` also calls the function.
``last_of_general`` and ``last_of_workers`` are the numbers of processes of each kind, or null. With ``only_first`` the
server never forks: it becomes the process of the first request, unless that is a worker. ``assumed`` holds variables
that Ray sets in this process before anything is imported there, unless they are set. Modules in ``absent`` cannot be
imported until a process has started: libraries that try to import them go on without them.

A fork of a process with threads may hang, so a server that has threads refuses to fork and answers a request with no.
It also refuses a request whose environment could have changed what was imported.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NamedTuple, NoReturn, TypedDict

_PR_SET_PDEATHSIG = 1
_ALLOCATIONS_PER_COLLECTION = 50_000
_USUAL = gc.get_threshold()[1:]
_ONLY_YOUNG = (1 << 30, 1 << 30)
"""Collections of young objects before one of older ones, and of those before one of all."""
_REQUEST_S = 10.0
_SAFE_THREADS = ("jemalloc_bg_thd",)  # jemalloc stops and starts it around a fork
_OF_WORKERS = "WG_"
_FREE_PREFIXES = ("__RAY_", _OF_WORKERS, "MASTER_", "LOCAL_")
_FREE = {"RANK", "WORLD_SIZE", "PYTHONBREAKPOINT", "SPT_NOENV", "PWD", "OLDPWD", "SHLVL", "_", "LD_PRELOAD"}
_FREE |= {"RAY_LOCAL_WORLD_SIZE", "RAY_LD_PRELOAD_ON_WORKERS"}
"""Variables that no module reads while it is imported."""
_OF_RAY = "RAY_"
_OF_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORKER_OOM_SCORE = "1000"  # as Ray sets it for the processes that it starts


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent has ended; end if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def load(names: Sequence[str]) -> None:
    """Import modules and call the functions after a colon; a module that fails here is imported by the processes."""
    for name in names:
        module, _, function = name.partition(":")
        with suppress(Exception):
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()


def keep_shared() -> None:
    """Hide all objects from the garbage collector, which would write to them and so copy pages that forks share."""
    gc.collect(0)  # imports leave some garbage among new objects and next to none among older ones
    gc.freeze()


class Wanted(TypedDict):
    """A process that Ray wants: its script and arguments, and the properties that it takes over from the client."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    parent: int
    group: int
    files: list[int]
    """The soft and the hard limit of open files."""
    blocked: list[int]
    """Signals."""


class Settings(TypedDict):
    """The argument of this program; see above."""

    parent: int
    listeners: list[int]
    path: list[str]
    assumed: dict[str, str]
    absent: list[str]
    only_first: bool
    first: list[str]
    general: list[str]
    workers: list[str]
    last_of_general: int | None
    last_of_workers: int | None


def receive(connection: socket.socket) -> tuple[Wanted, list[int]]:
    """Return a request, and the standard streams of its sender.

    Raises: ValueError or OSError if it does not arrive.
    """
    connection.settimeout(_REQUEST_S)
    size, handles, _, _ = socket.recv_fds(connection, 8, 3)
    with ExitStack() as opened:  # the descriptors are closed if this fails
        for handle in handles:
            opened.callback(os.close, handle)
        if len(size) < 8 or len(handles) != 3:
            raise ValueError("an incomplete request")
        content = bytearray()
        while len(content) < int.from_bytes(size, "big"):
            part = connection.recv(1 << 16)
            if not part:
                raise ValueError("an incomplete request")
            content += part
        request = json.loads(content)
        opened.pop_all()
        return request, handles


def has_threads() -> bool:
    """Whether this process has a thread, of Python or of a library, that a fork would lose."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            if int(thread) != os.getpid() and file.read().strip() not in _SAFE_THREADS:
                return True
    return False


def deciding(environment: Mapping[str, str], of_ray: bool) -> dict[str, str]:
    """Return the variables that imports may depend on: those of Ray, or all others."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _FREE and not name.startswith(_FREE_PREFIXES) and name.startswith(_OF_RAY) == of_ray
    }


def end_with_threads() -> None:
    """End if this process has threads: neither it nor another could fork."""
    if has_threads():
        os._exit(0)


class Request(NamedTuple):
    """A request: its listening socket, the connection to the client, and the standard streams of the new process."""

    listener: socket.socket
    connection: socket.socket
    content: Wanted
    handles: list[int]

    def is_wanted(self) -> bool:
        """Whether the client still waits, and from now on relies on the server for the process."""
        with suppress(OSError):
            self.connection.sendall(b"y")
            return self.connection.recv(1) == b"y"
        return False

    def fail(self) -> None:
        """Tell the client that the process could not be made."""
        with suppress(OSError):
            self.connection.sendall(b"n")

    def close(self) -> None:
        """Close the connection; a client that gets no answer starts the process without the server."""
        self.connection.close()
        for handle in self.handles:
            os.close(handle)


class Server(MetaPathFinder):
    """Answers the requests at a socket; before the split it answers the first request at any of several sockets.

    Ray reads some variables only once, while it is imported, and among them are the process id of the raylet and the
    number of the job. So the import of ray, wherever it comes, waits for the first request, which has them.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        environment: Mapping[str, str],
        assumed: Mapping[str, str],
        path: Sequence[str],
        absent: Sequence[str],
        forks: bool,
    ) -> None:
        self._listeners = listeners
        self._forks = forks
        self._absent = absent
        self._launch_path = [*sys.path]
        self._launch_environment = {**environment, **assumed}
        self._environment = deciding(environment, of_ray=False)
        self._path = path
        self._first: Request | None = None
        self._of_ray: dict[str, str] = {}
        self._ends: list[int] = []
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Wait for the first request before ray is imported; called by the import system."""
        if name == "ray" and self._first is None:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self._first = self._next()
        self._of_ray = deciding(self._first.content["environment"], of_ray=True)
        os.environ.update(self._of_ray)
        self._ends.append(os.pidfd_open(self._first.content["parent"]))

    def _next(self) -> Request:
        """Return the next request; end when the raylet has ended."""
        while True:
            ready, _, _ = select.select([*self._listeners, *self._ends], [], [])  # type: ignore[type-var]
            if any(end in ready for end in self._ends):
                os._exit(0)
            listener = next(each for each in self._listeners if each in ready)
            connection, _ = listener.accept()
            try:
                return Request(listener, connection, *receive(connection))
            except (OSError, ValueError):
                connection.close()

    def load(self, modules: Sequence[str]) -> None:
        """Import the modules that every process needs, and wait for the first request."""
        if self._first is None:
            self._wait_for_first()
        load(modules)
        sys.meta_path.remove(self)
        if self._forks:
            end_with_threads()

    def split(self, modules: Sequence[str]) -> bool:
        """Fork a server for workers, which imports more and answers at the second socket; return whether this is it."""
        keep_shared()
        parent = os.getpid()
        is_for_workers = os.fork() == 0
        # Both processes have both sockets now. Each closes one, so that a request reaches the server that can answer
        # it; so does the request that came first, which belongs to one of them.
        kept, other = reversed(self._listeners) if is_for_workers else self._listeners
        if self._first is not None and self._first.listener is other:
            self._first.close()
            self._first = None
        other.close()
        self._listeners = [kept]
        if is_for_workers:
            end_with(parent)
            load(modules)
        return is_for_workers

    def serve(self, last: int | None, has_other: bool = False) -> None:
        """Fork a process for each request, until the raylet has ended.

        With the process of number ``last``, counted from 1, nothing is left to serve: the server becomes that process
        itself, so that no page has to be copied. Later ones start by themselves. ``has_other`` says that a server for
        workers ends with this one.
        """
        self._keep_imports()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        request = self._first or self._next()
        started = 0
        while True:
            # ``is_wanted`` comes last: once it has asked, the caller relies on this server and starts no process
            # itself.
            is_possible = self._is_like(request.content) and not has_threads() and request.is_wanted()
            started += is_possible
            if is_possible and started == last:
                self._take_place(request)
            if is_possible:
                self._fork(request)
            request.close()
            if not has_other and not started and has_threads():
                os._exit(0)  # a process with threads could never fork
            request = self._next()

    def serve_first(self) -> NoReturn:
        """Become the process of the first request; end if that is a worker, or could differ from this process."""
        self._keep_imports()
        request = self._first or self._next()
        is_worker = any(name.startswith(_OF_WORKERS) for name in request.content["environment"])
        if not is_worker and self._is_like(request.content) and request.is_wanted():
            self._take_place(request)
        os._exit(0)

    def _keep_imports(self) -> None:
        keep_shared()
        gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, *_USUAL)

    def _is_like(self, content: Wanted) -> bool:
        """Whether the process of a request would have imported the same modules as this one."""
        environment = content["environment"]
        is_same = deciding(environment, of_ray=False) == self._environment
        return is_same and deciding(environment, of_ray=True) == self._of_ray and bool(content["words"])

    def _take_place(self, request: Request) -> NoReturn:
        """Become the process of a request without a fork."""
        with suppress(OSError):
            os.setpgid(0, request.content["group"])
        self._become(request)

    def _fork(self, request: Request) -> None:
        try:
            child = os.fork()
        except OSError:  # the system has no room for another process
            request.fail()
            return
        if child == 0:
            self._become(request)
        with suppress(OSError):  # the group of the process that Ray has started, while that one waits for the answer
            os.setpgid(child, request.content["group"])

    def _become(self, request: Request) -> NoReturn:
        for listener in self._listeners:
            listener.close()
        for handle in self._ends:
            os.close(handle)
        # ``close`` closes the request's own descriptors.
        handles = [os.dup(handle) for handle in request.handles]
        request.close()
        for name in self._absent:
            if sys.modules.get(name, self) is None:  # else an import has put something there in its place
                del sys.modules[name]
        for name, value in os.environ.items():  # set by modules while they were imported
            if not name.startswith(_OF_RAY) and self._launch_environment.get(name) != value:
                request.content["environment"].setdefault(name, value)
        become(request.content, handles, self._path, self._launch_path)


def become(request: Wanted, handles: Sequence[int], path: Sequence[str], launch_path: Sequence[str]) -> NoReturn:
    """Turn a fork into the process of a request: run its script and end.

    Args: ``path`` is what a new interpreter has after the folder of its script; ``launch_path`` is that of the launch.
    """
    code = 1
    try:
        for handle, stream in zip(handles, (0, 1, 2), strict=True):
            os.dup2(handle, stream)
            os.close(handle)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number in (signal.SIGCHLD, *_OF_TERMINAL):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write(_WORKER_OOM_SCORE)
        with suppress(OSError, ValueError):
            soft, hard = request["files"]
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        # A fork has the random state of the server: without new seeds all workers would draw the same numbers.
        draw_seeds()
        script = request["words"][0]
        sys.argv[:] = request["words"]
        added = [entry for entry in sys.path if entry not in launch_path]  # Ray adds paths of its bundled packages
        own = [] if sys.flags.safe_path else [os.path.dirname(script)]
        sys.path[:] = [*added, *own, *path]
        main = ModuleType("__main__")
        main.__file__ = script
        sys.modules["__main__"] = main
        with open(script, "rb") as file:
            program = compile(file.read(), script, "exec")
        exec(program, main.__dict__)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:  # an exception of a script is shown as the interpreter shows it
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def draw_seeds() -> None:
    """Give the random generators of this fork new seeds, as in a new process; Python reseeds its own generator."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "datasets.fingerprint" in sys.modules:  # it draws random names of cache files
        sys.modules["datasets.fingerprint"].fingerprint_rng.seed()


def leave(code: int) -> NoReturn:
    """End a fork as the interpreter ends: threads, functions of ``atexit``, streams."""
    import atexit
    import threading

    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def main(settings: Settings) -> None:
    """Import, and serve the requests for both kinds of processes."""
    end_with(settings["parent"])
    for number in _OF_TERMINAL:  # the launching process handles these signals
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION, *_ONLY_YOUNG)
    environment = dict(os.environ)
    assumed = {name: value for name, value in settings["assumed"].items() if name not in environment}
    os.environ.update(assumed)
    forks = not settings["only_first"]
    path = sys.path[0 if sys.flags.safe_path else 1 :]
    sys.path[:] = settings["path"]
    listeners = [socket.socket(fileno=handle) for handle in settings["listeners"]]
    absent = settings["absent"]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # an import of None fails
    load(settings["first"])
    if forks:
        end_with_threads()
    server = Server(listeners, environment, assumed, path, absent, forks)
    server.load(settings["general"])
    if not forks:
        server.serve_first()
    has_other = len(listeners) > 1
    if has_other and server.split(settings["workers"]):
        server.serve(settings["last_of_workers"])
    else:
        server.serve(settings["last_of_general"], has_other)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
