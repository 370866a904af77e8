"""The established helpers around Megatron-Core modules, and the converter of single weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine import cases, megatron_cases
from verl.models.mcore import get_mcore_weight_converter
from verl.utils import megatron_utils

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("megatron_utils")
    megatron_cases.write_models(folder)
    yield folder
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_folders_of_a_checkpoint_are_those_of_the_manager(root: Path, tmp_path: Path) -> None:
    megatron_cases.build(root / "plain", {}).save_checkpoint(str(tmp_path / "actor"))
    before = sorted(path.name for path in (tmp_path / "actor").iterdir())
    assert (Path(megatron_utils.get_dist_checkpoint_path(str(tmp_path / "actor"))) / "common.pt").is_file()
    assert (Path(megatron_utils.get_hf_model_checkpoint_path(str(tmp_path / "actor"))) / "config.json").is_file()
    assert Path(megatron_utils.get_transformer_config_checkpoint_path(str(tmp_path / "actor"))).is_file()
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == before
    assert Path(megatron_utils.get_dist_checkpoint_path(str(tmp_path / "new"))).is_dir()


def test_modules_are_made_wrapped_and_unwrapped(root: Path) -> None:
    engine: Any = megatron_cases.build(root / "plain", {})
    from megatron.core.distributed import DistributedDataParallel

    from verl.models.mcore import hf_to_mcore_config, init_mcore_model

    config = hf_to_mcore_config(engine.hf_config, torch.float32)

    def provider(pre_process: bool, post_process: bool) -> Any:
        assert pre_process and post_process
        return init_mcore_model(config, engine.hf_config, pre_process, post_process)

    (wrapped,) = megatron_utils.get_model(provider)
    (plain,) = megatron_utils.get_model(provider, wrap_with_ddp=False)
    assert isinstance(wrapped, DistributedDataParallel) and wrapped.ddp_config.use_distributed_optimizer
    assert not isinstance(plain, DistributedDataParallel)
    assert megatron_utils.unwrap_model(wrapped) is wrapped.module and megatron_utils.unwrap_model([plain]) == [plain]
    assert megatron_utils.get_model_config(wrapped) is config
    assert megatron_utils.get_transformer_layer_offset(0, None, config) == 0
    assert torch.equal(megatron_utils.broadcast_from_megatron_pp(torch.arange(3)), torch.arange(3))
    assert megatron_utils.broadcast_str_from_megatron_pp("name") == "name"
    with pytest.raises(ValueError, match="exactly one pipeline stage"):
        megatron_utils.broadcast_from_megatron_pp(None)


@pytest.mark.parametrize(
    ("folder", "kind"), [("plain", "language_model"), ("qwen2_moe", "language_model"), ("tied", "value_model")]
)
def test_single_weights_are_converted_as_the_export_does(root: Path, folder: str, kind: str) -> None:
    from verl.models.mcore.gpt.build import named_parameters

    engine: Any = megatron_cases.build(root / folder, {}, kind)
    converter = get_mcore_weight_converter(engine.hf_config)
    found: dict[str, torch.Tensor] = {}
    for named in named_parameters(engine.models[0], engine.hf_config, engine.is_value_model):
        names, tensors = converter.convert_param(f"module.{named.name}", [named.parameter.detach()])
        found |= dict(zip(names, tensors, strict=True))
    expected = cases.export(engine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    half = get_mcore_weight_converter(engine.hf_config, torch.bfloat16)
    ((name,), (tensor,)) = half.convert_param(
        "decoder.final_layernorm.weight", [engine.models[0].decoder.final_layernorm.weight]
    )
    assert name == "model.norm.weight" and tensor.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no rule says"):
        converter.convert_param("decoder.layers.0.mlp.linear_fc3.weight", [])


def test_parts_of_tensor_parallel_ranks_are_put_together(root: Path) -> None:
    from transformers import AutoConfig

    converter = get_mcore_weight_converter(AutoConfig.from_pretrained(root / "plain"))
    gate_up = torch.arange(192.0).reshape(192, 1)  # of two ranks: half of the gate, then half of up, each
    parts = [torch.cat([gate_up[i * 48 : (i + 1) * 48], gate_up[96 + i * 48 : 96 + (i + 1) * 48]]) for i in (0, 1)]
    names, (gate, up) = converter.convert_param("decoder.layers.3.mlp.linear_fc1.weight", parts)
    assert names == [f"model.layers.3.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(gate, gate_up[:96]) and torch.equal(up, gate_up[96:])
