"""Each rank reads its rows of checkpoints that transformers converts, and gets what ``from_pretrained`` gives.

Families of the examples, and one whose conversion mixes rows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Ranks, note
from tests.workers.engine import cases, vision_cases
from tests.workers.engine.test_background_load import as_rank
from verl.errors import ModelWeightsError
from verl.utils.model import get_hf_auto_model_class, stored_buffers
from verl.workers.engine.fsdp.build import checkpoint_names, local_rows
from verl.workers.engine.fsdp.stored_model import StoredModel
from verl.workers.engine.weights import SafetensorsReader, open_weights
from verl.workers.sharding_manager.weight_sync import Meter

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3Moe": EXPERTS | {"num_experts": 5, "head_dim": 16},  # experts that no number of ranks divides
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": EXPERTS | LATENT | {"n_routed_experts": 4},
    "DeepseekV3": EXPERTS | LATENT | {"n_routed_experts": 4},
    "Glm4Moe": cases.SIGMOID,
    "HrmText": {},
}
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
FAMILIES = (*TEXT, *VISION)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    for name in VISION:
        vision_cases.write_model(path / name, name)
        publish(path / name)
    for name, changes in TEXT.items():
        cases.write_family(path / name, name, changes)
    return path


def publish(folder: Path) -> None:
    """Give the file the names and layouts of published ones."""
    model = whole(folder)
    tensors = published(model, load(folder, torch.float32))
    file = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(file, folder / "model.safetensors", metadata={"format": "pt"})


def published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors as published checkpoints hold them."""
    found = dict(checkpoint_names(model, iter(tensors.items())))
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        older = (("model.language_model.", "model."), ("model.visual.", "visual."))
        for new, old in older:
            found = {name.replace(new, old): tensor for name, tensor in found.items()}
    return found


