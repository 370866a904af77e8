"""Tiny models of families whose attention has more than scale and causal mask, and log-probabilities of their rows."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.engine import cases
from verl.algos.aggregate import agg_sum
from verl.protocol import DataProto
from verl.workers.engine import BaseEngine

LENGTHS = [11, 24, 17]
PROMPT, RESPONSE, WINDOW = 8, 20, 6

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "max_position_embeddings": 128, "n_positions": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 4,
}  # fmt: skip
"""Sizes for whatever a family calls them."""

CAPPED = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": CAPPED,
    "vaultgemma": CAPPED,
    "gpt_oss": {},
    "granite_swa": {},
    "mimo_v2_flash": {},
    "llama4_text": {},
    "phimoe": {},
    "gemma3_text": {},
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "bloom": {},
    "qwen3": {},
}
"""A cap of the logits, sinks, chunks, windows (of the mask alone, or of the layer too), biases of distance, nothing."""
WITHOUT: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None},
    "vaultgemma": {"attn_logit_softcapping": None},
    "llama4_text": {"attention_chunk_size": 64},
    "phimoe": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "qwen2": {"sliding_window": 64},
}
"""What turns the option of a family off; sinks are turned off by their weights."""


def config_of(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of a family."""
    plain = AutoConfig.for_model(family)
    fixed = {name for name in SIZES if getattr(getattr(type(plain), name, None), "fset", 0) is None}
    values = {name: value for name, value in SIZES.items() if hasattr(plain, name) and name not in fixed}
    if hasattr(plain, "qk_rope_head_dim"):  # latent attention: heads of other widths, no groups
        values |= {"num_key_value_heads": 4}
        values.pop("head_dim", None)
    kinds = list(dict.fromkeys(getattr(plain, "layer_types", None) or ()))
    if kinds:
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    return AutoConfig.for_model(family, **(values | changes))


def write(folder: Path, family: str, **changes: Any) -> None:
    """Write a model whose attention is far from even."""
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = min(1.0, 2.0 / parameter.shape[-1] ** 0.5)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif "sink" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    model.get_input_embeddings().weight.data[0] = 0.0  # some families load the row of the padding as zeros
    model.save_pretrained(folder)


def rows() -> list[Tensor]:
    """Return the tokens of each row."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator) for length in LENGTHS]


def batch() -> DataProto:
    """Return the rows with prompts of up to 8 tokens."""
    ids = torch.zeros(len(LENGTHS), PROMPT + RESPONSE, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for at, row in enumerate(rows()):
        first = PROMPT - (4 + 2 * at)
        ids[at, first : first + len(row)] = row
        attention[at, first : first + len(row)] = 1
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:],
        "response_mask": attention[:, PROMPT:],
    }
    data = DataProto.from_dict(tensors=tensors)
    data.meta_info.update(temperature=1.0, micro_batch_size_per_gpu=len(LENGTHS))
    return data


def wanted(folder: Path, **changes: Any) -> tuple[Tensor, float]:
    """Return the log-probabilities of the responses and the norm of their mean's gradient, by eager attention alone."""
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **changes).eval()
    found = torch.zeros(len(LENGTHS), RESPONSE)
    for at, row in enumerate(rows()):
        first = 4 + 2 * at
        scores = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = scores.gather(-1, row[1:, None])[first - 1 :, 0]
        found[at, : len(chosen)] = chosen
    loss = -found.sum() / batch().batch["response_mask"].sum()
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return found.detach(), float(torch.stack(squares).sum().sqrt())


def found(engine: BaseEngine) -> tuple[Tensor, float]:
    """Return what ``wanted`` returns, of an engine."""
    with engine.eval_mode():
        log_probs = engine.infer_batch(batch())["log_probs"]

    def loss(output: dict[str, Tensor], data: DataProto) -> tuple[list[Any], dict[str, Any]]:
        return [agg_sum(-output["log_probs"], data.batch["response_mask"], "token-mean")], {}

    with engine.train_mode():
        return log_probs, engine.train_batch(batch(), loss)["grad_norm"]


def ulysses_rank(rank: int, root: Path, families: list[str]) -> None:
    """Run families on a rank of two that share each sequence, and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2)
    results = {}
    for family in families:
        engine = cases.build(root / family, engine={"ulysses_sequence_parallel_size": 2})
        results[family] = found(engine)
    torch.save(results, root / f"ulysses_{rank}.pt")
    dist.destroy_process_group()
