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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [True, False])
def test_the_state_of_an_optimizer_leaves_and_comes_back(root: Path, dtype: str, shards: bool) -> None:
    """Of half precision there are copies too; parameters themselves stay, and steps go on as if nothing had been."""
    layout = {"dtype": dtype, "use_distributed_optimizer": shards}
    engine, other = (megatron_cases.build(root / "plain", layout) for _ in range(2))
    data = cases.batch(**cases.MICRO[4])

    def sizes() -> list[int]:
        states = [state for each in engine.optimizer.chained_optimizers for state in each.state.values()]
        return [state["exp_avg"].untyped_storage().nbytes() for state in states]

    def copies() -> list[int]:
        groups = [group for each in engine.optimizer.chained_optimizers for group in each.param_groups]
        return [p.untyped_storage().nbytes() for group in groups for p in group["params"]]

    with engine.train_mode(), other.train_mode():
        engine.train_batch(data, cases.loss_fn)
        other.train_batch(data, cases.loss_fn)
        megatron_utils.offload_megatron_copy_params(engine.optimizer)
        assert all(sizes()) and any(copies()) == (dtype == "fp32")
        megatron_utils.load_megatron_copy_params(engine.optimizer)
        megatron_utils.offload_megatron_optimizer(engine.optimizer)
        assert not any(sizes()) and any(copies()) == (dtype == "fp32")
        assert all(p.untyped_storage().nbytes() for p in engine.models[0].parameters())
        megatron_utils.load_megatron_optimizer(engine.optimizer)
        assert all(sizes()) and all(copies())
        assert engine.train_batch(data, cases.loss_fn) == other.train_batch(data, cases.loss_fn)
    assert all(torch.equal(tensor, cases.export(other)[name]) for name, tensor in engine.named_weights())


def test_parts_of_a_layer_are_put_together(root: Path) -> None:
    names = {"qkv_layer_name": "linear_qkv", "gate_proj_layer_name": "linear_fc1"}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(root / "plain")  # 4 heads and 2 groups of 16
    whole = torch.arange(float((4 + 2 * 2) * 16 * 3)).view(-1, 3)
    parts = list(whole.chunk(2))  # a group each: two heads, their key and their value
    qkv = megatron_utils.default_tp_concat_fn(names, "layers.0.linear_qkv.weight", parts[0], parts, config)
    groups = [part.split([32, 16, 16]) for part in parts]
    assert torch.equal(qkv, torch.cat([group[i] for i in range(3) for group in groups]))
    three = megatron_utils.default_tp_concat_fn(
        names, "layers.0.linear_qkv.weight", parts[0], parts, None, config, convert_qkv_gate_up_by_simple_split=True
    )
    assert torch.equal(torch.cat(three), qkv) and len(three) == 3
    gate_up = megatron_utils.default_tp_concat_fn(names, "layers.0.linear_fc1.weight", parts[0], parts, config)
    halves = [part.chunk(2) for part in parts]
    assert torch.equal(gate_up, torch.cat([halves[0][0], halves[1][0], halves[0][1], halves[1][1]]))
    row = torch.zeros(4, 2)
    row.tensor_model_parallel, row.partition_dim = True, 1  # type: ignore[attr-defined]
    assert megatron_utils.default_tp_concat_fn(names, "linear_proj.weight", row, [row, row], config).shape == (4, 4)
    norm = torch.ones(3)
    assert megatron_utils.default_tp_concat_fn(names, "input_layernorm.weight", norm, [norm, norm], config) is norm


def test_weights_are_filled_by_the_established_loaders(root: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from safetensors.torch import load_file

    from verl.models.mcore import hf_to_mcore_config
    from verl.models.weight_loader_registry import get_weight_loader
    from verl.utils.model import load_mcore_dist_weights, load_megatron_gptmodel_weights

    engine: Any = megatron_cases.build(root / "plain", {})
    engine.save_checkpoint(str(tmp_path))
    hf_config = engine.hf_config
    stored = load_file(root / "plain" / "model.safetensors")

    def chunks(value: bool = False) -> list[Any]:
        wrap = megatron_utils.McoreModuleWrapperConfig(is_value_model=value)
        return megatron_utils.make_megatron_module(wrap, hf_to_mcore_config(hf_config, torch.float32), hf_config)

    of_folder, of_checkpoint, critic = chunks(), chunks(), chunks(value=True)
    path = SimpleNamespace(model=SimpleNamespace(path=str(root / "plain")))
    load_megatron_gptmodel_weights(path, hf_config, of_folder, torch.float32)
    load_mcore_dist_weights(of_checkpoint, megatron_utils.get_dist_checkpoint_path(str(tmp_path)))
    for made in (of_folder, of_checkpoint):
        found = dict(megatron_utils.per_tensor_generator(made, hf_config, None))
        assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    load_megatron_gptmodel_weights(path, hf_config, critic, torch.float32, is_value_model=True)
    found = dict(megatron_utils.per_tensor_generator(critic, hf_config, None))
    assert found.keys() - stored.keys() == {"score.weight", "score.bias"}
    load_mcore_dist_weights(critic, megatron_utils.get_dist_checkpoint_path(str(tmp_path)), is_value_model=True)
    again = dict(megatron_utils.per_tensor_generator(critic, hf_config, None))
    assert all(torch.equal(again[name], found[name]) for name in found)
    del stored["model.norm.weight"]
    with pytest.raises(ValueError, match="lacks 'model.norm.weight'"):
        get_weight_loader("Qwen2ForCausalLM")(stored, of_folder, hf_config, torch.float32)
    with pytest.raises(ValueError, match="GPT2LMHeadModel is not supported; supported are"):
        get_weight_loader("GPT2LMHeadModel")


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
    with pytest.raises(ValueError, match="no rule maps"):
        converter.convert_param("decoder.layers.0.mlp.linear_fc3.weight", [])


def test_parts_of_tensor_parallel_ranks_are_put_together(root: Path) -> None:
    from transformers import AutoConfig

    converter = get_mcore_weight_converter(AutoConfig.from_pretrained(root / "plain"))
    gate_up = torch.arange(192.0).reshape(192, 1)  # of two ranks: half of the gate, then half of up, each
    parts = [torch.cat([gate_up[i * 48 : (i + 1) * 48], gate_up[96 + i * 48 : 96 + (i + 1) * 48]]) for i in (0, 1)]
    names, (gate, up) = converter.convert_param("decoder.layers.3.mlp.linear_fc1.weight", parts)
    assert names == [f"model.layers.3.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(gate, gate_up[:96]) and torch.equal(up, gate_up[96:])
