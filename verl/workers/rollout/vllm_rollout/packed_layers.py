"""Linear layers of an engine on a CPU whose products use packed copies of their weights."""

from typing import Any

import torch
from torch import nn

from verl.utils.numerics.blocks import product_on_blocks
from verl.utils.numerics.packed import PackedProduct

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLayers:
    """The layers of a vLLM model that can be packed, and their packed weights.

    A layer keeps its plain weight, which an update loads and from which the next copy is made.
    """

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._plain: dict[nn.Module, Any] = {}
        self._vocabulary: list[nn.Module] = []  # their plain weights are read as well, as embeddings
        for path, layer in model.named_modules(remove_duplicate=False):
            product = vars(layer).get("cpu_linear")
            weight = getattr(layer, "weight", None)
            if product not in (torch.nn.functional.linear, product_on_blocks) or weight is None:
                continue
            if weight.dim() != 2 or weight.dtype not in _DTYPES or weight.is_meta or layer in self._plain:
                continue
            if isinstance(layer, VocabParallelEmbedding):
                if not isinstance(layer, ParallelLMHead) and not path.endswith("lm_head"):
                    continue
                self._vocabulary.append(layer)
            self._plain[layer] = product
        self.make()

    def make(self) -> None:
        """Pack all weights."""
        for layer, plain in self._plain.items():
            product = PackedProduct(layer.get_parameter("weight"), on_blocks=plain is product_on_blocks)
            layer.cpu_linear = product  # type: ignore[assignment]

    def drop(self) -> None:
        """Free the packed weights; products use the plain ones until they are packed again."""
        for layer, plain in self._plain.items():
            layer.cpu_linear = plain

    def check(self) -> None:
        """Raise RuntimeError if an output layer has another packed weight than plain one, which may be an embedding."""
        for layer in self._vocabulary:
            product = vars(layer)["cpu_linear"]
            weight = layer.get_parameter("weight")
            if isinstance(product, PackedProduct) and not product.weight().equal(weight):
                raise RuntimeError("weight sync: the packed output layer has other weights than the plain one")
