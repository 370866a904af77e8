"""Established helpers around Megatron-Core on two ranks, and models of which one rank has the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import spawn_ranks
from tests.workers.engine import megatron_helper_ranks as ranks

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Run both ranks, which check the helpers as they go: against transformers, and against what is stored."""
    folder = tmp_path_factory.mktemp("helpers")
    ranks.write_models(folder)
    spawn_ranks(ranks.run, (folder,), nprocs=2)
    yield folder, [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("layout", ranks.SHARING)
def test_a_worker_without_files_gets_its_parts_and_no_more(
    launch: tuple[Path, list[dict[str, Any]]], layout: str
) -> None:
    folder, results = launch
    first, second = (result[layout] for result in results)
    stored = load_file(folder / "plain" / "model.safetensors")
    for result in (first, second):
        ranks.equal(result["weights"], stored)
    padding = 2 * 64 * 4 if layout == "tp 2" else 0  # a row of the embedding and of the head: half of 98 tokens
    assert first["received"] == [] and sum(second["received"]) == sum(second["parameters"]) - padding
    assert max(second["received"]) <= max(second["parameters"])
    assert first["folder"] == str(folder / "plain")
    kept = Path(second["folder"])
    assert kept.parent == folder / "tmp" and [file.name for file in kept.iterdir() if "safetensors" in file.name] == []
    assert (kept / "config.json").read_bytes() == (folder / "plain" / "config.json").read_bytes()
    assert torch.equal(first["head"], second["head"]) and first["head"].abs().sum() > 0


@pytest.mark.parametrize("layout", ranks.SHARING)
def test_files_that_are_wrong_end_both_workers(launch: tuple[Path, list[dict[str, Any]]], layout: str) -> None:
    for result in launch[1]:
        wrong = result[layout]["wrong"]
        assert "model.layers.3.mlp.up_proj.weight" in wrong["lacking"]
        assert "model.safetensors" in wrong["short"] and "cannot read the weights file" in wrong["late"]


def test_new_weights_do_not_depend_on_the_layout(launch: tuple[Path, list[dict[str, Any]]]) -> None:
    found = [result[layout]["new"] for result in launch[1] for layout in ranks.SHARING]
    for other in found[1:]:
        ranks.equal(other, found[0])
