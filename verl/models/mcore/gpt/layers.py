"""The layers and heads of a ``GPTModel`` in plain torch, and hooks on its head and its embedding.

The layers are for use without Transformer Engine. Megatron-Core's own local layers support neither packed sequences nor
context parallelism, and their RMSNorm does not support sequence parallelism. These layers support all three.
"""

import copy
import inspect
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verl.models.transformers.attention import packed_attention
from verl.models.transformers.packed_sequences import PackedSequences
from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy, sum_gradients
from verl.utils.kernel.rows import HeadFormula
from verl.utils.megatron.tensor_parallel import vocab_range

if not isinstance(multi_latent_attention.TELinear, type):  # Megatron-Core 0.16 mistakes its placeholder for the real TE
    multi_latent_attention.HAVE_TE = False

LATENT_EPSILON = 1e-6
ATTENTION_OUTPUT_BIAS = "attention_output_bias"
"""Attribute that verl adds to a configuration: whether only the attention's output projection has a bias."""


@dataclass
class DeepFeatures:
    """Features that the tower's earlier layers add after the first decoder layers, at the tokens ``rows`` of this rank.

    Activation recomputation runs a decoder layer in a graph that does not reach the tower. So the sum's backward pass
    keeps the gradient of the features, and the embedding's backward pass, which comes after all layers, hands it on.
    """

    rows: Tensor  # (n,)
    values: list[Tensor]  # (n, hidden) for each layer
    gradients: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [None] * len(self.values)


@dataclass
class PackedRowParams(PackedSeqParams):
    """The boundaries of packed sequences, with tensors that are derived once and used by all layers."""

    sequences: PackedSequences | None = None
    deep: DeepFeatures | None = None


def packed_row_params(
    lengths: list[int], device: torch.device, ends: list[int] | None = None, longest: int | None = None
) -> PackedRowParams:
    """Return the boundaries of sequences with these lengths, which include padding.

    Args: ``ends`` are those of the nodes of a forest (``PackedSequences``), whose longest path has ``longest`` tokens.
    """
    sequences = PackedSequences(lengths, device, ends)
    bounds = sequences.cu_seqlens
    longest = longest or sequences.max_length
    return PackedRowParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        sequences=sequences,
    )


class PathRotary:
    """A hook that takes a text model's rotary angles by the tokens' positions instead of their indices in the row.

    ``positions`` (T,) apply to the next passes; None leaves the angles (length, 1, 1, head_dim) as they are.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None

    def __call__(
        self, module: nn.Module, args: tuple[int, ...], angles: Tensor | tuple[Tensor, float]
    ) -> Tensor | tuple[Tensor, float]:
        if self.positions is None:
            return angles
        if isinstance(angles, tuple):  # with the scale of YaRN
            return angles[0][self.positions], angles[1]
        return angles[self.positions]


def attach_paths(chunk: nn.Module) -> None:
    """Let a text model use given positions instead of the tokens' indices in a packed row."""
    chunk.paths = PathRotary()  # type: ignore[assignment]
    chunk.rotary_pos_emb.register_forward_hook(chunk.paths)  # type: ignore[union-attr, arg-type]


def _parameter(config: TransformerConfig, *shape: int) -> nn.Parameter:
    """Return an uninitialised parameter on the device of Megatron-Core's parameters."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


class RMSNorm(nn.Module):
    """Root-mean-square norm; with sequence parallelism Megatron-Core sums its weight gradient over the ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: str | bool | None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)
        nn.init.ones_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), None, self.eps)
        return normed.to(hidden.dtype) * self.weight


class LatentNorm(RMSNorm):
    """The norm of a latent in DeepSeek's attention, whose epsilon is fixed."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: str | bool | None
    ) -> None:
        super().__init__(config, hidden_size, LATENT_EPSILON)


class WholeLinear(nn.Module):
    """A replicated projection that each rank applies to its part of the sequence."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.weight = _parameter(config, width, config.hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return ((..., width), None), like Megatron-Core's projections."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """DeepSeek's attention with replicated projections to the latents.

    Megatron-Core's local layers shard them and gather the result, but their backward pass does not sum the gradients
    that the heads of each rank send to the shared key. Needed from 0.12 to 0.16.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)


class RowParallelLinearWithBias(RowParallelLinear):
    """The output projection of an attention with biases in a model whose MLP has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"bias": True}))