def whole(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return get_hf_auto_model_class(config).from_pretrained(folder, dtype=dtype)


def load(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what ``from_pretrained`` loads: parameters, tied ones once, and stored buffers."""
    model = whole(folder, dtype)
    return dict(model.named_parameters()) | dict(stored_buffers(model))


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return get_hf_auto_model_class(config).from_config(config)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_those_of_from_pretrained(root: Path, family: str, ranks: int) -> None:
    expected = load(root / family, torch.float32)
    files = open_weights(str(root / family), "model.path")
    stored = StoredModel(on_meta(transformers.AutoConfig.from_pretrained(root / family)), files)
    for name, tensor in expected.items():
        for rank in range(ranks):
            rows = rows_of(tensor, rank, ranks)
            found = stored.read(name, tensor.shape, rows)
            assert found is not None and torch.equal(found.to(tensor.dtype), tensor[rows]), (name, rank)


def rows_of(tensor: Tensor, rank: int, ranks: int) -> slice:
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    return local_rows(tensor.shape, group)


# The engine


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_has_the_dtypes_of_transformers(root: Path, family: str) -> None:
    """Also of what transformers keeps in fp32."""
    if family == "HrmText":
        pytest.skip("no family of the engine")
    engine: Any = cases.build(root / family, {"use_remove_padding": False}, {"model_dtype": "bf16"})
    found = dict(engine.module.named_parameters()) | dict(stored_buffers(engine.module))
    expected = load(root / family, torch.bfloat16)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        value: Any = found[name]
        value = value.to_local() if isinstance(value, DTensor) else value
        assert value.dtype == tensor.dtype and torch.equal(value, tensor), name


def test_ranks_have_the_weights_of_from_pretrained_and_send_none(root: Path, tmp_path: Path) -> None:
    """Shards of four ranks, and of two that have replicas."""
    Ranks(build_all, (4, root, str(tmp_path / "store")), nprocs=4).join()


def build_all(rank: int, world_size: int, root: Path, store: str) -> None:
    with as_rank(rank, world_size, store):
        for family in ("Qwen3Moe", "Mixtral", "DeepseekV3", "qwen2_5_vl", "qwen3_vl_moe"):
            expected = load(root / family, torch.float32)
            for size in (-1, 2):
                note(f"{family}, fsdp_size={size}")
                with Collectives() as sent:  # type: ignore[no-untyped-call]
                    engine: Any = cases.build(root / family, {"use_remove_padding": False}, {"fsdp_size": size})
                assert not sent.names
                shards = dict(engine.module.named_parameters())
                for name, parameter in shards.items():
                    assert isinstance(parameter, DTensor)
                    group = engine.layout.shard_group
                    assert torch.equal(parameter.to_local(), expected[name][local_rows(parameter.shape, group)]), name
                buffers = dict(stored_buffers(engine.module))
                assert shards.keys() | buffers.keys() == expected.keys()
                assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())
        with Collectives() as sent:  # type: ignore[no-untyped-call]
            dist.all_reduce(torch.ones(1))
        assert sent.names == ["c10d.allreduce_"]


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the ranks send to each other."""

    def __enter__(self) -> Any:
        self.names: list[str] = []
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(f"c10d.{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))


# Memory, counted on models of their full width


MOE: dict[str, Any] = {"num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 151936, "hidden_size": 2048}
FULL: dict[str, Any] = {
    "Qwen2.5-VL-7B": lambda: transformers.Qwen2_5_VLConfig(
        text_config={"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 2, "num_attention_heads": 28,
                     "num_key_value_heads": 4, "vocab_size": 152064},
        vision_config={"hidden_size": 1280, "out_hidden_size": 3584, "depth": 2},
    ),
    "Qwen3-30B-A3B": lambda: transformers.Qwen3MoeConfig(
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, num_key_value_heads=4, head_dim=128, **MOE
    ),
    "Qwen3-VL-30B-A3B": lambda: transformers.Qwen3VLMoeConfig(
        text_config={"num_experts": 128, "moe_intermediate_size": 768, "num_key_value_heads": 4, **MOE},
        vision_config={"depth": 2, "deepstack_visual_indexes": [0]},
    ),
    "Mixtral-8x7B": lambda: transformers.MixtralConfig(num_hidden_layers=2),
    "DeepSeek-V3": lambda: transformers.DeepseekV3Config(num_hidden_layers=5),
}  # fmt: skip


class FilesOnMeta:
    """Files of a checkpoint, of which only names and shapes exist."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.read_elements = 0

    def names(self) -> set[str]:
        return set(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, shape: Sequence[int], part: slice) -> Tensor:
        assert tuple(shape) == self.shapes[name]
        rows = len(range(*part.indices(shape[0]))) if shape else None
        found = torch.empty(shape if rows is None else (rows, *shape[1:]), device="meta", dtype=torch.bfloat16)
        self.read_elements += found.numel()
        return found


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are alive, views apart."""

    def __enter__(self) -> Any:
        self.meter = Meter()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if isinstance(result, Tensor) and returns and returns[0].alias_info is None:
            self.meter.watch(result)
        return result


@pytest.mark.parametrize("name", FULL)
def test_a_rank_of_eight_reads_its_rows_and_holds_one_tensor_besides(name: str) -> None:
    model = on_meta(FULL[name]())
    tensors = dict(model.named_parameters()) | dict(stored_buffers(model))
    files = FilesOnMeta(published(model, tensors))
    stored = StoredModel(model, files)
    for each, tensor in tensors.items():
        rows = rows_of(tensor, 0, 8)
        own = tensor[rows].numel()
        before = files.read_elements
        with Alive() as alive:  # type: ignore[no-untyped-call]
            found = stored.read(each, tensor.shape, rows)
            assert found is not None and found.shape == tensor[rows].shape
        assert files.read_elements - before == own, each
        assert alive.meter.peak_bytes <= 2 * own * torch.bfloat16.itemsize, each


# Files that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("an expert less", r"made of 'model.layers.1.mlp.experts.0.gate_proj.weight' .* has shape \(4, 96, 64\), the "),
        ("an expert too many", r"has shape \(6, 96, 64\), the model of its config.json needs \(5, 96, 64\)"),
        ("an expert of another size", "cannot make 'model.layers.1.mlp.experts.down_proj' of"),
        ("a layer less", "lacks 11 tensors of the model, the first is 'model.layers.1"),
        ("a value that is no number", "'model.layers.1.mlp.experts.4.up_proj.weight' in .*model.safetensors holds NaN"),
    ],
)
def test_files_that_do_not_fit_are_named(root: Path, tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes((root / "Qwen3Moe" / "config.json").read_bytes())
    tensors = load_file(root / "Qwen3Moe" / "model.safetensors")
    last = [name for name in tensors if name.startswith("model.layers.1.mlp.experts.4.")]
    assert len(last) == 3
    for name in last:
        if change == "an expert less":
            del tensors[name]
        elif change == "an expert too many":
            tensors[name.replace(".4.", ".5.")] = tensors[name].clone()
        elif change == "an expert of another size":
            tensors[name] = tensors[name][:-1].clone()
        elif change == "a value that is no number" and "up_proj" in name:
            tensors[name][3, 5] = torch.nan
    if change == "a layer less":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelWeightsError, match=message):
        cases.build(tmp_path)


def test_a_conversion_that_mixes_rows_is_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.AutoConfig.from_pretrained(root / "HrmText")
    with caplog.at_level("INFO", logger="verl.workers.engine.fsdp.stored_model"):
        StoredModel(on_meta(config), SafetensorsReader(str(root / "HrmText")))
    assert "tensors as a whole, such as" in caplog.text and "Chunk(dim=0)" in caplog.text


@pytest.mark.parametrize("family", ["Qwen3Moe", "qwen2_5_vl"])
@pytest.mark.parametrize("is_old", [False, True])
def test_files_of_torch_save_are_read_by_rows(root: Path, tmp_path: Path, family: str, is_old: bool) -> None:
    """Several files with an index, in both formats that torch has had."""
    (tmp_path / "config.json").write_bytes((root / family / "config.json").read_bytes())
    tensors = load_file(root / family / "model.safetensors")
    names = sorted(tensors)
    files = {f"pytorch_model-0000{n}-of-00002.bin": names[n - 1 :: 2] for n in (1, 2)}
    for file, held in files.items():
        state = {name: tensors[name] for name in held}
        torch.save(state, tmp_path / file, _use_new_zipfile_serialization=not is_old)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    engine: Any = cases.build(tmp_path, {"use_remove_padding": False})
    expected = load(root / family, torch.float32)
    found = dict(engine.module.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
