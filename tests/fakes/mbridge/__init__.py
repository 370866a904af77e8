"""A fake of the package mbridge, for machines without CUDA and Transformer Engine.

It has the methods that the engine calls, and builds and converts by the tables of verl.models.mcore, under the name of
an architecture that these tables lack.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "BridgedForCausalLM"
CALLS: list[str] = []


class AutoBridge:
    """Serves Qwen2 under the name ``BridgedForCausalLM``."""

    def __init__(self, hf_config: Any, dtype: torch.dtype) -> None:
        self.hf_config = copy.deepcopy(hf_config)
        self.hf_config.architectures = ["Qwen2ForCausalLM"]
        self.dtype = dtype
        self.extra: dict[str, Any] = {}

    @classmethod
    def from_config(cls, hf_config: Any, dtype: torch.dtype) -> "AutoBridge":
        """Return the bridge of an architecture."""
        CALLS.append("from_config")
        if hf_config.architectures != [ARCHITECTURE]:
            raise ValueError(f"unregistered model {hf_config.architectures}")
        return cls(hf_config, dtype)

    def set_extra_args(self, **kwargs: Any) -> None:
        """Take fields of Megatron-Core's configuration."""
        self.extra |= kwargs

    def get_model(self, wrap_with_ddp: bool, fp16: bool, bf16: bool) -> list[Any]:
        """Return the chunks of this rank in the layout of ``parallel_state``."""
        from verl.models.mcore.gpt.build import hf_to_mcore_config, init_mcore_model

        assert not wrap_with_ddp and not fp16 and bf16 == (self.dtype is torch.bfloat16)
        CALLS.append("get_model")
        config = hf_to_mcore_config(self.hf_config, self.dtype, **self.extra)
        return [init_mcore_model(config, self.hf_config)]

    def load_weights(self, models: Sequence[Any], weights_path: str) -> None:
        """Fill the chunks from a folder."""
        from verl.models.mcore.gpt.build import load_parts
        from verl.workers.engine.weights import SafetensorsReader

        CALLS.append("load_weights")
        load_parts(models, self.hf_config, False, SafetensorsReader(weights_path).read)

    def export_weights(self, models: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor)."""
        from verl.models.mcore.gpt.export import exported_weights

        CALLS.append("export_weights")
        yield from exported_weights(models, self.hf_config, False)
