"""The losses of the roles on the fixed batch: what an engine makes of them, and what their definitions give."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.workers.engine import cases
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.engine import BaseEngine
from verl.workers.roles.losses import ppo_loss, value_loss

ENTROPY, KL, CLIP, DUAL, CLIP_VALUE = 0.1, 0.2, 0.2, 3.0, 0.5
ACTOR = FSDPActorConfig(
    ppo_micro_batch_size_per_gpu=1, entropy_coeff=ENTROPY, use_kl_loss=True, kl_loss_coef=KL, clip_ratio_c=DUAL
)
CRITIC = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, cliprange_value=CLIP_VALUE)
LOSSES = {"language_model": partial(ppo_loss, ACTOR), "value_model": partial(value_loss, CRITIC)}


def columns() -> dict[str, Tensor]:
    """Old numbers of every token; the untrained model gives most tokens about log(1 / vocabulary)."""
    generator = torch.Generator().manual_seed(9)
    shape = (cases.ROWS, cases.RESPONSE)
    return {
        "old_log_probs": -4.6 + 0.8 * torch.randn(shape, generator=generator),
        "ref_log_prob": -4.6 + 0.5 * torch.randn(shape, generator=generator),
        "values": 0.5 * torch.randn(shape, generator=generator),
        "returns": torch.randn(shape, generator=generator),
    }


def batch(rows: list[int], **meta: Any) -> DataProto:
    data = cases.batch(rows, **meta)
    for name, value in columns().items():
        data.batch[name] = value[rows]
    return data


def gradient(engine: BaseEngine, kind: str, rows: list[int], cut: dict[str, Any]) -> dict[str, Any]:
    """Return metrics, norm and whole gradient of a mini-batch, and leave the weights as they are."""
    with engine.train_mode():
        metrics = engine.forward_backward_batch(batch(rows, **cut), LOSSES[kind])
        named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        gradients = {name: full_tensor(grad).clone() for name, grad in named.items()}
    norm = torch.stack([value.square().sum() for value in gradients.values()]).sum().sqrt().item()
    return {"metrics": metrics, "norm": norm, "gradients": gradients}


# What plain transformers and the definitions make of it


def plain_logits(model: Any) -> Tensor:
    data = cases.tensors()
    output = model(
        input_ids=data["input_ids"],
        attention_mask=data["attention_mask"],
        position_ids=data["position_ids"],
        use_cache=False,
    )
    return output.logits[:, cases.PROMPT - 1 : -1]


def reference(model: Any, kind: str, loss_agg_mode: str = "token-mean") -> dict[str, Any]:
    """Run one padded forward of all rows, take the loss by its definition, and differentiate it."""
    data = cases.tensors() | columns()
    mask = data["response_mask"].float()
    count = mask.sum()

    def mean(matrix: Tensor) -> Tensor:
        return (matrix * mask).sum() / count

    def aggregated(matrix: Tensor) -> Tensor:
        sums = (matrix * mask).sum(-1)
        return {
            "token-mean": sums.sum() / count,
            "seq-mean-token-sum": sums.mean(),
            "seq-mean-token-mean": (sums / mask.sum(-1)).mean(),
            "seq-mean-token-sum-norm": sums.mean() / cases.RESPONSE,
        }[loss_agg_mode]

    logits = plain_logits(model)
    if kind == "value_model":
        values, old, returns = logits[..., 0], data["values"], data["returns"]
        stepped = torch.maximum(torch.minimum(values, old + CLIP_VALUE), old - CLIP_VALUE)
        plain, clipped = (values - returns) ** 2, (stepped - returns) ** 2
        loss = 0.5 * aggregated(torch.maximum(plain, clipped))
        metrics = {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": mean((clipped > plain).float()),
            "critic/vpred_mean": mean(values),
        }
    else:
        distribution = torch.log_softmax(logits / cases.TEMPERATURE, dim=-1)
        log_probs = distribution.gather(-1, data["responses"].unsqueeze(-1)).squeeze(-1)
        entropy = aggregated(-(distribution.exp() * distribution).sum(-1))
        advantages, log_ratio = data["advantages"], log_probs - data["old_log_probs"]
        plain = -advantages * log_ratio.exp()
        upper = torch.maximum(plain, -advantages * log_ratio.exp().clamp(1 - CLIP, 1 + CLIP))
        bounded = torch.where(advantages < 0, torch.minimum(upper, -DUAL * advantages), upper)
        inverse = data["ref_log_prob"] - log_probs
        policy, kl = aggregated(bounded), aggregated(inverse.exp() - inverse - 1)
        loss = policy - ENTROPY * entropy + KL * kl
        metrics = {
            "actor/pg_loss": policy,
            "actor/kl_loss": kl,
            "actor/kl_coef": torch.tensor(KL),
            "actor/ppo_kl": mean(-log_ratio),
            "actor/pg_clipfrac": mean((upper > plain).float()),
            "actor/pg_clipfrac_lower": mean((bounded < upper).float()),
        }
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    return {"metrics": {name: m.item() for name, m in metrics.items()}, "norm": norm, "gradients": gradients}


def load(folder: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder)
