"""Models that the tables of verl.models.mcore lack, built by a fake of mbridge: they keep the engine contract."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.engine import cases, megatron_cases
from verl.base_config import WrongInput

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

FAKES = Path(__file__).parents[2] / "fakes"
CUT = cases.MICRO[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the model of the other cases under an architecture that has no table."""
    path = tmp_path_factory.mktemp("bridged") / "plain"
    cases.write_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["BridgedForCausalLM"]}))
    yield path
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.delitem(sys.modules, "mbridge", raising=False)
    yield importlib.import_module("mbridge")
    sys.modules.pop("mbridge", None)


def test_a_bridged_model_computes_and_trains_what_the_tables_do(fake: Any, folder: Path, tmp_path: Path) -> None:
    cases.write_model(tmp_path / "plain")  # the same weights
    results = []
    for path, settings in ((folder, {"use_mbridge": True}), (tmp_path / "plain", {"use_mbridge": True})):
        engine = megatron_cases.build(path, settings)
        assert (engine.bridge is not None) == (path == folder)
        with engine.eval_mode():
            outputs = engine.infer_batch(cases.batch(**CUT))
        with engine.train_mode():
            metrics = engine.train_batch(cases.batch(**CUT), cases.loss_fn)
        engine.save_checkpoint(str(tmp_path / f"saved_{len(results)}"))
        results.append((outputs, metrics, {name: t.clone() for name, t in engine.named_weights()}))
    (ours, metrics, weights), (theirs, other_metrics, other_weights) = results
    assert fake.CALLS == ["from_config", "get_model", "load_weights", "export_weights", "export_weights"]
    assert metrics == other_metrics and list(weights) == list(other_weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    before = cases.load(folder).state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(weights["model.embed_tokens.weight"], before)
    saved = load_file(tmp_path / "saved_0" / "huggingface" / "model.safetensors")
    assert all(torch.equal(saved[name], weights[name].to(saved[name].dtype)) for name in weights)
    continued = megatron_cases.build(folder, {"use_mbridge": True})
    continued.load_checkpoint(str(tmp_path / "saved_0"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in continued.named_weights())


def test_a_bridged_model_without_its_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mbridge", None)
    with pytest.raises(WrongInput, match="architecture BridgedForCausalLM is built by the package mbridge"):
        megatron_cases.build(folder, {"use_mbridge": True})
    with pytest.raises(WrongInput, match="architecture BridgedForCausalLM is not supported with strategy=megatron"):
        megatron_cases.build(folder, {})
    with pytest.raises(WrongInput, match="a critic or reward model of architecture"):
        megatron_cases.build(folder, {"use_mbridge": True}, kind="value_model")
