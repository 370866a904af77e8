"""The parameters of a rank out of checkpoint tensors, of which it reads its parts and nothing but them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from verl.models.mcore.gpt.build import named_parameters
from verl.models.mcore.weights import ReadPart, Shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_parts(chunks: Sequence[Any], hf_config: "PretrainedConfig", is_value_model: bool, read: ReadPart) -> None:
    """Fill the parameters of the chunks of this rank by what ``read`` returns, in the order of the parameters."""
    dense = _shard(parallel_state.get_tensor_model_parallel_group())
    in_expert = _shard(parallel_state.get_expert_tensor_parallel_group())
    with torch.no_grad():
        for chunk in chunks:
            for named in named_parameters(chunk, hf_config, is_value_model):
                shard = in_expert if named.is_expert else dense
                part = named.rule.load(read, shard, named.checkpoint_names, named.parameter.shape)
                if part.device.type != "meta":  # of a plan, which reads nothing
                    named.parameter.copy_(part)


def _shard(group: Any) -> Shard:
    return Shard(group.rank(), group.size())
