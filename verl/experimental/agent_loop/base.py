"""The interface of an agent loop, and its output."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig
from pydantic import BaseModel, Field

from verl.base_config import nearest
from verl.errors import WrongInput
from verl.experimental.agent_loop.attempts import Sampling
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.experimental.agent_loop.servers import AsyncLLMServerManager


class AgentLoopMetrics(BaseModel):
    """Seconds that a trajectory spent on each activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


@dataclass
class ToolCall:
    """A tool call and its outcome.

    Attributes:
        name: the tool, as the model wrote it.
        arguments: JSON text, as the model wrote it.
        outcome: ``ok``, ``error``, ``timeout``, ``unknown_tool`` or ``bad_arguments``.
        seconds: how long the tool took.
        reward: what the tool gave for the step, if it gave a number.
        text: the message to the model.
    """

    name: str
    arguments: str
    outcome: str = "ok"
    seconds: float = 0.0
    reward: float | None = None
    text: str = ""


@dataclass
class Turn:
    """The tokens ``start`` to ``end`` of a response, which belong to one message or to several of one role.

    Attributes:
        role: ``assistant`` for what the model sampled, else who added it: ``tool``, ``user``.
        seconds: how long it took to sample or to make.
        finish_reason: why sampling ended; None if nothing was sampled.
        versions: (version of the weights, number of tokens that they sampled), in the order of the tokens.
        calls: the tool calls that the tokens answer.
        text: the message, if the loop knows it; else the tokens say it.
    """

    role: str
    start: int
    end: int
    seconds: float = 0.0
    finish_reason: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    text: str | None = None


class AgentLoopOutput(BaseModel):
    """A trajectory, as an agent loop returns it.

    Attributes:
        prompt_ids: the tokens of the prompt, with all those of its images (``TokenOutput.expanded_prompt_ids``).
        response_ids: all later tokens: those that the model sampled, and those that tools and users added.
        response_mask: for each token of the response, 1 if the model sampled it, else 0.
        response_logprobs: log-probability of each token of the response; any number where the mask is 0.
        multi_modal_data: images and videos of the trajectory.
        num_later_images: how many of the images belong to the response; they are the last ones.
        num_later_videos: how many of the videos belong to the response.
        reward_score: the score, if the loop knows it; that of an earlier segment is a reward of its own.
        num_turns: messages of the chat, the prompt's included, of all segments.
        metrics: seconds by activity.
        extra_fields: further columns of the batch, by name.
        turns: the turns of the response, in order, if the loop keeps them.
        earlier: the segments before this one; whoever runs a loop that returns a list fills them in.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    num_later_images: int = 0
    num_later_videos: int = 0
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    turns: list[Turn] = Field(default_factory=list)
    earlier: list["AgentLoopOutput"] = Field(default_factory=list)


class WholeConfig:
    """The configuration of the run, wrapped so that Hydra passes it on unchanged; Hydra would rebuild a dataclass."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """Produces one trajectory; each sample has its own instance.

    Args:
        trainer_config: the configuration of the run, as ``trainer_config.config``.
        server_manager: the way to the rollout servers.
        tokenizer: the tokenizer of the policy.
        processor: its processor, if it has one.
        kwargs: what the loop's entry in the YAML file says beyond its name and class.

    Raises: WrongInput for an argument that no constructor takes, unless a user's constructor might read it.
    """

    _class_initialized: ClassVar[bool] = False

    def __init__(
        self,
        trainer_config: WholeConfig,
        server_manager: "AsyncLLMServerManager",
        tokenizer: "PreTrainedTokenizerBase",
        processor: "ProcessorMixin | None" = None,
        **kwargs: Json,
    ) -> None:
        _refuse_unread(type(self), kwargs)
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
        **kwargs: Json,
    ) -> None:
        """Prepare the state that all instances of a process share.

        Each instance calls this method, so a subclass must do the work only the first time.
        """
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: Sampling, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Produce the trajectory of a row; return its segments in order if the loop rewrote the history.

        Args:
            sampling_params: how to sample, for ``server_manager.generate``; ``seed`` is that of the sample.
            kwargs: the columns of the row that are no tensors, such as ``raw_prompt`` or ``extra_info``; a column that
                is null in the row is left out.
        """


def _refuse_unread(loop: type[AgentLoopBase], kwargs: Collection[str]) -> None:
    """Refuse arguments that nobody reads; a user's class with its own constructor may read any argument."""
    if not kwargs or not all(maker.__module__.startswith("verl.") for maker in (loop.__init__, loop.init_class)):
        return
    known = {
        name
        for base in loop.__mro__
        if "__init__" in vars(base)
        for name, each in inspect.signature(vars(base)["__init__"]).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    for name in kwargs:
        near = ", ".join(nearest(name, known) or sorted(known)) or "none"
        raise WrongInput(f"the argument {name!r} is unknown: {loop.__name__} takes {near}")
