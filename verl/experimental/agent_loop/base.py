"""What an agent loop is, and what it returns."""

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.experimental.agent_loop.servers import AsyncLLMServerManager


class AgentLoopMetrics(BaseModel):
    """Seconds that a trajectory spent on each activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """A trajectory, as an agent loop returns it.

    Attributes:
        prompt_ids: the tokens of the prompt, with all those of its images (``TokenOutput.expanded_prompt_ids``).
        response_ids: all later tokens: those that the model sampled, and those that tools and users added.
        response_mask: for each token of the response, 1 if the model sampled it, else 0.
        response_logprobs: log-probability of each token of the response; any number where the mask is 0.
        multi_modal_data: images and videos of the trajectory.
        reward_score: the score, if the loop knows it.
        num_turns: messages of the chat, the prompt's included.
        metrics: seconds by activity.
        extra_fields: further columns of the batch, by name.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class WholeConfig:
    """The configuration of the run, wrapped so that Hydra passes it on as it is; Hydra would build a dataclass anew."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """Produces one trajectory; each sample has its own instance.

    Args:
        trainer_config: the configuration of the run, as ``trainer_config.config``.
        server_manager: the way to the rollout servers.
        tokenizer: the tokenizer of the policy.
        processor: its processor, if it has one.
    """

    _class_initialized: ClassVar[bool] = False

    def __init__(
        self,
        trainer_config: WholeConfig,
        server_manager: "AsyncLLMServerManager",
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(
        cls,
        config: DictConfig,
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Any,
    ) -> None:
        """Prepare what all instances of a process share; called for each, so a subclass does its work only once."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Produce the trajectory of a row.

        Args:
            sampling_params: how to sample, for ``server_manager.generate``; ``seed`` is that of the sample.
            kwargs: the columns of the row that are no tensors, such as ``raw_prompt`` or ``extra_info``.
        """
