"""Heads of a ``GPTModel``, and hooks on its head and its embedding."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy, sum_gradients
from verl.utils.kernel.rows import HeadFormula
from verl.utils.megatron.tensor_parallel import vocab_range


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

    def __call__(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
        self._vocab_size = vocab_size
        self._tp_group = tp_group
        self._backend = backend
        head.forward = self

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Map hidden states (k, 1, h) to ((k, 1, 1 or 2), None) in fp32: log-probability and, if requested, entropy."""
        request = self.request
        self.request = None
        if request is None:
            return self._plain(hidden, weight=weight, **kwargs)
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


class PaddingRow:
    """A hook after the word embedding that stops gradients to the padding token's row.

    transformers does the same (``padding_idx``), and it matters because a policy may sample that token. The row still
    gets gradients from a tied head.
    """

    def __init__(self, embedding: nn.Module, token: int, tp_group: ProcessGroup) -> None:
        self._token = token
        self._tp_group = tp_group
        embedding.register_forward_hook(self)

    def __call__(self, embedding: VocabParallelEmbedding, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Detach the output, (1, t, h) or under sequence parallelism (t / tp, 1, h), at padding ids (1, t)."""
        is_padding = args[0] == self._token
        if embedding.reduce_scatter_embeddings:
            is_padding = is_padding.T.chunk(self._tp_group.size())[self._tp_group.rank()]
        return torch.where(is_padding.unsqueeze(-1), output.detach(), output)


class ValueHead(nn.Module):
    """A projection to one number, replicated on every rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(1, **options))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """Return ((k, 1, 1), None), like a language model's head."""
        return nn.functional.linear(hidden, self.weight, self.bias), None