class PackedCoreAttention(MegatronModule):
    """Causal attention within each sequence of a packed row of (T, H, D) heads."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **others: AttnMaskType | str | int | None,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRowParams | None = None,
    ) -> Tensor:
        """Return (T, H * D)."""
        assert isinstance(packed_seq_params, PackedRowParams) and packed_seq_params.sequences is not None
        packed = packed_seq_params.sequences
        dropout = self.dropout if self.training else 0.0
        width = value.shape[-1]
        missing = query.shape[-1] - width
        if missing and value.is_cuda:  # the kernels need values as wide as queries
            value = F.pad(value, (0, missing))
        # Tensor-parallel ranks need different dropout masks; with sequence parallelism the whole block is forked.
        forks = dropout and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forks else nullcontext():
            if self.cp_group.size() > 1:
                out = self._context_parallel(query, key, value, packed, dropout)
            else:
                out = packed_attention(query, key, value, packed, self.scale, dropout)
        return out[..., :width].reshape(out.shape[0], -1)

    def _context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, dropout: float
    ) -> Tensor:
        """Attend from this rank's queries to the keys and values of all ranks.

        Context parallelism splits a sequence into 2 x ranks chunks and gives each rank one from both ends, so that
        causal attention costs every rank the same.
        """
        group = self.cp_group
        rank = group.rank()
        lengths = [length // group.size() for length in packed.lengths]
        outputs = []
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            k, v = (_GatherZigzag.apply(t, group) for t in (k, v))  # type: ignore[no-untyped-call]
            chunk = len(q) // 2
            column = torch.arange(chunk, device=q.device)
            position = torch.cat([column + rank * chunk, column + (2 * group.size() - 1 - rank) * chunk])
            mask = torch.arange(len(k), device=q.device).unsqueeze(0) <= position.unsqueeze(1)
            heads = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=self.scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class _ZigzagContext(Protocol):
    group: ProcessGroup


class _GatherZigzag(torch.autograd.Function):
    """Gather the chunks of one sequence from all ranks in order; the backward pass sums their gradients over ranks."""

    @staticmethod
    def forward(ctx: _ZigzagContext, mine: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])

    @staticmethod
    def backward(ctx: _ZigzagContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        chunks = grad.chunk(2 * ctx.group.size())
        rank = ctx.group.rank()
        return torch.cat([chunks[rank], chunks[-1 - rank]]), None


# Heads and hooks


class PositionPicker:
    """A hook before the head that passes only the hidden states of the positions ``keep``.

    Sequence parallelism spreads the positions over ranks, so the hook gathers them first and the head gets whole
    sequences.
    """

    def __init__(self, head: nn.Module, sequence_parallel: bool, tp_group: ProcessGroup) -> None:
        self.keep: Tensor | None = None
        self._gathers = sequence_parallel
        self._tp_group = tp_group
        head.register_forward_pre_hook(self)

    def __call__(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Replace the (t, 1, h) hidden states by those at the kept positions (k, 1, h)."""
        assert self.keep is not None
        hidden = args[0]
        if self._gathers:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return (hidden.index_select(0, self.keep), *args[1:])


@dataclass(frozen=True)
class HeadRequest:
    """A request to a fused head: score the tokens ``labels`` (k,) at the kept positions.

    It is the same on all tensor-parallel ranks. ``entropy`` is ``none``, ``value`` (without gradient) or ``grad``.
    """

    labels: Tensor
    temperature: float
    entropy: str


class FusedHead:
    """Replaces the forward of a language model's head and scores tokens without materialising logits.

    A request applies to the next forward pass only. Without one, the head returns logits.
    """

    def __init__(self, head: ColumnParallelLinear, vocab_size: int, tp_group: ProcessGroup, backend: str) -> None:
        self.request: HeadRequest | None = None
        self._head = head
        self._plain = head.forward
        self._parameters = inspect.signature(head.forward)
        self._vocab_size = vocab_size
        self._tp_group = tp_group
        self._backend = backend
        head.forward = self

    def __call__(
        self, hidden: Tensor, weight: Tensor | None = None, **kwargs: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states (k, 1, h) to ((k, 1, 1 or 2), None) in fp32: log-probability and, if requested, entropy."""
        request = self.request
        self.request = None
        if request is None:
            return self._plain(hidden, weight=weight, **kwargs)
        self._parameters.bind(hidden, weight=weight, **kwargs)  # raises the usual TypeError for an unknown keyword
        first, last = vocab_range(self._vocab_size, self._tp_group)
        mine = (request.labels >= first) & (request.labels < last)
        log_probs, entropy = linear_log_probs_and_entropy(
            sum_gradients(hidden.squeeze(1), self._tp_group),
            self._head.weight if weight is None else weight,
            torch.where(mine, request.labels - first, -1),
            HeadFormula(temperature=request.temperature, columns=last - first),
            entropy=request.entropy,
            backend=self._backend,
            group=self._tp_group,
        )
        columns = [log_probs] if entropy is None else [log_probs, entropy]
        return torch.stack(columns, dim=-1).unsqueeze(1), None


def detach_padding_row(embedding: VocabParallelEmbedding, token: int, tp_group: ProcessGroup) -> None:
    """Add a hook after the word embedding that stops gradients to the padding token's row.

    transformers does the same (``padding_idx``), and it matters because a policy may sample that token. The row still
    gets gradients from a tied head.
    """

    def detach(embedding: VocabParallelEmbedding, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Detach the output, (1, t, h) or under sequence parallelism (t / tp, 1, h), at padding ids (1, t)."""
        is_padding = args[0] == token
        if embedding.reduce_scatter_embeddings:
            is_padding = is_padding.T.chunk(tp_group.size())[tp_group.rank()]
        return torch.where(is_padding.unsqueeze(-1), output.detach(), output)

    embedding.register_forward_hook(detach)


class ValueHead(nn.Module):
    """A projection to one number, replicated on every rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = _parameter(config, 1, config.hidden_size)
        self.bias = _parameter(config, 1)

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: bool | None) -> tuple[Tensor, None]:
        """Return ((k, 1, 1), None), like a language model's head."""
        return nn.functional.linear(hidden, self.weight, self.bias), None


# Specs


def torch_layer_spec(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """Return the spec of one layer in plain torch, with experts or with an MLP."""
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization="RMSNorm",
        )
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if getattr(config, ATTENTION_OUTPUT_BIAS, False):
        attention.linear_proj = RowParallelLinearWithBias
    return spec


def block_spec(config: TransformerConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec of one stage's layers and the norm after the last: Transformer Engine's or these."""
    if config.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    kinds = [torch_layer_spec(config, has_experts) for has_experts in (False, True)]
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        frequency = [0] * config.num_layers
    elif isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [kinds[has_experts] for has_experts in frequency[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
