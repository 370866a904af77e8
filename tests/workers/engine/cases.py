"""One fixed batch, the ways to train on it, and what plain transformers and torch make of it."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.ranks import note
from verl.algos.aggregate import Extreme, Sum, agg_sum
from verl.protocol import DataProto
from verl.utils.distributed import group_timeout
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.background_load import Values
from verl.workers.engine.fsdp.build import checkpoint_names

ROWS, PROMPT, RESPONSE, VOCAB = 8, 6, 9, 97
TEMPERATURE = 0.7
LR = 1e-2
TIMEOUT_S = 777


def tiny_config(**changes: Any) -> Qwen2Config:
    return Qwen2Config(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": VOCAB,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | changes
    )


def write_model(folder: Path, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(tiny_config(**changes))
    for parameter in model.parameters():  # larger than the default, so that attention and biases matter
        parameter.data.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    return model.eval()


SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    "attention_bias": True, "head_dim": 24,
}  # fmt: skip
"""GLM-4-MoE: a router with a bias, which is a buffer, and positions for half of each head."""


def write_family(folder: Path, kind: str, changes: dict[str, Any], **shape: Any) -> None:
    """Write a tiny model of any family of transformers, such as ``Glm4Moe``."""
    values = tiny_config(**shape).to_dict()
    config = getattr(transformers, f"{kind}Config")(**({key: values[key] for key in SHARED} | changes))
    torch.manual_seed(8)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.08)
    for buffer in (b for key, b in model.named_buffers() if key.endswith("correction_bias")):
        buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)


SHARED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def under_checkpoint_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and cut what transformers holds in memory as ``save_pretrained`` does."""
    return dict(checkpoint_names(model, iter(tensors.items())))


def saved_buffers(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint holds besides parameters, which no step changes."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + RESPONSE), generator=generator)
    prompt = torch.tensor([1, 6, 3, 3, 5, 2, 4, 6]).unsqueeze(1)
    response = torch.tensor([9, 1, 4, 4, 7, 2, 9, 5]).unsqueeze(1)
    column = torch.arange(PROMPT + RESPONSE)
    attention = ((column >= PROMPT - prompt) & (column < PROMPT + response)).long()
    mask = attention[:, PROMPT:].clone()
    mask[4, 2:4] = 0  # tokens of a tool inside a response
    ids = ids * attention
    ids[0, PROMPT + 3] = ids[6, PROMPT + 1] = 0  # a policy may sample the token of the padding
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
        "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
    }


def batch(rows: list[int] | None = None, **meta: Any) -> DataProto:
    index = torch.tensor(list(range(ROWS)) if rows is None else rows)
    data = DataProto.from_dict(tensors={name: value[index] for name, value in tensors().items()})
    data.meta_info.update(temperature=TEMPERATURE, calculate_entropy=True, **meta)
    return data


def loss_fn(output: dict[str, Tensor], rows: DataProto) -> tuple[list[Sum], dict[str, Any]]:
    """A policy term by tokens, an entropy term by sequences, and metrics of every kind."""
    mask, advantages = rows.batch["response_mask"], rows.batch["advantages"]
    value = output["log_probs"] if "log_probs" in output else output["values"].square()
    policy = agg_sum(-value * advantages, mask, "token-mean")
    terms, metrics = [policy], {"loss": policy, "largest": Extreme((value * mask).abs().max(), "max")}
    if "entropy" in output:
        entropy = agg_sum(output["entropy"], mask, "seq-mean-token-mean")
        terms.append(Sum(-0.1 * entropy.total, entropy.unit))
        metrics["entropy"] = entropy
    return terms, metrics


# What plain transformers and torch make of it


