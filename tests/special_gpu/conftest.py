"""Tests that need a GPU of NVIDIA; elsewhere they are skipped. Run them with ``pytest tests/special_gpu``."""

from pathlib import Path

import pytest
import torch

from tests.special_e2e.conftest import Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One tiny model and data set for all runs; their workers start anew, since a fork cannot use the GPU."""
    return Workspace(tmp_path_factory.mktemp("gpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU of NVIDIA")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(skip)
