"""What all tests share."""

import fcntl
import functools
import gc
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import omegaconf.base
import pytest
from hypothesis import HealthCheck, settings
from omegaconf import OmegaConf

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The same examples in each run, however busy the machine is.
# On a busy machine examples are drawn slowly, which says nothing of a test.
settings.register_profile(
    "verl", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("verl")

_parse = OmegaConf.load
_parsed: dict[tuple[int, ...], bytes] = {}


def _load(file: Any) -> Any:
    """Load a YAML file as OmegaConf does, and parse it once: Hydra parses all its files each time that it composes."""
    if not isinstance(file, io.TextIOWrapper):
        return _parse(file)
    status = os.fstat(file.fileno())
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_parse(file))
    return pickle.loads(_parsed[key])


_as_long_as_this_process_lives = pytest.MonkeyPatch()
_as_long_as_this_process_lives.setattr(OmegaConf, "load", staticmethod(_load))
# Half of the time in which a configuration is read; OmegaConf only reads the trees that it gets.
_as_long_as_this_process_lives.setattr(omegaconf.base, "parse", cache(omegaconf.base.parse))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests that measure something write it down."""
    parser.addoption("--verification", metavar="PAGE", help="page whose tables take what tests measure")


@pytest.fixture(scope="module", autouse=True)
def start_method() -> Iterator[None]:
    """Take back the start method of processes that an engine of SGLang sets; with it, loaders of rows import torch."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


MANY_MODULES = 200
"""So many modules have objects that make a collection of garbage noticeably longer."""


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Keep also what the tests of a file import out of later garbage collections: with engines they take seconds."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before > MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def verification_page(request: pytest.FixtureRequest) -> Path | None:
    """The page whose tables take what is measured, where one was asked for."""
    page = request.config.getoption("--verification")
    return Path(page) if page else None


_PRELOADED = Path(__file__).parent / "preloaded"
PRELOAD_TIMEOUT_S = 300
"""The imports take about 15 s on an idle core, and several times that on a busy machine."""


SHARED = "VERL_TEST_SHARED"
"""Variable with the folder of the server that all processes of pytest-xdist share."""


@contextmanager
def preloaded() -> Iterator[dict[str, str]]:
    """Yield the variables with which Ray workers are forks of a process that has the imports; see tests/preloaded."""
    folder = Path(tempfile.mkdtemp(prefix="vpre"))  # the path of a socket may have about 100 characters
    reader, writer = os.pipe()
    with os.fdopen(reader) as alive, os.fdopen(writer):  # the server ends when nobody can write any more
        server = _start_server(folder, alive)
        yield _variables(folder)
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _start_server(folder: Path, alive: IO[str]) -> subprocess.Popen[bytes]:
    """Start the server of tests/preloaded, which ends when ``alive`` does; return when it listens."""
    address = folder / "socket"
    server = subprocess.Popen([sys.executable, _PRELOADED / "server.py", address], stdin=alive)
    deadline = time.monotonic() + PRELOAD_TIMEOUT_S
    while not address.exists():
        assert server.poll() is None, "the server of tests/preloaded has ended"
        assert time.monotonic() < deadline, f"the server of tests/preloaded did not start in {PRELOAD_TIMEOUT_S} s"
        time.sleep(0.1)
    return server


def _variables(folder: Path) -> dict[str, str]:
    return {
        "VERL_TEST_PRELOADED": str(folder / "socket"),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{_PRELOADED}",
    }


@pytest.fixture(scope="session")
def preloaded_workers() -> Iterator[dict[str, str]]:
    """Return the variables of ``preloaded``; with pytest-xdist all processes share a server."""
    if SHARED not in os.environ:
        with preloaded() as variables:
            yield variables
        return
    folder = Path(os.environ[SHARED])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            with (folder / "alive").open() as alive:
                _start_server(folder, alive)
    yield _variables(folder)