def reference_loss(model: Any, value_model: bool = False) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """One padded forward of all rows at once and the loss by its definition: (loss, outputs, metrics)."""
    data = tensors()
    mask = data["response_mask"]
    logits = model(
        input_ids=data["input_ids"],
        attention_mask=data["attention_mask"],
        position_ids=data["position_ids"],
        use_cache=False,
    ).logits[:, PROMPT - 1 : -1]
    if value_model:
        output = {"values": logits[..., 0] * mask}
        loss = (-output["values"].square() * data["advantages"] * mask).sum() / mask.sum()
        total, metrics = loss, {"loss": loss, "largest": output["values"].square().max()}
    else:
        log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        chosen = log_p.gather(-1, data["responses"].unsqueeze(-1)).squeeze(-1) * mask
        entropy = -(log_p.exp() * log_p).sum(-1) * mask
        output = {"log_probs": chosen, "entropy": entropy}
        loss = -(chosen * data["advantages"]).sum() / mask.sum()
        mean_entropy = (entropy.sum(-1) / mask.sum(-1)).mean()
        total = loss - 0.1 * mean_entropy
        metrics = {"loss": loss, "entropy": mean_entropy, "largest": chosen.abs().max()}
    return total, output, metrics


def reference_step(model: Any, value_model: bool = False) -> dict[str, Any]:
    """Differentiate the loss, clip and take a step of AdamW, all by torch."""
    total, output, metrics = reference_loss(model, value_model)
    trained = [p for p in model.parameters() if p.requires_grad]
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    torch.optim.AdamW(trained, lr=LR, weight_decay=0.01).step()
    return {
        "output": {name: value.detach() for name, value in output.items()},
        "metrics": {name: value.item() for name, value in metrics.items()} | {"grad_norm": norm.item()},
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def value_reference(folder: Path, head: dict[str, Tensor], **changes: Any) -> Any:
    config = tiny_config(num_labels=1, classifier_dropout=0.0, **changes)
    model = Qwen2ForTokenClassification.from_pretrained(folder, config=config)
    model.load_state_dict(head, strict=False)
    return model.train()


# Engines


def model_config(folder: Path, **changes: Any) -> HFModelConfig:
    values: dict[str, Any] = {
        "use_remove_padding": True,
        "enable_gradient_checkpointing": False,
        "load_tokenizer": False,
    }
    return HFModelConfig(path=str(folder), **(values | changes))


IN_FP32 = {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}}
"""What a CPU does; a GPU computes in bf16 unless it is told."""


def build(
    folder: Path,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    kind: str = "language_model",
    optimizer: dict[str, Any] | None = None,
) -> BaseEngine:
    built = make(folder, model, engine, kind, optimizer)
    built.initialize()
    return built


