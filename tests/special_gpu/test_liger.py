"""liger-kernel's layers give the numbers of transformers' own, in fp32, with and without shared prefixes.

Tolerances are those of ``test_prefix_sharing.py``: sums of fp32 in another order. The kernel for experts lets Triton
choose how it multiplies, and that may be TF32, which has three decimal digits.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.engine import cases, sharing_cases
from tests.workers.engine import vision_cases as vision
from tests.workers.engine.test_prefix_sharing import assert_close
from verl.base_config import WrongInput

pytest.importorskip("liger_kernel")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
TRITON_HEAD = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}}


@pytest.fixture(autouse=True)
def own_layers() -> Any:
    """Undo afterwards what liger-kernel replaces in the modules of transformers."""
    modules = {name: dict(vars(m)) for name, m in sys.modules.items() if name.startswith("transformers.models.")}
    yield
    for name, module in sys.modules.items():
        if name in modules:
            vars(module).update(modules[name])


def uses_liger(model: nn.Module) -> bool:
    return any(getattr(part.forward, "__module__", "").startswith("liger_kernel") for part in model.modules())


def numbers(engine: Any, data: Any) -> tuple[dict[str, torch.Tensor], dict[str, float], dict[str, torch.Tensor]]:
    return sharing_cases.outputs(engine, data), *sharing_cases.gradients(engine, data)


def compare(folder: Path, data: Any, kind: str, model: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare engines in the order in which liger-kernel changes the family: before it, with it, with sharing."""
    plain = sharing_cases.build(folder, False, kind, **model)
    assert not uses_liger(plain.module)
    output, metrics, gradient = numbers(plain, data)
    for shares in (False, True):
        engine = sharing_cases.build(folder, shares, kind, use_liger=True, **model)
        assert uses_liger(engine.module)
        found = numbers(engine, data)
        assert_close(found[0], output, tolerance)
        assert found[1] == pytest.approx(metrics, rel=tolerance)
        assert_close(found[2], gradient, tolerance)


@pytest.mark.parametrize(
    ("family", "changes", "kind", "model"),
    [
        ("Qwen2", {}, "language_model", {}),
        ("Qwen2", {}, "language_model", TRITON_HEAD | {"enable_gradient_checkpointing": True}),
        ("Qwen2", {}, "language_model", {"lora_rank": 4, "lora_alpha": 8}),
        ("Qwen2", {}, "value_model", {}),
        ("Llama", {}, "language_model", {}),
        ("Qwen3", {"head_dim": 16}, "language_model", {}),
        ("Qwen3Moe", EXPERTS, "language_model", {}),
    ],
)
def test_texts(tmp_path: Path, family: str, changes: dict[str, Any], kind: str, model: dict[str, Any]) -> None:
    cases.write_family(tmp_path, family, changes)
    data = sharing_cases.groups()
    data.meta_info.update(micro_batch_size_per_gpu=5)
    compare(tmp_path, data, kind, model, tolerance=1e-3 if family == "Qwen3Moe" else 1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images(tmp_path: Path, family: str) -> None:
    vision.write_with_positions(tmp_path, family)
    compare(tmp_path, vision.samples_of_prompts(tmp_path, family), "language_model", {})


def test_a_family_without_kernels_is_refused(tmp_path: Path) -> None:
    cases.write_family(tmp_path, "Glm4Moe", cases.SIGMOID)
    with pytest.raises(WrongInput, match="use_liger=True: liger-kernel has nothing for .*'glm4_moe'"):
        sharing_cases.build(tmp_path, False, use_liger=True)
