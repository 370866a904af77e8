"""An engine in bf16 has the same bits whether the trainer casts its fp32 weights before it gathers them, or not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine import cases
from tests.workers.rollout import tiny, vision
from tests.workers.sharding_manager.test_megatron_vllm import ROUTED, write_model
from verl.workers.config import HFModelConfig
from verl.workers.rollout import build_rollout
from verl.workers.sharding_manager.weight_sync import WeightSync

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

LORA = {"lora_rank": 4, "lora_alpha": 8}
FAMILIES = {
    "Gemma": {"tie_word_embeddings": True, "head_dim": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": ROUTED
    | {
        "n_routed_experts": 4, "kv_lora_rank": 512, "q_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
        "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def write(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind[0].islower():
        model = vision.make_model(folder, kind)[0]
        model.save_pretrained(folder)
        return model
    if kind in FAMILIES:
        monkeypatch.setitem(write_model.__globals__["FAMILIES"], kind, FAMILIES[kind])
    return write_model(folder, kind)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rollout", "kind", "whole"),
    [
        ("vllm", "Qwen2", "nothing"),
        ("vllm", "Qwen3Moe", ".gate.weight"),  # kept in fp32
        ("sglang", "Qwen2", "nothing"),
        ("sglang", "Gemma", "norm.weight"),  # changed by SGLang's loader
    ],
)
def test_servers_tell_their_dtypes(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: str, kind: str, whole: str
) -> None:
    """They start without weights. Their first update is whole; the same weights in bf16, but for those whose names end
    with ``whole``, then give the same answers, bit for bit."""
    from tests.workers.rollout.subjects import StandaloneServer
    from verl.workers.sharding_manager.servers import ServerSync

    pytest.importorskip(rollout)
    model = write(tmp_path, kind, monkeypatch)
    engine: Any = cases.build(tmp_path)
    server = StandaloneServer(rollout, model, tmp_path / "server", dtype="bfloat16")
    try:
        server.sync = ServerSync(engine, bucket_bytes=1 << 18, timeout_s=600)
        answers, sent = [], []
        for _ in range(2):
            engine.weights_version += 1
            assert server.sync.run({"server": server.handle}, step=None) == {}
            sent.append(server.sync.last_sync["bytes"])
            found = asyncio.run(server.generate([5, 6, 7], {"temperature": 0.0, "max_tokens": 8}, str(len(sent))))
            answers.append((found.token_ids, found.log_probs))
    finally:
        server.close()
    in_fp32 = sum(tensor.nbytes for name, tensor in engine.named_weights() if name.endswith(whole))
    assert sent[1] == (sent[0] - in_fp32) / 2 + in_fp32 and answers[0] == answers[1]


def held_by(rollout: Any) -> dict[str, Tensor]:
    model = rollout._llm.collective_rpc(lambda worker: worker)[0].model_runner.get_model()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        ("Qwen3Moe", {}),
        *(
            pytest.param(kind, adapters, marks=pytest.mark.full)
            for kind, adapters in [
                ("Qwen2", {}), ("Qwen2", LORA), ("Qwen3Moe", LORA), ("Glm4Moe", {}), ("Mixtral", {}),
                ("DeepseekV2", {}), ("qwen2_vl", {}), ("qwen2_5_vl", {}), ("qwen3_vl", {}), ("glm4v", {}),
            ]
        ),
    ],
)  # fmt: skip
def test_the_engine_has_the_bits_of_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, adapters: dict[str, Any]
) -> None:
    write(tmp_path, kind, monkeypatch)
    engine: Any = cases.build(tmp_path, {"use_remove_padding": False} | adapters)
    for number, parameter in enumerate(engine.module.parameters()):
        if parameter.requires_grad:
            draw = torch.Generator().manual_seed(number)
            parameter.data.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    config = tiny.rollout_config("vllm", dtype="bfloat16")
    rollout: Any = build_rollout(config, HFModelConfig(path=str(tmp_path), load_tokenizer=False), engine)
    try:
        cast = WeightSync(engine, rollout, 1 << 20, step=None).run()
        found = held_by(rollout)
        elements = {name: tensor.numel() for name, tensor in engine.named_weights()}
        in_fp32 = {name for name in elements if rollout.weight_dtype(name) != torch.bfloat16}
        assert all(name.endswith((".gate.weight", "correction_bias")) for name in in_fp32), in_fp32
        assert cast["bytes"] == sum(count * (4 if name in in_fp32 else 2) for name, count in elements.items())
        monkeypatch.setattr(rollout, "weight_dtype", lambda name: None)
        engine.weights_version += 1
        whole = WeightSync(engine, rollout, 1 << 20, step=None).run()
        assert whole["bytes"] == 4 * sum(elements.values())
        expected = held_by(rollout)
    finally:
        rollout.shutdown()
    assert found.keys() == expected.keys() and any(value.dtype == torch.bfloat16 for value in found.values())
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
