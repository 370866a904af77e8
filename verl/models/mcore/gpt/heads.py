"""What stands before the first and behind the last layer of a ``GPTModel``."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from verl.utils.kernel.linear_cross_entropy import linear_log_probs_and_entropy, sum_gradients
from verl.utils.kernel.rows import HeadFormula
from verl.utils.megatron.tensor_parallel import vocab_range


class PositionPicker:
    """A hook before the head: it sees the hidden states of the positions in ``keep`` and no others.

    Under sequence parallelism the positions are on several ranks, so they are gathered here, and the head works on
    whole sequences.
    """

    def __init__(self, head: nn.Module, sequence_parallel: bool, tp_group: Any) -> None:
        self.keep: Tensor | None = None
        self._gathers, self._tp_group = sequence_parallel, tp_group
        head.register_forward_pre_hook(self)

    def __call__(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace (t, 1, h) hidden states by those of the kept positions (k, 1, h)."""
        assert self.keep is not None
        hidden = args[0]
        if self._gathers:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return (hidden.index_select(0, self.keep), *args[1:])


@dataclass(frozen=True)
class HeadRequest:
    """What a fused head is asked: the tokens (k,) read at the kept positions, the same on all tensor-parallel ranks.

    ``entropy`` is ``none``, ``value`` (without gradient) or ``grad``.
    """

    labels: Tensor
    temperature: float
    entropy: str


class FusedHead:
    """Stands for the forward of a language model's head: it scores tokens without making their logits.

    A request serves the next forward pass; without one there are logits, as before.
    """

    def __init__(self, head: Any, vocab_size: int, tp_group: Any, backend: str) -> None:
        self.request: HeadRequest | None = None
        self._head, self._plain = head, head.forward
        self._vocab_size, self._tp_group, self._backend = vocab_size, tp_group, backend
        head.forward = self

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return ((k, 1, 1 or 2), no bias) in fp32 of hidden states (k, 1, h): log-probability, entropy where asked."""
        request, self.request = self.request, None
        if request is None:
            found: tuple[Tensor, Tensor | None] = self._plain(hidden, weight=weight, **kwargs)
            return found
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
    """A hook behind the word embedding: the row of the padding token does not learn from where it is read.

    So it is in transformers (``padding_idx``), and a policy may sample that token. A head that is tied to the embedding
    goes on teaching it.
    """

    def __init__(self, embedding: nn.Module, token: int, tp_group: Any) -> None:
        self._token, self._tp_group = token, tp_group
        embedding.register_forward_hook(self)

    def __call__(self, embedding: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Detach where the ids (1, t) are padding; sequence parallelism leaves (t / tp, 1, h), else it is (1, t, h)."""
        is_padding = args[0] == self._token
        if embedding.reduce_scatter_embeddings:
            is_padding = is_padding.T.chunk(self._tp_group.size())[self._tp_group.rank()]
        return torch.where(is_padding.unsqueeze(-1), output.detach(), output)


class ValueHead(nn.Module):
    """A projection to one number, whole on every rank."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(1, **options))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """Return ((k, 1, 1), no bias), as the head of a language model does."""
        return nn.functional.linear(hidden, self.weight, self.bias), None
