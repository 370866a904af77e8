"""The whole fault matrix, hours of runs; ``fault_matrix.py`` as a command runs some of its cells, and can go on."""

import pytest

from .fault_matrix import CELLS, ENGINE_CELLS, AnyCell, Matrix, Workspace


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, preloaded_workers: dict[str, str]) -> Matrix:
    return Matrix(Workspace(tmp_path_factory.mktemp("faults"), preloaded_workers))


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.why_not is None], ids=str)
def test_a_run_survives_a_fault(matrix: Matrix, cell: AnyCell) -> None:
    result = matrix.run(cell)
    assert not result.problem, f"{result.problem}\n{result.message}"


@pytest.mark.full
@pytest.mark.parametrize("cell", ENGINE_CELLS, ids=str)
def test_a_run_survives_the_death_of_a_process_of_sglang(matrix: Matrix, cell: AnyCell) -> None:
    pytest.importorskip("sglang")
    result = matrix.run(cell)
    assert not result.problem, f"{result.problem}\n{result.message}"
