"""Models with experts whose configuration asks for their balancing loss, and what plain transformers makes of it."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.workers.engine import cases
from verl.protocol import DataProto
from verl.workers.engine import BaseEngine

COEFFICIENT = 0.5
"""So large that a gradient without the loss, or with a part of it, is far from the right one."""

NUMBERED = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = NUMBERED | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "head_dim": 16}
ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
EAGER: dict[str, Any] = {"override_config": {"attn_implementation": "eager"}}
GRANITE = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": LOCAL,
    "Qwen2Moe": QWEN,
    "Qwen3Moe": QWEN,
    "Olmoe": NUMBERED,
    "FlexOlmo": NUMBERED,
    "GraniteMoe": LOCAL | GRANITE,
    "GraniteMoeShared": LOCAL | {"shared_intermediate_size": 32},
    "Phimoe": LOCAL,
    "JetMoe": LOCAL | {"kv_channels": 16, "aux_loss_coef": COEFFICIENT},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 0},
    "MiniMaxM2": LOCAL | {"head_dim": 16, "rotary_dim": 8},
    "Laguna": NUMBERED,
    "Mellum": NUMBERED,
    "GptOss": LOCAL | {"head_dim": 16} | ATTENTION,
    "Jamba": NUMBERED
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "MiniMax": LOCAL | {"head_dim": 16},
    "Qwen3Next": QWEN | ATTENTION,
    "Qwen3_5MoeText": QWEN | ATTENTION,
    "GraniteMoeHybrid": LOCAL | {"layer_types": ["attention", "attention"]},
    "Dbrx": {},
    "Glm4Moe": cases.SIGMOID,
}
PADDED_ONLY = ("GptOss", "Jamba", "MiniMax", "Qwen3Next", "Qwen3_5MoeText", "GraniteMoeHybrid")
"""Models whose rows cannot be packed."""
WITHOUT_LOSS = ("Glm4Moe",)
"""Models that return the logits of their routers, and for which transformers adds no loss."""
DBRX = {
    "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": cases.VOCAB, "pad_token_id": 0,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "output_router_logits": True,
    "ffn_config": {
        "ffn_hidden_size": 48, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": COEFFICIENT,
    },
}  # fmt: skip


def write_model(folder: Path, kind: str, **changes: Any) -> None:
    shape = cases.tiny_config().to_dict()
    values = {name: shape[name] for name in cases.SHARED} | {"num_key_value_heads": 2, "max_position_embeddings": 64}
    values |= {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT} | FAMILIES[kind]
    values = DBRX if kind == "Dbrx" else values
    torch.manual_seed(8)
    config = getattr(transformers, f"{kind}Config")(**(values | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.08)
    model.save_pretrained(folder)


def aux_loss(model: Any, data: DataProto) -> Tensor:
    """Return the balancing loss of padded rows, as transformers computes it."""
    names = ("input_ids", "attention_mask", "position_ids")
    return model(**{name: data.batch[name] for name in names}, use_cache=False).aux_loss


def reference(folder: Path, parts: list[list[int]], **options: Any) -> dict[str, Any]:
    """Return the loss of the contract plus the mean over micro-batches, and its gradient."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    total, _, metrics = cases.reference_loss(model)
    losses = [aux_loss(model, cases.batch(part)) for part in parts]
    mean = torch.stack(losses).mean()
    (total + COEFFICIENT * mean).backward()
    return {
        "metrics": {name: value.item() for name, value in (metrics | {"aux_loss": mean}).items()},
        "gradient": {name: each.grad for name, each in model.named_parameters() if each.grad is not None},
    }


def gradient_of(engine: BaseEngine, data: DataProto) -> dict[str, Any]:
    """Return the metrics and the whole gradient of an engine, under the names of the model."""
    engine.optimizer_zero_grad()
    metrics = engine.forward_backward_batch(data, cases.loss_fn)
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found[name] = whole.clone()
    return {"metrics": metrics, "gradient": found}


RANKS: dict[str, dict[str, Any]] = {
    "data parallel": {"parts": [[0, 1], [2, 3], [4, 5], [6, 7]], "cut": 2},
    "data parallel, unequal shards, checkpointing": {
        "parts": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "cut": 2,
        "uneven": True,
        "model": {"enable_gradient_checkpointing": True},
        "engine": {"strategy": "fsdp2"},
    },
    "ulysses": {"parts": [[0, 1, 2], [3, 4, 5], [6, 7]], "cut": 3, "engine": {"ulysses_sequence_parallel_size": 2}},
    "ulysses, fused": {
        "parts": [[0, 1, 2], [3, 4, 5], [6, 7]],
        "cut": 3,
        "model": cases.FUSED,
        "engine": {"ulysses_sequence_parallel_size": 2},
    },
}
"""Layouts of two ranks, and the micro-batches of all of them."""


def run_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=cases.TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    results = {}
    for name, case in RANKS.items():
        engine = cases.build(folder / "model", case.get("model"), case.get("engine"))
        rows = cases.rows_of(engine, case.get("uneven", False))
        results[name] = gradient_of(engine, cases.batch(rows, micro_batch_size_per_gpu=case["cut"]))
    torch.save(results, folder / f"rank_{rank}.pt")
    dist.destroy_process_group()
