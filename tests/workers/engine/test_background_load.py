"""Weights that arrive in a thread are the same, are there when the block is left, and fail as they do without it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests import remote_code
from tests.ranks import Ranks
from tests.workers.engine import cases
from verl.errors import ModelWeightsError
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine import background_load
from verl.workers.engine.background_load import (
    Values,
    fill,
    load_in_background,
    wait_for_weights,
    when_filled,
)
from verl.workers.engine.fsdp import FSDPEngineWithLMHead, build
from verl.workers.engine.weights import SINGLE_FILE

WAIT_S = 300
MODELS: dict[str, dict[str, Any]] = {
    "policy": {},
    "adapters": {"model": {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}},
    "critic": {"kind": "value_model"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "plain"
    cases.write_model(path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_the_same_whatever_the_process_does_meanwhile(folder: Path, name: str) -> None:
    expected = dict(cases.build(folder, **MODELS[name]).local_parameters())
    goes_on = Event()
    usual = torch.get_default_dtype()
    try:
        with load_in_background():
            fill((), lambda: assert_that(goes_on.wait(WAIT_S)))  # the weights come after it
            engine = cases.build(folder, **MODELS[name])
            torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds its model
            torch.manual_seed(12345)
            goes_on.set()
        drawn = torch.rand(3)
    finally:
        torch.set_default_dtype(usual)
    weights = dict(engine.local_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[each], value) and value.dtype == torch.float32 for each, value in expected.items())
    torch.manual_seed(12345)
    assert torch.equal(drawn, torch.rand(3, dtype=torch.bfloat16)), "loading has drawn from the state of the process"


def assert_that(holds: bool) -> Values:
    assert holds
    return ()


def test_memory_of_an_accelerator_gets_its_values_when_the_block_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory of the host in its place: ``tests/special_gpu`` has the real one."""
    expected = dict(cases.build(folder).local_parameters())
    monkeypatch.setattr(build, "place", cases.as_on_an_accelerator)
    goes_on, is_read = Event(), Event()
    with load_in_background():
        fill((), lambda: assert_that(goes_on.wait(WAIT_S)))
        engine = cases.build(folder)
        for parameter in engine.module.parameters():
            parameter.data.fill_(torch.nan)
        fill((), lambda: is_read.set() or ())
        goes_on.set()
        assert is_read.wait(WAIT_S)
        assert all(parameter.isnan().all() for parameter in engine.module.parameters())
    weights = dict(engine.local_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_weights_arrive_once_whoever_waits_for_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "place", cases.as_on_an_accelerator)
    done: list[str] = []
    with load_in_background():
        fill((), cases.slow)
        engine = cases.build(folder)
        when_filled(lambda: done.append("first"))
        wait_for_weights()
        assert done == ["first"]
        weight = engine.module.model.norm.weight
        assert torch.equal(weight, cases.load(folder).model.norm.weight)
        weight.data.fill_(2.0)
        when_filled(lambda: done.append("second"))
    assert done == ["first", "second"] and (weight == 2.0).all()
    when_filled(lambda: done.append("third"))
    assert done[-1] == "third"


def test_values_that_find_no_room_on_the_host_arrive_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_load.psutil, "virtual_memory", lambda: SimpleNamespace(available=4000))
    room, none = (torch.empty(size, device="meta") for size in (400, 101))  # a device that is not the host
    arrived: list[str] = []
    goes_on = Event()
    with load_in_background():
        fill([room], lambda: arrived.append("room") or () if goes_on.wait(WAIT_S) else ())
        fill([none], lambda: arrived.append("none") or ())
        fill([torch.empty(1000)], lambda: arrived.append("host") or ())
        assert arrived == ["none"]
        goes_on.set()
    assert arrived == ["none", "room", "host"]


@pytest.mark.parametrize("problem", ["holds NaN", "lacks 1 tensors of the model"])
@pytest.mark.parametrize("other_fails", [False, True])
def test_a_damaged_file_is_named_also_where_the_other_work_failed(
    folder: Path, tmp_path: Path, problem: str, other_fails: bool
) -> None:
    cases.write_model(tmp_path)
    name = "model.norm.weight"
    weights = load_file(tmp_path / SINGLE_FILE)
    bad = {name: weights[name] / 0 * 0} if problem == "holds NaN" else {}
    rest = {each: value for each, value in weights.items() if each != name}
    save_file(rest | bad, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ModelWeightsError, match=problem) as found, load_in_background():
        cases.build(tmp_path)
        cases.build(folder)
        if other_fails:
            raise RuntimeError("the engine has not started")
    assert name in str(found.value) and isinstance(found.value.__context__, RuntimeError) is other_fails


def test_the_error_of_the_other_work_comes_through(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="has not started"), load_in_background():
        engine = cases.build(folder)
        raise RuntimeError("the engine has not started")
    assert torch.equal(cases.export(engine)["model.norm.weight"], cases.load(folder).model.norm.weight)


class Halved(FSDPEngineWithLMHead):
    """An engine of a user."""

    def initialize(self) -> None:
        super().initialize()
        self.module.model.norm.weight.data.mul_(0.5)


def halved(folder: Path) -> Halved:
    optimizer = FSDPOptimizerConfig(lr=cases.LR)
    return Halved(cases.model_config(folder), FSDPEngineConfig(**cases.IN_FP32), optimizer)


def test_an_engine_of_a_user_finds_its_weights(folder: Path) -> None:
    with load_in_background():
        fill((), cases.slow)
        engine = halved(folder)
        engine.initialize()
    assert torch.equal(cases.export(engine)["model.norm.weight"], cases.load(folder).model.norm.weight * 0.5)


def test_an_error_that_the_block_has_met_is_not_its_own_cause(tmp_path: Path) -> None:
    """Whoever follows the causes of an error comes to an end."""
    cases.write_model(tmp_path)
    weights = load_file(tmp_path / SINGLE_FILE)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ModelWeightsError, match="lacks 1 tensors") as found, load_in_background():
        halved(tmp_path).initialize()
    assert found.value.__cause__ is None and found.value.__context__ is None


def test_remote_code_is_checked_with_its_weights(tmp_path: Path) -> None:
    remote_code.write_model(tmp_path, "kimi_vl")
    with load_in_background():
        fill((), cases.slow)
        engine = cases.build(tmp_path, {"trust_remote_code": True})
        present = {name: value.detach().clone() for name, value in engine.local_parameters()}
    assert all(torch.equal(present[name], value) for name, value in engine.local_parameters())


def test_shards_that_are_offloaded_are_whole(folder: Path, tmp_path: Path) -> None:
    """``fully_shard`` copies a shard that is shorter than others when it moves."""
    Ranks(read_and_offload, (3, folder, str(tmp_path / "store")), nprocs=3).join()


def read_and_offload(rank: int, world_size: int, folder: Path, store: str) -> None:
    with as_rank(rank, world_size, store):
        with load_in_background():
            fill((), cases.slow)
            engine: Any = cases.build(folder, engine={"param_offload": True})
        is_uneven = any(parameter.shape[0] % world_size for _, parameter in engine.local_parameters())
        with engine.eval_mode():
            exported = cases.export(engine)
        model = cases.load(folder)
        assert is_uneven and all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


@contextmanager
def as_rank(rank: int, world_size: int, store: str) -> Iterator[None]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    yield
    dist.destroy_process_group()