def _share_a_server(config: pytest.Config) -> None:
    """Let the first process that needs the server of tests/preloaded start it; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="vpre"))
    os.mkfifo(folder / "alive")
    alive = os.open(folder / "alive", os.O_RDWR)
    os.environ[SHARED] = str(folder)
    config.add_cleanup(lambda: os.close(alive))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session")
def ray_cluster(preloaded_workers: dict[str, str]) -> Iterator[None]:
    """Start one local Ray for all tests that ask for it; actors that a test leaves must not keep others waiting."""
    ray = pytest.importorskip("ray")
    from verl.utils.ray_utils import lean_cluster

    # Sockets live below this directory, and their paths may have about 100 characters: pytest's own are too long.
    directory = tempfile.mkdtemp(prefix="vray")
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    before = dict(os.environ)
    os.environ.update(preloaded_workers)  # for the processes of Ray, which start here
    options: dict[str, Any] = {
        "address": "local",
        "num_cpus": 64,
        "include_dashboard": False,
        "object_store_memory": 256 * 2**20,
        "_temp_dir": directory,
        "logging_level": "WARNING",
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}},
    }
    with lean_cluster(keep_agent=False):
        for is_last in (False, False, False, True):
            try:
                ray.init(**options)
                break
            except Exception as error:  # Ray waits 30 s for its own processes, however busy the machine is
                if is_last or "timed out" not in str(error).lower():
                    raise
                ray.shutdown()
    os.environ.clear()
    os.environ.update(before)
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def left_engines(ray_cluster: None) -> Iterator[dict[str, Any]]:
    """Rollouts on Ray that one file leaves to another, by name; whoever takes one away ends it."""
    left: dict[str, Any] = {}
    yield left
    for rollout in left.values():
        rollout.shutdown()


SLOWEST_FIRST = (
    "special_e2e", "workers", "scripts", "checkpoint", "sandbox",
    "trainer", "single_controller", "model_merger", "recipe",
)  # fmt: skip
"""Folders in the order in which their tests start; the others follow, and fill what the processes have left."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what the modules of tests import out of all garbage collections, which would take a second each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free what it can at its end; nanobind prints what is left."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and order them for processes that take whole files from the first to the last."""
    for item in items:
        uses_ray = "ray_cluster" in getattr(item, "fixturenames", ())
        if uses_ray or _folders(item) & {"special_e2e", "special_distributed"}:
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):  # a mark of two fixtures' parameters
            if item.callspec.id in getattr(item.module, "FULL_IDS", ()):
                item.add_marker(pytest.mark.full)
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: min(_rank(folder) for folder in _folders(item)))


TOGETHER = ("from tests.ranks import", "from tests.workers.rollout import")
"""What files import that run in one process: others would start a server of ranks and import the engines again."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let files that share imports run in one process, under ``--dist loadfile``."""
    from xdist.scheduler import LoadFileScheduling

    class FilesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _process_of(super()._split_scope(nodeid))

    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


@functools.cache
def _process_of(file: str) -> str:
    """Return a name that files of one process share."""
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    return next((line for line in TOGETHER if line in text), file)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse two processes that would write the same page, but share a server between them; let tests send signals.

    A shell that starts the suite in the background makes it, and all that it starts, ignore Ctrl-C; nohup, SIGHUP.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        if config.getoption("--verification"):
            raise pytest.UsageError("--verification needs one process: add -n 0")
        _share_a_server(config)


def _folders(item: pytest.Item) -> set[str]:
    return set(item.path.relative_to(Path(__file__).parent).parts[:-1]) or {""}


def _rank(folder: str) -> int:
    return SLOWEST_FIRST.index(folder) if folder in SLOWEST_FIRST else len(SLOWEST_FIRST)


_told: dict[BaseException, str] = {}
"""Failures of ranks that have been reported, by identity: a fixture raises the same one for every test that asks."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report ranks that fail by what they tell, and once for all tests that share them."""
    report = yield
    if call.excinfo is None or call.excinfo.typename != "RankError":
        return report
    first = _told.setdefault(call.excinfo.value, item.nodeid)
    if first == item.nodeid:
        report.longrepr = f"{item.nodeid}: {call.excinfo.value}"
    else:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: its ranks failed, see {first}")
    return report
