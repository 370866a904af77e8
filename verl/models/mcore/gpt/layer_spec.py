"""The layers of a ``GPTModel`` in plain torch, where Transformer Engine is not there to provide them.

Megatron-Core's own local layers know neither packed sequences nor context parallelism nor, in their RMSNorm, sequence
parallelism. These know all three.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verl.models.transformers.attention import PackedSequences, packed_attention


@dataclass
class PackedRowParams(PackedSeqParams):
    """The boundaries of packed sequences, with what our attention derives from them once for all layers."""

    sequences: PackedSequences | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm; under sequence parallelism the gradient of its weight is summed over the ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), None, self.eps)
        return normed.to(hidden.dtype) * self.weight


class PackedCoreAttention(MegatronModule):
    """Causal attention within each sequence of a packed row of (T, H, D) heads."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRowParams | None = None,
    ) -> Tensor:
        """Return (T, H * D)."""
        assert isinstance(packed_seq_params, PackedRowParams) and packed_seq_params.sequences is not None
        packed = packed_seq_params.sequences
        dropout = self.dropout if self.training else 0.0
        if self.cp_group.size() > 1:
            out = _context_parallel(query, key, value, packed, self.scale, dropout, self.cp_group)
        else:
            out = packed_attention(query, key, value, packed, self.scale, dropout)
        return out.reshape(out.shape[0], -1)


# Context parallelism: a sequence is cut into 2 x ranks chunks, of which a rank holds one from each end


class _GatherZigzag(torch.autograd.Function):
    """Chunks of one sequence from all ranks, in order; the gradient of each is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        chunks, rank = grad.chunk(2 * ctx.group.size()), ctx.group.rank()
        return torch.cat([chunks[rank], chunks[-1 - rank]]), None


def _context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float,
    dropout: float,
    group: ProcessGroup,
) -> Tensor:
    """Let this rank's queries attend to the keys and values of all ranks."""
    lengths = [length // group.size() for length in packed.lengths]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = _GatherZigzag.apply(k, group), _GatherZigzag.apply(v, group)  # type: ignore[no-untyped-call]
        chunk, rank = len(q) // 2, group.rank()
        column = torch.arange(chunk, device=q.device)
        position = torch.cat([column + rank * chunk, column + (2 * group.size() - 1 - rank) * chunk])
        mask = torch.arange(len(k), device=q.device).unsqueeze(0) <= position.unsqueeze(1)
        heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


# Specs


def torch_layer_spec(config: Any) -> ModuleSpec:
    """Return the spec of one layer in plain torch."""
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    return spec


def torch_block_spec(config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one stage with the norm behind the last."""
    layer = torch_layer_spec(config)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
