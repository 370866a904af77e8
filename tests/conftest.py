"""What all tests share."""

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests that measure something write it down."""
    parser.addoption("--verification", metavar="PAGE", help="page whose tables take what tests measure")


@pytest.fixture(scope="session")
def verification_page(request: pytest.FixtureRequest) -> Path | None:
    """The page whose tables take what is measured, where one was asked for."""
    page = request.config.getoption("--verification")
    return Path(page) if page else None


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start one local Ray with four CPUs for all tests that ask for it."""
    ray = pytest.importorskip("ray")
    repository = str(Path(__file__).resolve().parent.parent)
    # Sockets live below this directory, and their paths may have about 100 characters: pytest's own are too long.
    directory = tempfile.mkdtemp(prefix="vray")
    search_path = os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH", "")]))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        _temp_dir=directory,
        logging_level="WARNING",
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts Ray or several processes as ``slow``, so that ``scripts/test.sh --fast`` leaves it out."""
    for item in items:
        folders = item.path.parts
        if "ray_cluster" in getattr(item, "fixturenames", ()) or {"special_e2e", "special_distributed"} & set(folders):
            item.add_marker(pytest.mark.slow)


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
