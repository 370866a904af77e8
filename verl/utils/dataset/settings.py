"""The keys of the ``data`` node that data sets and samplers read, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

Node = Mapping[str, Any]
"""A node of the configuration: a plain dict, a DictConfig, or a config dataclass."""


class _FromNode:
    """Base of dataclasses that take their fields from a node."""

    @classmethod
    def of(cls, node: Node) -> Self:
        """Read the keys of a node; a null counts as left out."""
        return cls(**{key.name: node[key.name] for key in fields(cls) if node.get(key.name) is not None})


@dataclass(frozen=True)
class ConversationColumns(_FromNode):
    """The columns of a conversation; ``data.multiturn`` may name them."""

    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"


@dataclass(frozen=True)
class DataSettings(_FromNode):
    """The keys of the ``data`` node that data sets and samplers read.

    The defaults apply to a data set that a caller constructs with a partial node. The node of a run holds every key;
    ``DataConfig`` gives its defaults.
    """

    prompt_key: str = "prompt"
    response_key: str = "response"
    image_key: str = "images"
    video_key: str = "videos"
    reward_fn_key: str = "data_source"
    prompt_dict_keys: list[str] | None = None
    response_dict_keys: list[str] | None = None
    cache_dir: str = "~/.cache/verl/rlhf"
    use_shm: bool = False
    max_length: int = 1024
    max_prompt_length: int = 1024
    truncation: str = "error"
    pad_mode: str = "right"
    filter_overlong_prompts: bool = True
    filter_overlong_prompts_workers: int | None = None
    return_raw_chat: bool = False
    return_full_prompt: bool = False
    return_multi_modal_inputs: bool = True
    need_tools_kwargs: bool = False
    shuffle: bool = True
    seed: int | None = None
    dataloader_num_workers: int = 8
    limit_images: int | None = None
    apply_chat_template_kwargs: Node = field(default_factory=dict)
    mm_processor_kwargs: Node = field(default_factory=dict)
    limit_mm_per_prompt: Node = field(default_factory=dict)

    def media_columns(self) -> dict[str, str]:
        """Return the column of each kind of media."""
        return {"image": self.image_key, "video": self.video_key}