def make(
    folder: Path,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    kind: str = "language_model",
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> BaseEngine:
    settings = FSDPEngineConfig(**(IN_FP32 | (engine or {})))
    return EngineRegistry.new(
        kind,
        settings.strategy,
        model_config=model_config(folder, **(model or {})),
        engine_config=settings,
        optimizer_config=FSDPOptimizerConfig(
            **({"lr": LR, "weight_decay": 0.01, "clip_grad": 1.0} | (optimizer or {}))
        ),
        checkpoint_config=None,
        **options,
    )


def rows_of(engine: BaseEngine, uneven: bool) -> list[int]:
    """The shard of this rank: halves, or three quarters and one."""
    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    bounds = [0, ROWS * 3 // 4, ROWS] if uneven and size == 2 else [ROWS * i // size for i in range(size + 1)]
    return list(range(bounds[rank], bounds[rank + 1]))


MICRO = {n: {"micro_batch_size_per_gpu": n} for n in (1, 2, 3, 4)}
PADDED = {"use_remove_padding": False}
FUSED = {"use_fused_kernels": True}
TWO = {"only_world": 2}
IN_ONE, IN_TWO = {"once": 1}, {"once": 2}
"""A case that needs not run in both worlds on a CPU: those of the other world show the same cut, packing or head."""


def dynamic(tokens: int) -> dict[str, Any]:
    return {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens}


CASES: dict[str, dict[str, Any]] = {
    "packed, micro 1": {"cut": MICRO[1]},
    "packed, micro 2, fsdp2": IN_TWO | {"cut": MICRO[2], "engine": {"strategy": "fsdp2"}},
    "packed, micro 4": IN_ONE | {"cut": MICRO[4]},
    "packed, dynamic": IN_TWO | {"cut": dynamic(20)},
    "packed, uneven shards": IN_TWO | {"cut": MICRO[2], "uneven": True},
    "padded, micro 1": IN_ONE | {"cut": MICRO[1], "model": PADDED},
    "padded, micro 2": IN_TWO | {"cut": MICRO[2], "model": PADDED},
    "padded, micro 4": IN_ONE | {"cut": MICRO[4], "model": PADDED},
    "padded, dynamic, uneven": IN_TWO | {"cut": dynamic(20), "model": PADDED, "uneven": True},
    "fused, packed, checkpointing, uneven": IN_TWO
    | {
        "cut": MICRO[2],
        "model": FUSED | {"enable_gradient_checkpointing": True},
        "uneven": True,
    },
    "fused, padded, dynamic": IN_ONE | {"cut": dynamic(20), "model": FUSED | PADDED},
    "checkpointing, entropy in chunks": {
        "cut": MICRO[4],
        "model": {"enable_gradient_checkpointing": True, "enable_activation_offload": True},
        "engine": {"entropy_from_logits_with_chunking": True, "entropy_checkpointing": True},
    },
    "offload": {
        "cut": MICRO[4],
        "engine": {"param_offload": True, "optimizer_offload": True, "reshard_after_forward": False},
    },
    "offload policy": TWO | {"cut": MICRO[4], "engine": {"offload_policy": True}},
    "fused, offload policy": TWO | {"cut": MICRO[4], "model": FUSED, "engine": {"offload_policy": True}},
    "fused, ulysses": TWO | {"cut": MICRO[3], "model": FUSED, "engine": {"ulysses_sequence_parallel_size": 2}},
    "hybrid": TWO | {"cut": MICRO[2], "engine": {"fsdp_size": 1}},
    "wrapped by size, prefetch": TWO
    | {"cut": MICRO[4], "engine": {"wrap_policy": {"min_num_params": 5000}, "forward_prefetch": True}},
    "ulysses": TWO
    | {
        "cut": MICRO[3],
        "engine": {"ulysses_sequence_parallel_size": 2},
        "model": {"enable_gradient_checkpointing": True},
    },
    "ulysses, dynamic": TWO | {"cut": dynamic(15), "engine": {"ulysses_sequence_parallel_size": 2}},
    "ulysses, hybrid": TWO | {"cut": MICRO[1], "engine": {"ulysses_sequence_parallel_size": 2, "fsdp_size": 1}},
}

OTHERS: dict[str, dict[str, Any]] = {
    "tied": {"cut": MICRO[4], "folder": "tied"},
    "tied, fused": IN_TWO | {"cut": MICRO[3], "folder": "tied", "model": FUSED},
    "value": {"cut": MICRO[3], "kind": "value_model"},
    "value, padded": IN_ONE | {"cut": MICRO[3], "kind": "value_model", "model": PADDED},
    "value, ulysses": TWO | {"cut": MICRO[1], "kind": "value_model", "engine": {"ulysses_sequence_parallel_size": 2}},
    "experts, offload": IN_TWO
    | {"cut": dynamic(20), "folder": "glm4_moe", "uneven": True, "engine": {"param_offload": True}},
    "experts, padded": IN_ONE | {"cut": MICRO[4], "folder": "glm4_moe", "model": PADDED},
    "experts, ulysses": TWO
    | {
        "cut": MICRO[3],
        "folder": "glm4_moe",
        "engine": {"ulysses_sequence_parallel_size": 2},
        "model": {"enable_gradient_checkpointing": True},
    },
    "lora": {"cut": MICRO[4], "model": {"lora_rank": 4, "lora_alpha": 8}},
    "lora, fused, offload, checkpointing": {
        "cut": MICRO[2],
        "model": FUSED | {"lora_rank": 4, "lora_alpha": 8, "enable_gradient_checkpointing": True},
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
    "lora, experts": IN_ONE | {"cut": MICRO[4], "folder": "glm4_moe", "model": {"lora_rank": 4, "lora_alpha": 8}},
    "lora, experts, checkpointing": IN_TWO
    | {
        "cut": dynamic(20),
        "folder": "glm4_moe",
        "model": {"lora_rank": 4, "lora_alpha": 8, "enable_gradient_checkpointing": True},
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
    "lora, ulysses": TWO
    | {
        "cut": dynamic(15),
        "model": {"lora_rank": 4, "lora_alpha": 8},
        "engine": {"ulysses_sequence_parallel_size": 2, "fsdp_size": 1},
    },
}


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Infer, differentiate the loss of the role, take one step, and export the weights before and after."""
    from tests.workers.engine import real_losses  # which builds on this module

    engine = build(
        folder / case.get("folder", "plain"), case.get("model"), case.get("engine"), case.get("kind", "language_model")
    )
    rows = rows_of(engine, case.get("uneven", False))
    result: dict[str, Any] = {"rows": rows, "before": export(engine)}
    groups = (engine.layout.shard_group, engine.layout.sp_group, engine.shares.dp_group)
    result["timeouts"] = [group_timeout(group).total_seconds() for group in groups if group is not None]
    if case.get("model", {}).get("lora_rank"):
        result["adapter before"] = export(engine, adapter_only=True)
    with engine.eval_mode():
        result["output"] = engine.infer_batch(batch(rows, **case["cut"]))
    result["real loss"] = real_losses.gradient(engine, case.get("kind", "language_model"), rows, case["cut"])
    with engine.train_mode():
        result["metrics"] = engine.train_batch(batch(rows, **case["cut"]), loss_fn)
        result["lr"] = engine.lr_scheduler_step()
    result["weights"] = export(engine)
    check_sent(engine, result["weights"])
    result["version"] = engine.weights_version
    if case.get("model", {}).get("lora_rank"):
        result["adapter"] = export(engine, adapter_only=True)
        with engine.disable_adapter(), engine.eval_mode():
            result["base output"] = engine.infer_batch(batch(rows, **case["cut"]))
    return result


def export(engine: BaseEngine, adapter_only: bool = False) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.named_weights(adapter_only)}


def check_sent(engine: BaseEngine, whole: dict[str, Tensor]) -> None:
    """A receiver gets the bits that it would make of the whole tensors: bf16, fp32 for some, and unknown for one."""

    def held(name: str) -> torch.dtype | None:
        in_fp32 = "norm" in name or "correction_bias" in name
        return None if "o_proj" in name else torch.float32 if in_fp32 else torch.bfloat16

    def agree(names: Sequence[Sequence[str]]) -> list[torch.dtype | None]:
        dtypes = [{held(name) for name in each} for each in names]
        return [each.pop() if len(each) == 1 else None for each in dtypes]

    room: list[int] = []
    sent = {name: tensor.clone() for name, tensor in engine.sent_weights(agree, room.append)}
    assert list(sent) == list(whole)
    for name, tensor in sent.items():
        assert tensor.dtype == held(name) or (held(name) is None and tensor.dtype == torch.float32), name
        assert torch.equal(tensor, whole[name].to(tensor.dtype)), name
    assert sum(room) < sum(tensor.nbytes for tensor in whole.values())


def runs_in(case: dict[str, Any], world: int, everything: bool = False) -> bool:
    """Return whether a case runs in a world; with ``everything`` it does wherever it can."""
    return case.get("only_world", world) == world and (everything or case.get("once", world) == world)


def run_world(rank: int, world_size: int, folder: Path, store: str, everything: bool = False) -> None:
    """Run the cases of a world on one rank and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world_size > 1:
        store, timeout = f"file://{store}", timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    chosen = {name: case for name, case in (CASES | OTHERS).items() if runs_in(case, world_size, everything)}
    results = {}
    for name, case in chosen.items():
        note(name)
        results[name] = run_case(folder, case)
    torch.save(results, folder / f"world_{world_size}_rank_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


# Weights that arrive in a thread


def as_on_an_accelerator(value: Tensor, memory: Tensor) -> Values:
    """Stand in for ``background_load.place`` as if the memory were that of an accelerator."""
    yield memory, value


def slow() -> Values:
    """Take longer than the construction of a model, and fill nothing."""
    time.sleep(0.5)
    return ()
