"""The import of SGLang, and the stand-in for its kernels."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from verl.utils.engine_versions import has_sglang_kernels
from verl.workers.rollout.sglang_rollout import importing, patch
from verl.workers.rollout.sglang_rollout.importing import STAND_IN, import_sglang, offer_stand_in

KERNELS = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in", STAND_IN / "sgl_kernel" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_of_the_stand_in_computes(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"sgl_kernel.{name}: this kernel of SGLang is not installed"):
        getattr(stand_in(), name)(torch.ones(1), out=None)


def test_no_operator_of_the_stand_in_computes() -> None:
    for name in stand_in().OPERATORS:
        with pytest.raises(NotImplementedError, match=f"sgl_kernel.{name}: this kernel of SGLang is not installed"):
            getattr(torch.ops.sgl_kernel, name)(torch.ones(1), torch.ones(1))


def test_the_stand_in_has_these_kernels_only() -> None:
    assert [name for name, value in sorted(vars(stand_in()).items()) if name.endswith("_cpu")] == KERNELS
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")  # by which SGLang knows all kernels


def test_the_stand_in_refuses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match="CUDA is present"):
        stand_in()


def test_the_stand_in_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a package that is installed before, or later."""
    plain = [entry for entry in sys.path if entry != str(STAND_IN)]
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()

    monkeypatch.setattr(sys, "path", [*plain, str(tmp_path)])
    assert has_sglang_kernels()
    offer_stand_in()
    assert str(STAND_IN) not in sys.path

    monkeypatch.setattr(sys, "path", list(plain))
    assert not has_sglang_kernels()
    for _ in range(2):
        offer_stand_in()
    assert sys.path == [*plain, str(STAND_IN)]
    assert not has_sglang_kernels()
    sys.path.insert(len(plain), str(tmp_path))  # as in the folder of all packages, before what is appended
    assert has_sglang_kernels()
    spec = importlib.machinery.PathFinder.find_spec("sgl_kernel", sys.path)
    assert spec is not None and spec.origin == str(tmp_path / "sgl_kernel" / "__init__.py")


def test_the_stand_in_is_not_offered_next_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(STAND_IN)])
    monkeypatch.setattr(importing, "get_device_name", lambda: "cuda")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match=r"rollout.name=sglang needs SGLang.*: pip install"):
        import_sglang()
    assert str(STAND_IN) not in sys.path


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "sglang", None)
    policy = asyncio.get_event_loop_policy()
    with pytest.raises(ImportError, match=r"run scripts/setup_env.sh.*or set rollout.name=vllm"):
        import_sglang()
    assert asyncio.get_event_loop_policy() is policy


@pytest.mark.parametrize(
    ("version", "backend", "told"),
    [
        ("0.5.21", "pytorch", None),
        ("0.5.23", "pytorch", None),
        ("0.5.20", "pytorch", "SGLang 0.5.20 is not one of the versions 0.5.21 to 0.5.23"),
        ("0.5.24", "pytorch", "reproducible by schedule only"),
        ("0.5.23", "flashinfer", "sampling_backend=flashinfer takes no seeds"),
    ],
)
def test_a_run_says_that_seeds_do_not_count(
    monkeypatch: pytest.MonkeyPatch, version: str, backend: str, told: str | None
) -> None:
    monkeypatch.setattr(patch, "installed_version", lambda package: version)
    found = patch.without_seeds(backend)
    assert found is None if told is None else told in str(found)
