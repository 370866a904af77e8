"""Models that the tables of this package lack: mbridge builds them and converts their weights in both directions.

mbridge needs CUDA and Transformer Engine. It takes the parallel layout from Megatron-Core's ``parallel_state``.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import UnsupportedInput, WrongInput
from verl.models.mcore.families import find_family
from verl.utils.json_types import JsonObject

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig


def needs_bridge(hf_config: "PretrainedConfig", use_mbridge: bool) -> bool:
    """Whether mbridge serves a model: the tables lack its architecture, and ``megatron.use_mbridge`` is set."""
    if not use_mbridge:
        return False
    try:
        find_family(hf_config)
    except UnsupportedInput:
        return True
    return False


class Bridge:
    """mbridge's model of one architecture on this rank.

    Raises: ValueError when the package is not installed, or does not know the architecture.
    """

    def __init__(self, hf_config: "PretrainedConfig", dtype: torch.dtype, overrides: JsonObject) -> None:
        name = ", ".join(hf_config.architectures or ["none"])
        if importlib.util.find_spec("mbridge") is None:
            raise WrongInput(
                f"megatron.use_mbridge=true: architecture {name} is built by the package mbridge, which is not "
                "installed: install it, or set strategy=fsdp"
            )
        from mbridge import AutoBridge

        try:
            self._bridge = AutoBridge.from_config(hf_config, dtype=dtype)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise WrongInput(f"megatron.use_mbridge=true: mbridge cannot build architecture {name}: {error}") from error
        if overrides:
            self._bridge.set_extra_args(**overrides)
        self._dtype = dtype

    def build(self) -> "list[GPTModel]":
        """Return the chunks of this rank, without weights and without gradient buffers."""
        half = {"fp16": self._dtype is torch.float16, "bf16": self._dtype is torch.bfloat16}
        return list(self._bridge.get_model(wrap_with_ddp=False, **half))

    def load(self, chunks: "Sequence[GPTModel]", path: str) -> None:
        """Fill the chunks with the weights of a folder; collective."""
        self._bridge.load_weights(list(chunks), path)

    def weights(self, chunks: "Sequence[GPTModel]") -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order; collective."""
        with torch.no_grad():
            yield from self._bridge.export_weights(list(chunks))
