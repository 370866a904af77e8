"""The 3D HybridEngine: weights from every layout of Megatron-Core into vLLM of another one, on two real ranks."""

import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ranks import spawn_ranks
from tests.workers.rollout import tiny
from verl.protocol import DataProto
from verl.utils import envs
from verl.workers.sharding_manager import MegatronVLLMShardingManager, build_sharding_manager

pytest.importorskip("vllm")
pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
pytestmark = pytest.mark.slow

BUCKET = 100 << 10
TP, PP, EP = ({f"{axis}_parallel_size": 2} for axis in ("tensor_model", "pipeline_model", "expert_model"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": TP,
    "pp 2": PP | {"param_offload": True, "grad_offload": True, "optimizer_offload": True},
    "pp 2 x 2 virtual": PP | {"virtual_pipeline_model_parallel_size": 2},
    "ep 2": EP,
}


ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3Moe": ROUTED | {"num_experts": 4, "norm_topk_prob": True},
    "Glm4Moe": ROUTED
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "attention_bias": True, "routed_scaling_factor": 2.5},
}


def write_model(folder: Path, kind: str) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": tiny.EOS,
        "pad_token_id": tiny.PAD,
    }
    config = getattr(transformers, f"{kind}Config")(**(shape | FAMILIES[kind]))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.requires_grad_(False)
    tiny.disturb(model, 0.1, seed=1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of a router
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return model


def build_engine(folder: Path, layout: dict[str, Any]) -> Any:
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=HFModelConfig(path=str(folder), load_tokenizer=False),
        engine_config=McoreEngineConfig(**layout),
        optimizer_config=McoreOptimizerConfig(lr=1e-2),
    )
    engine.initialize()
    return engine


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that come into being, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.set_:  # a view of what is offloaded
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before | self._known:
                    self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _start(rank: int, folder: Path, tensor_parallel: int, model: Any) -> Any:
    envs.write({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    return tiny.start_rollout("vllm", model, folder / str(rank), tensor_model_parallel_size=tensor_parallel)


def check_generation(manager: Any) -> DataProto:
    """Compare what vLLM says of its tokens with what the engine says of them."""
    with manager:
        output = manager.rollout.generate_sequences(tiny.prompts_batch(6, repeat=2))
    engine = manager.engine
    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    mine = output.chunk(size)[rank]
    mine.meta_info.update(temperature=tiny.TEMPERATURE, micro_batch_size_per_gpu=3)
    with engine.eval_mode():
        found = engine.infer_batch(mine)["log_probs"]
    torch.testing.assert_close(mine.batch["rollout_log_probs"], found, atol=1e-4, rtol=0)
    return output


def train(engine: Any, output: DataProto) -> None:
    from tests.workers.engine import cases

    data = output.chunk(engine.get_data_parallel_size())[engine.get_data_parallel_rank()]
    data.meta_info.update(temperature=tiny.TEMPERATURE, micro_batch_size_per_gpu=3)
    data.batch["advantages"] = torch.ones_like(data.batch["rollout_log_probs"])
    with engine.train_mode():
        engine.train_batch(data, cases.loss_fn)


def _run(rank: int, folder: Path, tensor_parallel: int, kind: str) -> None:
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    model = write_model(folder / f"model{rank}", kind)
    rollout = _start(rank, folder, tensor_parallel, model)
    measured = {}
    for name in layouts_of(tensor_parallel, kind):
        engine = build_engine(folder / f"model{rank}", LAYOUTS[name])
        measured[name] = check_layout(engine, rollout, model)
        if name == "ep 2":
            check_faults(engine, rollout, folder / f"fault{rank}")
            check_resharding(engine, rollout)
        parallel_state.destroy_model_parallel()
    torch.save(measured, folder / f"measured{rank}.pt")
    dist.barrier()
    rollout.shutdown()


def layouts_of(tensor_parallel: int, kind: str) -> list[str]:
    experts = kind != "Qwen2"
    left_out = ["pp 2 x 2 virtual"] if experts and tensor_parallel == 2 else [] if experts else ["ep 2"]
    return [name for name in LAYOUTS if name not in left_out]


def check_layout(engine: Any, rollout: Any, model: Any) -> dict[str, float]:
    manager = build_sharding_manager(engine, rollout)
    assert type(manager) is MegatronVLLMShardingManager
    manager.bucket_bytes = BUCKET
    engine._version = rollout.weights_version + 1
    first = check_generation(manager)
    expected = tiny.reference_log_probs(model, first, tiny.TEMPERATURE)
    torch.testing.assert_close(first.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)

    train(engine, first)
    with LiveBytes() as live:
        for name, tensor in engine.named_weights():
            del name, tensor
    second = check_generation(manager)
    assert tiny.sampled_tokens(second) != tiny.sampled_tokens(first)
    measured = manager.last_sync | {"export_peak": float(live.peak)}
    with manager:
        pass
    assert manager.last_sync == {}  # nothing was due
    return measured


def check_faults(engine: Any, rollout: Any, record: Path) -> None:
    """A sync that is left out shows in the log-probabilities; one that fails leaves nothing to generate with."""
    manager = build_sharding_manager(engine, rollout)
    prompts = tiny.prompts_batch(2)
    train(engine, check_generation(manager))
    envs.write({"VERL_FAULT": "skip:weight_sync:step=4"})
    manager.sync(step=4)
    with pytest.raises(AssertionError, match="not close"):
        check_generation(manager)
    assert manager.last_sync == {} and rollout.weights_version == engine.weights_version - 1
    envs.write({"VERL_FAULT": "raise:weight_sync:step=4", "VERL_FAULT_FILE": str(record)})
    with pytest.raises(RuntimeError, match="injected at weight_sync"):
        manager.sync(step=4)
    assert "weight_sync" in record.read_text()
    with pytest.raises(RuntimeError, match="no usable weights"):
        rollout.generate_sequences(prompts)
    check_generation(manager)


def check_resharding(engine: Any, rollout: Any) -> None:
    """Ranks that share a rollout engine generate for the rows of both, and keep their own."""
    from torch.distributed.device_mesh import init_device_mesh

    size = rollout.config.tensor_model_parallel_size
    mesh = init_device_mesh("cpu", (2 // size, size), mesh_dim_names=("dp", "infer_tp"))
    manager = MegatronVLLMShardingManager(engine, rollout, mesh)
    rank = dist.get_rank()
    own = tiny.prompts_batch(3, seed=rank)
    expected = own.batch["input_ids"].clone()
    with manager:
        joined = manager.preprocess_data(own)
        assert len(joined) == 3 * size
        result = manager.postprocess_data(rollout.generate_sequences(joined))
    assert torch.equal(result.batch["prompts"], expected)


@pytest.mark.parametrize(
    ("tensor_parallel", "kind"),
    [
        pytest.param(1, "Qwen3Moe", marks=pytest.mark.full),
        (2, "Qwen3Moe"),
        pytest.param(1, "Qwen2", marks=pytest.mark.full),
        pytest.param(2, "Qwen2", marks=pytest.mark.full),
        pytest.param(2, "Glm4Moe", marks=pytest.mark.full),
    ],
)
def test_every_layout_into_vllm(tmp_path: Path, tensor_parallel: int, kind: str) -> None:
    spawn_ranks(_run, (tmp_path, tensor_parallel, kind))
    stored = load_file(tmp_path / "model0" / "model.safetensors")
    fused = sum(tensor.nbytes for name, tensor in stored.items() if ".0.self_attn." in name and "o_proj" not in name)
    largest = max(fused, *(2 * tensor.nbytes for name, tensor in stored.items() if "gate_proj" in name))
    for rank in (0, 1):
        measured = torch.load(tmp_path / f"measured{rank}.pt")
        assert list(measured) == layouts_of(tensor_parallel, kind)
        for found in measured.values():
            assert found["checksum_ok"] == 1 and found["tensors"] == len(stored)
            assert found["bytes"] == sum(tensor.nbytes for tensor in stored.values())
            assert 0 < found["peak_bytes"] < 2 * BUCKET and found["buckets"] >= 8
            # One parameter as Megatron-Core has it, what it is taken apart into, and what gloo has not let go of yet.
            assert found["export_peak"] <= 4 * largest < found["bytes"] / 2
