"""What all tests share."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The same examples in each run, however busy the machine is.
settings.register_profile("verl", derandomize=True, deadline=None, database=None)
settings.load_profile("verl")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests that measure something write it down."""
    parser.addoption("--verification", metavar="PAGE", help="page whose tables take what tests measure")


@pytest.fixture(scope="session")
def verification_page(request: pytest.FixtureRequest) -> Path | None:
    """The page whose tables take what is measured, where one was asked for."""
    page = request.config.getoption("--verification")
    return Path(page) if page else None


PRELOAD_TIMEOUT_S = 300
"""The imports take about 15 s on an idle core, and several times that on a busy machine."""


@contextmanager
def preloaded() -> Iterator[dict[str, str]]:
    """Yield the variables with which Ray workers are forks of a process that has the imports; see tests/preloaded."""
    folder = Path(__file__).parent / "preloaded"
    address = Path(tempfile.mkdtemp(prefix="vpre")) / "socket"  # the path of a socket may have about 100 characters
    variables = {"VERL_TEST_PRELOADED": str(address), "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}
    with subprocess.Popen([sys.executable, folder / "server.py", address], stdin=subprocess.PIPE) as server:
        deadline = time.monotonic() + PRELOAD_TIMEOUT_S
        while not address.exists():
            assert server.poll() is None, "the server of tests/preloaded has ended"
            assert time.monotonic() < deadline, f"the server of tests/preloaded did not start in {PRELOAD_TIMEOUT_S} s"
            time.sleep(0.1)
        yield variables
        assert server.stdin is not None
        server.stdin.close()  # it ends
    shutil.rmtree(address.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def preloaded_workers() -> Iterator[dict[str, str]]:
    """Return the variables of ``preloaded``."""
    with preloaded() as variables:
        yield variables


@pytest.fixture(scope="session")
def ray_cluster(preloaded_workers: dict[str, str]) -> Iterator[None]:
    """Start one local Ray for all tests that ask for it; actors that a test leaves must not keep others waiting."""
    ray = pytest.importorskip("ray")
    # Sockets live below this directory, and their paths may have about 100 characters: pytest's own are too long.
    directory = tempfile.mkdtemp(prefix="vray")
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    before = dict(os.environ)
    os.environ.update(preloaded_workers)  # for the processes of Ray, which start here
    ray.init(
        address="local",
        num_cpus=64,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        _temp_dir=directory,
        logging_level="WARNING",
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}},
    )
    os.environ.clear()
    os.environ.update(before)
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


SLOWEST_FIRST = (
    "special_e2e", "workers", "scripts", "checkpoint", "sandbox",
    "trainer", "single_controller", "model_merger", "recipe",
)  # fmt: skip
"""Folders in the order in which their tests start; the others follow, and fill what the processes have left."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and order them for processes that take whole files from the first to the last."""
    for item in items:
        uses_ray = "ray_cluster" in getattr(item, "fixturenames", ())
        if uses_ray or _folders(item) & {"special_e2e", "special_distributed"}:
            item.add_marker(pytest.mark.slow)
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: min(_rank(folder) for folder in _folders(item)))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse two processes that would write the same page; let tests send Ctrl-C.

    A shell that starts the suite in the background makes it, and all that it starts, ignore Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--verification") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--verification needs one process: add -n 0")


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
