"""What stands before the first and behind the last layer of a ``GPTModel``."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn


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
