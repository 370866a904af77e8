import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def records():
    """The module of synthetic records."""
    spec = importlib.util.spec_from_file_location("report_records", Path(__file__).parent / "records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
